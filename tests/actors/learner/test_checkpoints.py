"""Checkpoints on disk: whole or not there, checked by checksum, their witnesses kept."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import structlog

from actors.learner import checkpoints
from actors.learner.checkpoints import CheckpointFolder, FolderTakenError, Writer
from actors.learner.fake import FakeLearner
from actors.learner.snapshots import Snapshot
from schemas.config.trainer import CheckpointConfig

RUN = "run-a"


def save(folder: CheckpointFolder, step: int, run: str = RUN, steps: list[dict[str, Any]] | None = None) -> None:
    """A checkpoint of a fake learner."""
    folder.save(step, f"chain{step}", max(0, step - 10), steps or [{"step": step}], run, FakeLearner().snapshot())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Keeps two."""
    return CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig(keep_last=2))


def test_saved_checkpoints_are_good_oldest_first(folder: CheckpointFolder) -> None:
    """With the chain that each ends."""
    save(folder, 20)
    save(folder, 30)
    assert [(info.step, info.chain) for info in folder.good(RUN)] == [(20, "chain20"), (30, "chain30")]


def test_a_folder_that_does_not_exist_yet_has_none(folder: CheckpointFolder) -> None:
    """A fresh run asks before it has saved anything."""
    assert folder.good(RUN) == []


def test_another_runs_checkpoints_do_not_count(folder: CheckpointFolder) -> None:
    """A run id is part of the witness."""
    save(folder, 10, run="run-b")
    assert folder.good(RUN) == []
    assert len(folder.good("run-b")) == 1


