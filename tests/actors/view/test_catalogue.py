"""The catalogue has what the run's files have, whatever happens to the files meanwhile."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from actors.ledger import LedgerReader
from actors.telemetry import reporter
from actors.view import catalogue
from actors.view.catalogue import Catalogue, cache_folder, catalogue_path, connect
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeRun, sums


def brought_up(run: MadeRun, folder: Path) -> Catalogue:
    """A catalogue that has all of the run; the test closes it by the end of the process."""
    made = Catalogue(run.config, folder)
    made.update_all()
    return made


def groups(config: RunConfig, folder: Path) -> dict[int, sqlite3.Row]:
    """All groups by ordinal."""
    with closing(connect(catalogue_path(folder, config.output))) as database:
        return {row["ordinal"]: row for row in database.execute("SELECT * FROM groups")}


def trajectories(config: RunConfig, folder: Path) -> list[tuple[int, int, float, int, str]]:
    """Ordinal, completion, reward, characters and end of all trajectories."""
    query = "SELECT ordinal, completion, reward, characters, stop FROM trajectories"
    with closing(connect(catalogue_path(folder, config.output))) as database:
        return [tuple(row) for row in database.execute(query)]


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_every_group_of_the_run_is_there_with_its_numbers(make: Make, tmp_path: Path, steps: int) -> None:
    """Groups with a line in samples.jsonl, groups that only the ledger has, dropped ones and those under way."""
    run = make()
    messages = [one for number in range(steps) for one in run.add_step(sampled=number % 3, dropped=number % 2)]
    issued = run.add_issued()
    brought_up(run, tmp_path / "cache").close()
    found = groups(run.config, tmp_path / "cache")
    assert {ordinal: row["state"] for ordinal, row in found.items()} == {
        row.ordinal: str(row.state) for row in run.store.groups()
    }
    assert found[issued]["source"] == ""
    lines = {line["ordinal"] for line in _lines(run.config.output / "samples.jsonl")}
    assert {ordinal for ordinal, row in found.items() if row["source"] == "line"} == lines
    expected = []
    for one in messages:
        played = [
            sum(len(text) for text in _written(one.transcript(g)[1])) if one.transcripts else len(one.completions[g])
            for g in range(one.num_completions)
        ]
        conditions = one.stop_conditions
        expected += [(one.ordinal, g, float(one.rewards_G[g]), played[g], conditions[g]) for g in range(len(played))]
    assert sorted(trajectories(run.config, tmp_path / "cache")) == sorted(expected)


def _written(behind: list[dict[str, object]]) -> list[str]:
    """What the assistant has written in the shop: thoughts and call of the first message, then the answer."""
    call = behind[0]["tool_calls"][0]["function"]  # type: ignore[index]
    first = f"{behind[0]['reasoning_content']}\n{call['name']}({json.dumps(call['arguments'])})"
    return [first, str(behind[2]["content"])]


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_pieces_of_work_are_small_and_the_newest_lines_come_first(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of one line, the newest line is there after the first of them, and no line is left out."""
    monkeypatch.setattr(catalogue, "CHUNK_BYTES", 1)
    run = make(6)
    shutil.copy(run.config.output / "samples.jsonl", tmp_path / "lines")
    run.config.ledger_path.rename(tmp_path / "aside")  # lines alone
    made = Catalogue(run.config, tmp_path / "cache")
    seen = []
    while made.update():
        seen.append(sorted(groups(run.config, tmp_path / "cache")))
    made.close()
    lines = [int(str(line["ordinal"])) for line in _lines(tmp_path / "lines")]
    assert [len(one) for one in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[0] == [lines[-1]]
    assert seen[-1] == lines


def test_a_growing_run_is_followed(make: Make, tmp_path: Path) -> None:
    """Each new step is there after the next update, and a group's state follows the ledger."""
    run = make(2)
    made = brought_up(run, tmp_path / "cache")
    issued = run.add_issued()
    for _ in range(3):
        run.add_step()
        made.update_all()
        found = groups(run.config, tmp_path / "cache")
        assert max(row["step"] or 0 for row in found.values()) == run.last
    assert found[issued]["state"] == "issued"
    run.save(3)
    made.update_all()
    states = {row["step"]: row["state"] for row in groups(run.config, tmp_path / "cache").values() if row["step"]}
    assert states == {1: "durable", 2: "durable", 3: "durable", 4: "trained", 5: "trained"}
    made.close()


def test_a_line_that_is_being_written_waits_for_its_end(make: Make, tmp_path: Path) -> None:
    """Half a line is no group; the whole line is."""
    run = make(1)
    path = run.config.output / "samples.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    made = brought_up(run, tmp_path / "cache")
    assert groups(run.config, tmp_path / "cache")[0]["source"] == "payload"
    with path.open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    made.update_all()
    assert groups(run.config, tmp_path / "cache")[0]["source"] == "line"
    made.close()


def test_lines_that_a_restarted_packer_cuts_off_leave_the_catalogue(make: Make, tmp_path: Path) -> None:
    """Then the lines written in their place come in."""
    run = make(5)
    path = run.config.output / "samples.jsonl"
    made = brought_up(run, tmp_path / "cache")
    lines = path.read_bytes().splitlines(keepends=True)
    other = json.loads(lines[3]) | {"ordinal": 1000, "completions": ["another text"] * 4}
    with path.open("r+b") as file:  # as the reporter does, in the same file
        file.truncate(sum(map(len, lines[:3])))
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(other).encode() + b"\n")
    made.update_all()
    found = groups(run.config, tmp_path / "cache")
    cut = [json.loads(line)["ordinal"] for line in lines[3:]]
    assert [found[ordinal]["source"] for ordinal in cut] == ["payload", "payload"]
    assert found[1000]["source"] == "line"
    made.close()


