"""Checkpoints on disk: whole or not there, checked by checksum, their witnesses kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from actors.policy.checkpoints import CheckpointFolder
from actors.policy.fake import FakeLearner
from actors.policy.snapshots import Snapshot
from schemas.config.actors import CheckpointConfig

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
    assert sorted(path.name for path in dead.iterdir()) == ["step_30", "step_40"]
    save(folder, 30)
    assert [(info.step, info.chain) for info in folder.good(RUN)] == [(25, "chain25"), (30, "chain30")]