def test_a_saved_checkpoint_is_on_the_disk_with_every_folder_and_its_witness_copy(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and each folder that has a name of it is synced: `trainer/` and the copy of the witness too."""
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()).replace("/.step_10", "/step_10"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    save(folder, 10)
    checkpoint = folder.path(10)
    assert {str(path) for path in [checkpoint, *checkpoint.rglob("*")]} <= synced
    copies = checkpoint.parent / "witness"
    assert str(copies) in synced
    assert any(path.startswith(f"{copies}/") for path in synced)


def test_a_write_that_fails_leaves_no_checkpoint_and_the_old_one(folder: CheckpointFolder) -> None:
    """Killed while writing: what has the final name is whole."""
    save(folder, 10)

    def die(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.save(10, "chain", 0, [], RUN, Snapshot(write_model=die))
    assert [info.chain for info in folder.good(RUN)] == ["chain10"]
    save(folder, 10)  # what was left of the failed write is not in the way
    assert (folder.path(10) / "trainer" / "fake.json").is_file()
    assert not (folder.path(10) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "trainer" / "fake.json").write_text('"other"'), "trainer/fake.json is not what was written"),
        (lambda f: (f / "trainer" / "fake.json").unlink(), "fake.json"),
        (lambda f: (f / "checksums.json").unlink(), "checksums.json"),
        (lambda f: (f / "witness.json").write_text("{}"), "witness.json is not what was written"),
    ],
    ids=["changed", "missing", "no checksums", "witness"],
)
def test_a_damaged_checkpoint_is_named_and_left_out(folder: CheckpointFolder, damage: Any, named: str) -> None:
    """The log says which checkpoint and which file; the others still count."""
    save(folder, 10)
    save(folder, 20)
    damage(folder.path(20))
    at_next_start = CheckpointFolder(folder.path(20).parent, CheckpointConfig(keep_last=2))
    with structlog.testing.capture_logs() as logs:
        assert [info.step for info in at_next_start.good(RUN)] == [10]
    assert [(entry["event"], entry["checkpoint"]) for entry in logs] == [
        ("checkpoint not usable", str(folder.path(20)))
    ]
    assert named in logs[0]["detail"]


def test_old_checkpoints_go_and_their_witnesses_stay(folder: CheckpointFolder) -> None:
    """Two are kept; the chain of witnesses can be read back to the first step."""
    for step in (10, 20, 30):
        save(folder, step, steps=[{"step": step, "ordinals": [step]}])
    assert [info.step for info in folder.good(RUN)] == [20, 30]
    assert not folder.path(10).exists()
    witness = json.loads((folder.path(10).parent / "witness" / "step_10.json").read_text())
    assert witness == {
        "run": RUN,
        "step": 10,
        "previous": 0,
        "chain": "chain10",
        "steps": [{"step": 10, "ordinals": [10]}],
    }
    assert folder.witness(30)["previous"] == 20


def test_a_step_saved_again_replaces_the_old_one(folder: CheckpointFolder) -> None:
    """A replayed step overwrites the checkpoint of a dead history."""
    save(folder, 10)
    folder.save(10, "other", 0, [], RUN, FakeLearner().snapshot())
    assert [info.chain for info in folder.good(RUN)] == ["other"]


def test_checkpoints_of_a_dead_history_neither_count_nor_push_out_the_live_one(folder: CheckpointFolder) -> None:
    """The gang went back to step 20, so 30 and 40 are dead as soon as 25 is saved; both newest ones are alive."""
    for step in (20, 30, 40):
        CheckpointFolder(folder.path(step).parent, CheckpointConfig(keep_last=9)).save(
            step, "old", 0, [], RUN, FakeLearner().snapshot()
        )
    save(folder, 25)
    assert [(info.step, info.chain) for info in folder.good(RUN)] == [(20, "old"), (25, "chain25")]
    dead = folder.path(25).parent / "dead"
    assert sorted(path.name for path in dead.glob("step_*")) == ["step_30", "step_40"]
    copies = (folder.path(25).parent / "witness").iterdir()
    assert sorted(path.name for path in copies) == ["step_20.json", "step_25.json"]
    save(folder, 30)
    assert [(info.step, info.chain) for info in folder.good(RUN)] == [(25, "chain25"), (30, "chain30")]


def keeps(folder: Path, keep_last: int | None) -> CheckpointFolder:
    """The folder as a process sees it that has just been started."""
    return CheckpointFolder(folder / "checkpoints", CheckpointConfig(keep_last=keep_last))


@pytest.mark.parametrize("at", ["checkpoint.written", "checkpoint.complete", "checkpoint.renamed"])
def test_a_crash_during_a_save_leaves_a_good_checkpoint_where_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Wherever it comes, the older or the newer one is whole; the next save leaves the newest alone."""
    save(keeps(tmp_path, 1), 10)

    def die(name: str) -> None:
        if name == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        monkeypatch.setattr(checkpoints, "point", die)
        try:
            save(keeps(tmp_path, 1), 20)
        finally:
            os.abort()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    again = keeps(tmp_path, 1)
    newest = 20 if at == "checkpoint.renamed" else 10
    assert [info.step for info in again.good(RUN)] == [newest]
    again.begin_at(newest)
    save(again, 30)
    assert live(again) == ["step_30"]
    assert list((tmp_path / "checkpoints").glob(".step_*")) == []


def test_a_write_that_fails_keeps_the_only_checkpoint(tmp_path: Path) -> None:
    """A full disk, where one is kept."""
    folder = keeps(tmp_path, 1)
    save(folder, 10)

    def die(path: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.save(20, "chain", 10, [], RUN, Snapshot(write_model=die))
    assert [info.step for info in folder.good(RUN)] == [10]


def test_all_are_kept_and_the_newest_three_count(tmp_path: Path) -> None:
    """The ledger has no groups to continue from older ones."""
    folder = keeps(tmp_path, None)
    for step in (10, 20, 30, 40, 50):
        save(folder, step)
    assert live(folder) == ["step_10", "step_20", "step_30", "step_40", "step_50"]
    assert [info.step for info in folder.good(RUN)] == [30, 40, 50]


def test_a_writer_that_lost_the_folder_removes_no_checkpoint_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor took the folder, and its gang starts from step 10, while the earlier writer ended a save."""
    path = tmp_path / "checkpoints"
    late = CheckpointFolder(path, CheckpointConfig(keep_last=1))
    late.take(Writer(RUN, 1, "a"))
    save(late, 10)
    successor = CheckpointFolder(path, CheckpointConfig(keep_last=1))

    def taken_in_between(name: str) -> None:
        if name == "checkpoint.renamed":
            successor.take(Writer(RUN, 2, "b"))

    monkeypatch.setattr(checkpoints, "point", taken_in_between)
    with pytest.raises(FolderTakenError, match="incarnation=2"):
        save(late, 20)
    successor.begin_at(10)
    assert [info.step for info in successor.good(RUN)] == [10]


def test_a_gang_does_not_start_from_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    """An earlier writer has saved step 20 and removed step 10 since the gang looked; step 20 stays where it is."""
    save(keeps(tmp_path, 1), 10)
    save(keeps(tmp_path, 1), 20)
    with pytest.raises(FolderTakenError, match=r"step_10 is gone; an earlier writer has saved a later checkpoint"):
        keeps(tmp_path, 1).begin_at(10)
    assert live(keeps(tmp_path, 1)) == ["step_20"]


def live(folder: CheckpointFolder) -> list[str]:
    """The names of the live checkpoints."""
    return sorted(path.name for path in folder.path(0).parent.glob("step_*"))


def taken(path: Path, incarnation: int, boot_id: str) -> CheckpointFolder:
    """The folder in the hands of rank 0 of an incarnation."""
    folder = CheckpointFolder(path, CheckpointConfig(keep_last=9))
    folder.take(Writer(RUN, incarnation, boot_id))
    return folder


def test_a_trainer_that_was_away_neither_saves_nor_buries_what_its_successor_has_saved(tmp_path: Path) -> None:
    """It was paused while it saved step 50; its successor has saved 50, 100 and 150 since."""
    late = taken(tmp_path / "checkpoints", 1, "a")
    successor = taken(tmp_path / "checkpoints", 2, "b")
    for step in (50, 100, 150):
        save(successor, step)
    with pytest.raises(FolderTakenError, match="incarnation=2"):
        save(late, 50)
    with pytest.raises(FolderTakenError):
        late.begin_at(40)
    assert live(successor) == ["step_100", "step_150", "step_50"]
    assert not (tmp_path / "checkpoints" / "dead").exists()


@pytest.mark.parametrize("content", ["", '{"run": "run-a', "[]", '{"run": "run-a"}', "\xff"])
def test_a_folder_whose_writer_can_not_be_read_is_taken_and_told(tmp_path: Path, content: str) -> None:
    """A power loss may have left an empty file; the folder would otherwise have no writer any more."""
    path = tmp_path / "checkpoints"
    save(taken(path, 1, "a"), 50)
    (path / "writer.json").write_bytes(content.encode("latin-1"))
    with structlog.testing.capture_logs() as logs:
        successor = taken(path, 2, "b")
    assert [(entry["log_level"], entry["path"]) for entry in logs] == [("warning", str(path / "writer.json"))]
    save(successor, 60)
    assert live(successor) == ["step_50", "step_60"]


def test_the_name_of_the_writer_is_on_the_disk_before_it_takes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is renamed before it is synced may be empty after a power loss."""
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    taken(tmp_path / "checkpoints", 1, "a")
    assert synced == [".writer.json.a", "checkpoints"]


def test_an_order_that_is_older_than_the_successors_takes_no_folder(tmp_path: Path) -> None:
    """The process was away between its order and its start; what its successor is writing stays."""
    successor = taken(tmp_path / "checkpoints", 2, "b")
    half_written = tmp_path / "checkpoints" / ".step_50.b"
    half_written.mkdir()
    with pytest.raises(FolderTakenError):
        taken(tmp_path / "checkpoints", 1, "a").begin_at(40)
    assert half_written.is_dir()
    save(successor, 60)


def test_a_successor_takes_the_folder_while_its_predecessor_is_writing(tmp_path: Path) -> None:
    """The predecessor's files are whole and have only to be renamed: it sees in time that it has been replaced."""
    late = taken(tmp_path / "checkpoints", 1, "a")

    def replaced(folder: Path) -> None:
        (folder / "model").write_text("late")
        successor = taken(tmp_path / "checkpoints", 2, "b")
        save(successor, 50)

    with pytest.raises(FolderTakenError):
        late.save(50, "late", 0, [], RUN, Snapshot(write_model=replaced))
    assert not (late.path(50) / "model").exists()
    assert [info.chain for info in late.good(RUN)] == ["chain50"]
    assert list((tmp_path / "checkpoints").glob(".step_*")) == []


def test_nothing_is_buried_while_the_packer_is_silent(tmp_path: Path) -> None:
    """Later checkpoints may be of a successor that this process has not heard of; the own one is written later."""
    folder = taken(tmp_path / "checkpoints", 1, "a")
    save(folder, 50)
    folder.is_current = lambda: False
    with pytest.raises(OSError, match="while the packer is silent"):
        save(folder, 40)
    save(folder, 60)
    assert live(folder) == ["step_50", "step_60"]


def test_a_folder_that_is_no_checkpoint_of_this_run_is_moved_at_most(folder: CheckpointFolder, tmp_path: Path) -> None:
    """One of another run, and one of the user's under such a name, outlive pruning and burials of the same step."""
    save(folder, 10, run="run-b")
    mine = tmp_path / "checkpoints" / "step_20"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for step in (30, 40, 50):
        save(folder, step)
    assert folder.witness(10)["run"] == "run-b"
    assert (mine / "notes.txt").read_text() == "mine"
    assert not folder.path(30).exists()
    dead = tmp_path / "checkpoints" / "dead"
    (dead / "step_50").mkdir(parents=True)
    (dead / "step_50" / "notes.txt").write_text("mine")
    folder.begin_at(40)
    assert (dead / "step_50" / "notes.txt").read_text() == "mine"
    assert (dead / "step_50.moved" / "witness.json").is_file()
