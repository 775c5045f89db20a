"""An output_dir and a ledger may be a run's, or new; files of something else under their names are left alone."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.ledger import Store
from actors.ops.preflight import preflight
from actors.ops.up.supervisor import supervise
from actors.process.ledger_file import problem_of
from actors.process.output_dir import MARKER, WRITTEN, take
from schemas.config import RunConfig
from schemas.config.resolved import RESOLVED, write_resolved
from schemas.errors import ConfigError
from tests.ring.harness import ring_config


def _mine(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _texts(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [*WRITTEN, ".up.lock", ".actors.lock"])
@pytest.mark.parametrize("start", [preflight, supervise, take])
def test_an_output_dir_with_files_of_something_else_is_refused_by_name_and_left_alone(
    tmp_path: Path, start: Callable[[RunConfig], object], name: str
) -> None:
    """Whatever a run would replace, cut or append to: at the check, by `actors up`, and by an actor at its start."""
    config = ring_config(tmp_path)
    _mine(config.output / name / "a.txt" if name in ("checkpoints", "logs") else config.output / name)
    before = _texts(tmp_path)
    with pytest.raises(ConfigError, match=rf"output_dir: {config.output} has {name} of something else"):
        start(config)
    assert _texts(tmp_path) == before


def test_other_files_in_an_output_dir_are_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project folder named `.`, with folders for checkpoints and logs made in advance, is as good as a new one."""
    monkeypatch.chdir(tmp_path)
    config = ring_config(tmp_path).model_copy(update={"output_dir": "."})
    _mine(tmp_path / "train.py")
    _mine(tmp_path / "data" / "metrics.jsonl")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    before = _texts(tmp_path)
    preflight(config)
    take(config)
    take(config)
    assert _texts(tmp_path).keys() - before.keys() == {str(tmp_path / MARKER)}
    assert before.items() <= _texts(tmp_path).items()


def test_an_empty_output_dir_becomes_a_runs_and_is_known_again(tmp_path: Path) -> None:
    """Once marked, whatever lies under a run's names is the run's."""
    config = ring_config(tmp_path)
    config.output.mkdir()
    take(config)
    _mine(config.output / "metrics.jsonl")
    take(config)
    preflight(config)


@pytest.mark.parametrize("sign", ["ledger", "checkpoint", "ledger elsewhere"])
def test_a_run_from_before_there_was_a_marker_is_known(tmp_path: Path, sign: str) -> None:
    """By its configuration and ledger; by a checkpoint, where ledger and trainer have disks of their own."""
    config = ring_config(tmp_path, **({"ledger": {"path": str(tmp_path / "l.sqlite")}} if "elsewhere" in sign else {}))
    _mine(config.output / "metrics.jsonl")
    _mine(config.output / "logs" / "trainer-0.log")
    if sign == "checkpoint":
        _mine(config.output / "checkpoints" / "step_2" / "witness.json", "{}")
    else:
        write_resolved(config)
        Store(config.ledger_path).close()
    take(config)
    assert (config.output / MARKER).is_file()


def test_a_machine_that_had_only_logs_of_engines_is_known(tmp_path: Path) -> None:
    """An output_dir from before there was a marker, on a machine with inference actors alone."""
    config = ring_config(tmp_path)
    for name in ("inference-3.log", "inference-3.vllm.log", "inference-127.0.0.1-8000-server.log"):
        _mine(config.output / "logs" / name)
    take(config)
    assert (config.output / MARKER).is_file()


def test_a_folder_that_can_not_be_made_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below /proc nobody may make one, not even root: at the check, and at the start of an actor that did not check."""
    config = ring_config(tmp_path).model_copy(update={"output_dir": "/proc/nowhere/out"})
    for start in (preflight, supervise):
        with pytest.raises(ConfigError, match=r"output_dir: /proc/nowhere/out can't be written to: .*set a folder"):
            start(config)
    with pytest.raises(ConfigError, match=r"output_dir: /proc/nowhere/out can't be written to: "):
        take(config)
    weights = ring_config(tmp_path, weights={"directory": "/proc/nowhere/weights"})
    with pytest.raises(ConfigError, match=r"weights\.directory: /proc/nowhere/weights can't be written to: "):
        preflight(weights)
    with pytest.raises(ConfigError, match=r"ledger\.path: /proc/nowhere/ledger\.sqlite can't be made: "):
        Store(Path("/proc/nowhere/ledger.sqlite"))


def _other_database(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE customers (name TEXT)")
    database.execute("INSERT INTO customers VALUES ('me')")
    database.commit()
    database.close()


def _other_database_in_its_log(path: Path) -> None:
    """A process that writes to it has been killed: its tables are in the log alone."""
    copy = path.with_name("copy")
    database = sqlite3.connect(copy, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE customers (name TEXT)")
    for suffix in ("", "-wal"):
        shutil.copy(f"{copy}{suffix}", f"{path}{suffix}")
    database.close()


def _tables_of_the_same_name(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE groups (id INTEGER, members TEXT)")
    database.commit()
    database.close()


def _text(path: Path) -> None:
    path.write_text("notes\n" * 100)


def _beside(suffix: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.with_name(f"{path.name}{suffix}").write_text("mine")

    return make


def _log_beside_ledger(path: Path) -> None:
    Store(path).close()
    path.with_name(f"{path.name}-wal").write_text("mine")


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (_other_database, r"is a database of something else \(it has the tables customers\)"),
        (_other_database_in_its_log, r"is a database of something else \(it has the tables customers\)"),
        (_tables_of_the_same_name, r"is a database of something else \(it has the tables groups\)"),
        (_text, "it is no SQLite file"),
        (lambda path: (path / "below").mkdir(parents=True), "is no file"),
        (_beside(".lock"), "is not the lock of a ledger"),
        (_beside("-wal"), "belongs to a database that is not there"),
        (_beside("-shm"), "belongs to a database that is not there"),
        (_beside("-journal"), "belongs to a database that is not there"),
        (_beside(".backup"), "is no backup of a ledger"),
        (_log_beside_ledger, "is not SQLite's log of a ledger"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused_by_name_and_not_touched(
    tmp_path: Path, there: Callable[[Path], None], words: str
) -> None:
    """Nor is one that lies beside it, where SQLite and the lock would write. At the check, and by the packer."""
    config = ring_config(tmp_path, ledger={"path": str(tmp_path / "mine.sqlite")})
    there(config.ledger_path)
    before = _texts(tmp_path)
    with pytest.raises(ConfigError, match=rf"ledger\.path: .*{words}"):
        preflight(config)
    with pytest.raises(ConfigError, match=rf"ledger\.path: .*{words}"):
        Store(config.ledger_path)
    after = _texts(tmp_path)
    assert before.items() <= after.items()
    assert {path for path in after.keys() - before.keys() if not path.endswith("-shm")} == set()


def test_a_ledger_an_empty_file_and_one_in_use_are_good(tmp_path: Path) -> None:
    """Also one whose packer has been killed, with all of it in the log, and one from before there were later tables."""
    path = tmp_path / "l.sqlite"
    assert problem_of(path) == ""
    path.touch()
    assert problem_of(path) == ""
    store = Store(path)
    assert problem_of(path) == ""
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{tmp_path}/killed{suffix}")
    assert problem_of(tmp_path / "killed") == ""
    store.close()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("DROP TABLE pools")
    database.execute("ALTER TABLE groups DROP COLUMN resamples")
    database.close()
    assert problem_of(path) == ""
    Store(path).close()


def test_the_resolved_configuration_is_among_the_names_that_are_looked_for() -> None:
    """It is replaced at each start."""
    assert RESOLVED in WRITTEN
