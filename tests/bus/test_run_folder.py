"""The folder of a run below weights.directory: what is in it goes with the run, and nothing else is ever touched."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.run_folder import MARKER, RunFolder, Scratch, folders_of, scratch_folder, weights_folder
from bus.weights import Weights
from bus.weights.filesystem import FilesystemPublisher
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion
from tests.ring.harness import ring_config

FULL = Weights("full", {"a": torch.ones(3)})


def _configured(folder: Path, directory: Path, name: str = "a") -> RunConfig:
    """A run whose output_dir has this name, with this weights.directory."""
    made = ring_config(folder, weights={"directory": str(directory)})
    return made.model_copy(update={"output_dir": str(folder / name)})


def _fill(directory: Path) -> dict[str, str]:
    """Put other people's files in a folder; returns all of them with their texts."""
    (directory / "thesis" / "1.0").mkdir(parents=True, exist_ok=True)
    (directory / "1.0").mkdir()
    (directory / "server.inference-0").mkdir()
    for name in ("thesis/precious.txt", "thesis/1.0/x", "1.0/model.safetensors", "server.inference-0/y", "data.jsonl"):
        (directory / name).write_text(f"precious {name}")
    return _texts(directory)


def _texts(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_text() for path in files}


def _kept(before: dict[str, str]) -> bool:
    return all(Path(path).read_text() == text for path, text in before.items())


def _whole_life(config: RunConfig) -> None:
    """Publish, crash, publish again, prune, end, and clean up behind everything."""
    first = FilesystemPublisher(weights_folder(config), 2)
    first.publish(PolicyVersion(lineage=1, version=0), FULL)
    first.leave()
    second = FilesystemPublisher(weights_folder(config), 2)
    for version in range(4):
        second.publish(PolicyVersion(lineage=2, version=version), FULL)
        second.prune(keep_version=version)
    scratch = Scratch(scratch_folder(config, own=True), "server.inference-0")
    (scratch.make() / "2.3.1").mkdir()
    second.close()
    scratch.close()
    for folder in folders_of(config):
        folder.clear()


def _plain(folder: Path) -> Path:
    return folder


def _linked(folder: Path) -> Path:
    link = folder.with_name("link")
    link.symlink_to(folder)
    return link


def _here(folder: Path) -> Path:
    os.chdir(folder)
    return Path()


