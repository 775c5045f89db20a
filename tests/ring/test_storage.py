"""Disks that are full, files that are damaged or locked, numbers that are none: a bounded end, said in words."""

import contextlib
import errno
import json
import sqlite3
import time

import pytest

from actors.ledger import Store
from actors.policy.fake import FakeLearner
from actors.policy.snapshots import Snapshot
from schemas.errors import ConfigError, RunFailedError
from tests.ring.harness import check_promise, ring, ring_config, steps_recorded, wait_until

PEERS = ("inference-0", "reward-0", "rollout-0")


class Unsaved(FakeLearner):
    """A learner whose checkpoints find no room while `full`."""

    full = True

    def snapshot(self) -> Snapshot:
        """One that can't be written now."""

        def write(folder):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(folder))

        return Snapshot(texts=super().snapshot().texts, write_model=write)


def test_training_goes_on_while_the_disk_is_full_for_checkpoints(tmp_path):
    """Failed ones are counted and told; once there is room the next one holds the witness of all steps before it."""
    config = ring_config(tmp_path, trainer={"max_steps": 12, "checkpoint": {"interval": 2}}, eval={"num_prompts": 0})
    learner = Unsaved(step_seconds=0.02)
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=lambda: learner)
        wait_until(lambda: steps_recorded(config) >= 5, "step 5")
        assert run["trainer-0"].value("grpo_trainer_checkpoints_total", outcome="failed") >= 2
        assert not list((config.output / "checkpoints").glob("*step_*")), "nothing half is left"
        learner.full = False
        run.wait()
        assert run["trainer-0"].value("grpo_trainer_checkpoints_total", outcome="saved") >= 3
    assert check_promise(config).dropped == {}


def test_a_last_checkpoint_that_never_finds_room_fails_the_run_for_everybody(tmp_path):
    """After trainer.checkpoint.timeout: path, reason, and what to do; all actors end with these words."""
    config = ring_config(tmp_path, trainer={"max_steps": 2, "checkpoint": {"timeout": 0.5}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=Unsaved)
        run["packer-0"].thread.join(20.0)
        error = str(run["trainer-0"].error)
        assert "the last checkpoint can't be written, tried for 0.5 s (trainer.checkpoint.timeout)" in error
        assert "No space left on device" in error
        assert "start the same command again" in error
        for name in ("packer-0", *PEERS):
            run[name].thread.join(10.0)
            assert str(run[name].error) == error, name
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_a_loss_that_is_not_finite_fails_the_run_for_everybody(tmp_path):
    """The trainer's words reach all; the ledger stands at the last good step, and the run can go on from there."""

    def blow_up(batch):
        if batch.step == 3:
            raise FloatingPointError(f"step {batch.step}: loss nan, gradient norm nan, twice")

    config = ring_config(tmp_path, trainer={"max_steps": 4, "checkpoint": {"interval": 1}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=lambda: FakeLearner(before_step=blow_up))
        run["packer-0"].thread.join(20.0)
        for name in ("packer-0", "trainer-0", *PEERS):
            run[name].thread.join(10.0)
            assert "step 3: loss nan, gradient norm nan" in str(run[name].error), name
        assert isinstance(run["trainer-0"].error, RunFailedError)
    assert steps_recorded(config) == 2
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_a_ledger_without_room_waits_for_it(tmp_path):
    """SQLite itself says that the disk is full; nothing is said to peers meanwhile, and nothing is lost."""
    config = ring_config(tmp_path, trainer={"max_steps": 8}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        database = run["packer-0"].actor._store._db
        database.execute("PRAGMA max_page_count=1")  # SQLite takes the present size where it is more
        time.sleep(1.5)  # longer than the pause between two attempts
        assert run["packer-0"].thread.is_alive()
        database.execute("PRAGMA max_page_count=1000000")
        run.wait()
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_a_ledger_that_stays_locked_fails_the_run_in_words(tmp_path):
    """A backup tool holds the file: after ledger.commit_timeout the reason, the key, and what to do."""
    config = ring_config(tmp_path, ledger={"commit_timeout": 0.1}, trainer={"max_steps": 50}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 1, "step 1")
        with contextlib.closing(sqlite3.connect(config.ledger_path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            run["packer-0"].thread.join(20.0)
        error = run["packer-0"].error
        assert isinstance(error, RunFailedError)
        assert "can't be written, tried for 0.1 s (ledger.commit_timeout): database is locked" in str(error)
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


@pytest.mark.parametrize("content", [b"this is no database, it has been overwritten by something else\n" * 100, None])
def test_a_damaged_ledger_is_refused_by_name(tmp_path, content):
    """Not a database at all, or pages of it overwritten: what to do is said, the file is left as it is."""
    config = ring_config(tmp_path, trainer={"max_steps": 3}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
    path = config.ledger_path
    whole = path.read_bytes()
    damaged = content or whole[:4096] + b"\xff" * (len(whole) - 4096)
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"ledger\.path: .* can't be used: .*put a backup in its place"):
        Store(path)
    assert path.read_bytes() == damaged
    path.write_bytes(whole)
    store = Store(path)
    assert json.dumps(store.value("recorded_step")) == "3"
    store.close()