def test_a_file_that_becomes_the_older_one_is_not_read_again_and_leaves_with_the_next(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation keeps the groups of the file; the second rotation takes them away, unless the ledger has them."""
    run = make(3)
    made = brought_up(run, tmp_path / "cache")
    before = groups(run.config, tmp_path / "cache")
    monkeypatch.setattr(reporter, "MAX_SAMPLES_BYTES", 1)  # each line is a file of its own
    run.add_step()
    assert (run.config.output / "samples.older.jsonl").exists()
    made.update_all()
    after = groups(run.config, tmp_path / "cache")
    assert all(tuple(after[ordinal]) == tuple(row) for ordinal, row in before.items() if row["source"] == "line")
    run.compact(2)
    run.add_step()
    made.update_all()
    left = groups(run.config, tmp_path / "cache")
    assert {ordinal for ordinal, row in left.items() if row["source"] == "line"} == {9, 12}
    assert {row["step"] for row in left.values()} == {3, 4, 5}
    with closing(connect(made.path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'texts_%'")}
        numbers = {number for (number,) in database.execute("SELECT id FROM files")}
    assert {name for name in tables if name.count("_") == 1} == {"texts_0", *(f"texts_{number}" for number in numbers)}
    made.close()


def test_compacted_groups_leave_the_catalogue_unless_they_have_a_line(make: Make, tmp_path: Path) -> None:
    """A line is read without the ledger; a payload is not."""
    run = make(4)
    made = brought_up(run, tmp_path / "cache")
    run.compact(2)
    made.update_all()
    found = groups(run.config, tmp_path / "cache")
    assert {ordinal: row["state"] for ordinal, row in found.items() if row["step"] <= 2} == {0: None, 3: None}
    assert {row[0] for row in trajectories(run.config, tmp_path / "cache")} == set(found)
    made.close()


def test_the_ledger_is_only_read_and_never_locked(make: Make, tmp_path: Path) -> None:
    """The packer's commits go on while the catalogue is made, and no byte of the ledger is another one."""
    run = make(3)
    run.store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = run.config.ledger_path.read_bytes()
    made = Catalogue(run.config, tmp_path / "cache")
    run.store.database.execute("BEGIN IMMEDIATE")  # the packer is within a commit all the time
    made.update_all()
    run.store.database.execute("COMMIT")
    made.close()
    assert run.config.ledger_path.read_bytes() == before
    assert len(groups(run.config, tmp_path / "cache")) == 9


def test_strange_lines_are_left_out_and_stop_nothing(make: Make, tmp_path: Path) -> None:
    """Lines of no JSON, of other programs, with half a surrogate pair, and an answer of a megabyte."""
    run = make(1)
    path = run.config.output / "samples.jsonl"
    good = json.loads(path.read_text())
    strange = [b"\xff\xfe\n", b"[]\n", b"{}\n", b"7\n", b'"text"\n', b"\n"]
    texts = ["\ud800 half", "x" * (1 << 20), "\u202eright to left\u0000", "<script>"]
    kept = json.dumps(good | {"ordinal": 50, "completions": texts}).encode() + b"\n"
    with path.open("ab") as file:
        file.write(b"".join([*strange, kept, *strange]))
    brought_up(run, tmp_path / "cache").close()
    assert groups(run.config, tmp_path / "cache").keys() >= {0, 1, 2, 50}
    lengths = [row[3] for row in trajectories(run.config, tmp_path / "cache") if row[0] == 50]
    assert lengths == [6, 1 << 20, 15, 8]


def test_texts_of_gone_payloads_do_not_pile_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of their trigrams is made again once most of it is of groups that are gone."""
    monkeypatch.setattr(catalogue, "SPARE_TEXTS", 2)
    run = make()
    made = Catalogue(run.config, tmp_path / "cache")
    sizes = []
    for step in range(1, 12):
        run.add_step(sampled=0)
        if step > 2:
            run.compact(step - 2)
        made.update_all()
        with closing(connect(made.path)) as database:
            sizes.append(database.execute("SELECT COUNT(*) FROM texts_0_docsize").fetchone()[0])
    assert max(sizes) <= 2 * 6 + 2 + 3
    assert sizes[-1] >= 6
    made.close()


def test_two_viewers_of_a_run_share_a_catalogue(make: Make, tmp_path: Path) -> None:
    """Both may bring it up to date, one after the other."""
    run = make(2)
    first, second = Catalogue(run.config, tmp_path / "cache"), Catalogue(run.config, tmp_path / "cache")
    first.update_all()
    run.add_step()
    second.update_all()
    first.update_all()
    assert first.path == second.path
    assert len(groups(run.config, tmp_path / "cache")) == 9
    first.close()
    second.close()


def test_a_cache_that_cannot_be_used_is_named(make: Make, tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"--cache: .*can't be used"):
        Catalogue(make().config, tmp_path / "file")
    path = catalogue_path(tmp_path / "cache", make(name="other").config.output)
    path.parent.mkdir()
    path.write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match="remove it, or name another folder"):
        Catalogue(make(name="other2").config.model_copy(update={"output_dir": str(tmp_path / "other")}), path.parent)


def test_catalogues_are_below_the_cache_folder_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME, else ~/.cache; never in the run's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "grpo-actors/view"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/grpo-actors/view"


def test_a_run_without_a_ledger_is_read_from_its_lines(make: Make, tmp_path: Path) -> None:
    """As after a run was copied without it."""
    run = make(2)
    run.close()
    run.config.ledger_path.unlink()
    brought_up(run, tmp_path / "cache").close()
    assert sorted(groups(run.config, tmp_path / "cache")) == [0, 3]


def test_the_reader_finds_single_rows_and_steps(make: Make) -> None:
    """As the whole lists have them; None for what is not there."""
    run = make()
    run.add_step(dropped=1, groups=[sums(0, 1, 4)])
    reader = LedgerReader.of(run.config.ledger_path)
    assert [reader.group(row.ordinal) for row in reader.groups()] == reader.groups()
    assert [reader.step(1)] == reader.steps()
    assert (reader.group(99), reader.step(99), reader.groups_from(0)) == (None, None, [])
    assert reader.payload_bytes([1, 2, 99]) > 0
    reader.close()