@pytest.mark.parametrize("named", [_plain, _linked, _here], ids=["plain", "symlinked", "."])
def test_files_of_others_in_weights_directory_outlive_every_run(
    tmp_path: Path, named: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are called, and however the folder is named; of the run itself nothing is left."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "scratch"
    before = _fill(directory)
    _whole_life(_configured(tmp_path, named(directory)))
    assert _kept(before)
    assert _texts(directory) == before


def test_two_runs_with_one_weights_directory_never_touch_each_others_files(tmp_path: Path) -> None:
    """The second begins, publishes and ends while the first one serves."""
    one, other = (_configured(tmp_path, tmp_path / "shared", name) for name in ("a", "b"))
    first = FilesystemPublisher(weights_folder(one), 3)
    manifest = first.publish(PolicyVersion(lineage=1, version=0), FULL)
    _whole_life(other)
    assert (Path(manifest.uri) / "model.safetensors").is_file()
    assert first.publish(PolicyVersion(lineage=1, version=1), FULL).uri != manifest.uri
    first.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_run_that_was_killed_cleans_up_its_own_old_versions_at_its_next_start(tmp_path: Path) -> None:
    """Its folder is found again under the same name; an entry that is no version stays, and so does the folder."""
    config = _configured(tmp_path, tmp_path / "w")
    killed = FilesystemPublisher(weights_folder(config), 3)
    old = Path(killed.publish(PolicyVersion(lineage=1, version=5), FULL).uri)
    killed.leave()  # as the kernel does
    note = weights_folder(config).path / "notes.txt"
    note.write_text("mine")
    again = FilesystemPublisher(weights_folder(config), 3)
    assert not old.exists()
    again.close()
    assert note.read_text() == "mine"


def test_the_output_dir_under_two_names_makes_one_run(tmp_path: Path) -> None:
    """A link to it leads to the same folder of weights."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    one, other = (_configured(tmp_path, tmp_path / "w", name) for name in ("out", "link"))
    assert weights_folder(one) == weights_folder(other)


def _unmarked(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "1.0").mkdir()


def _of_another_run(path: Path) -> None:
    path.mkdir(parents=True)
    (path / MARKER).write_text(json.dumps({"run": "x", "output_dir": "/elsewhere"}))
    (path / "1.0").mkdir()


def _without_a_name(path: Path) -> None:
    path.mkdir(parents=True)
    (path / MARKER).write_text("[]")
    (path / "1.0").mkdir()


def _file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("1.0")


def _link(path: Path) -> None:
    target = path.parent.parent / "target"
    (target / "1.0").mkdir(parents=True)
    path.parent.mkdir(parents=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (_unmarked, f"holds files and no {MARKER}"),
        (_of_another_run, "belongs to the run with output_dir /elsewhere"),
        (_without_a_name, "names no run"),
        (_file, "is no folder"),
        (_link, "is no folder"),
    ],
)
def test_a_folder_of_the_runs_name_that_is_not_its_own_is_refused_and_left_alone(
    tmp_path: Path, there: Callable[[Path], None], words: str
) -> None:
    """At the start in words that name key and folder; at the end it is not touched either."""
    folder = weights_folder(_configured(tmp_path, tmp_path / "w"))
    there(folder.path)
    assert folder.problem().startswith(f"weights.directory: {folder.path}")
    with pytest.raises(ConfigError, match=words):
        FilesystemPublisher(folder, 2)
    before = sorted(tmp_path.rglob("*"))
    folder.clear()
    folder.remove_versions()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_second_trainer_with_the_same_folder_is_refused_and_the_first_ones_versions_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a disk may have one output_dir path; who comes second also cleans up nothing."""
    monkeypatch.setattr("bus.run_folder.LOCK_SECONDS", 0.1)
    monkeypatch.setattr("bus.run_folder.CLEAR_SECONDS", 0.0)
    folder = weights_folder(_configured(tmp_path, tmp_path / "w"))
    first = FilesystemPublisher(folder, 2)
    version = Path(first.publish(PolicyVersion(lineage=1, version=0), FULL).uri)
    with pytest.raises(ConfigError, match=r"is in use by another process as trainer.*set another output_dir"):
        FilesystemPublisher(folder, 2)
    folder.clear()
    assert (version / "model.safetensors").is_file()


def test_weights_in_shared_memory_are_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0700 there, also where the folder was left open; elsewhere rights are those of the user's umask."""
    monkeypatch.setattr("bus.run_folder.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    config = _configured(tmp_path, tmp_path / "shm")
    folder = weights_folder(config)
    folder.take()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.path.chmod(0o755)
    folder.take()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert not weights_folder(_configured(tmp_path, tmp_path / "disk")).private


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_in_shared_memory_that_another_user_owns_is_refused(tmp_path: Path) -> None:
    """They would read the weights, or put others in their place; on other file systems owners may be made up."""
    folder = RunFolder(tmp_path / "run", "test", tmp_path / "out", private=True)
    folder.take()
    os.chown(folder.path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"weights\.directory: .* belongs to another user \(id 12345\)"):
        folder.take()


def test_a_folder_that_can_not_be_made_is_refused_in_words(tmp_path: Path) -> None:
    """With key, folder and reason."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"weights\.directory: .*can't be made: Not a directory; set a folder"):
        FilesystemPublisher(weights_folder(_configured(tmp_path, tmp_path / "file" / "w")), 2)


def test_a_scratch_folder_is_emptied_of_a_life_before_and_of_nothing_else(tmp_path: Path) -> None:
    """And nothing is made before it is written to: an engine may read weights that lie on a disk it can't write to."""
    config = _configured(tmp_path, tmp_path / "w")
    folder = scratch_folder(config, own=True)
    Scratch(folder, "server.inference-0")
    assert not (tmp_path / "w").exists()
    before = Scratch(folder, "server.inference-0")
    (before.make() / "1.4.2").mkdir()
    (before.path / "mine").mkdir()
    path = before.path
    del before  # its files are closed, and so the lock is free, as after the death of a process
    Scratch(folder, "server.inference-0").close()
    assert [entry.name for entry in path.iterdir()] == ["mine"]
