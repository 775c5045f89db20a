"""Disks that are full, files that are damaged or locked, numbers that are none: a bounded end, said in words."""

import contextlib
import errno
import json
import shutil
import sqlite3
import time

import pytest
from structlog.testing import capture_logs

from actors.learner.fake import FakeLearner
from actors.learner.snapshots import Snapshot
from actors.ledger import LedgerReader, Store
from actors.ops.resume import rewind
from actors.ops.screens.diagnostics import diagnose
from bus.run_folder import weights_folder
from schemas.errors import ConfigError, RunFailedError
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    Stand,
    check_promise,
    ring,
    ring_config,
    steps_recorded,
    wait_until,
    watching,
)

pytestmark = pytest.mark.slow

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
    stand = Stand(step=7)  # when the save of step 6 is begun, those of 2 and 4 have been counted
    learner = Unsaved(before_step=stand.before_step)
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=lambda: learner)
        assert stand.reached.wait(PATIENCE_SECONDS)
        assert run["trainer-0"].value("grpo_trainer_checkpoints_total", outcome="failed") >= 2
        wait_until(lambda: not list((config.output / "checkpoints").glob("*step_*")), "nothing half is left")
        learner.full = False
        stand.go_on.set()
        run.wait()
        assert run["trainer-0"].value("grpo_trainer_checkpoints_total", outcome="saved") >= 3
    assert check_promise(config).dropped == {}


@pytest.mark.parametrize("mended", [True, False])
def test_checkpoints_that_can_not_be_taken_over_are_tried_again_for_their_timeout(tmp_path, capsys, mended):
    """A disk that refuses at the start of a gang: the trainer waits for it, and then ends the run in words."""
    checkpoint = {"interval": 3, "timeout": PATIENCE_SECONDS if mended else 0.5}
    config = ring_config(tmp_path, trainer={"max_steps": 3, "checkpoint": checkpoint}, eval={"num_prompts": 0})
    obstacle = config.output / "checkpoints" / "writer.json"
    with ring(config) as run:
        run.start("packer-0")
        obstacle.mkdir(parents=True)
        run.start("trainer-0", *PEERS)
        said = []
        wait_until(
            lambda: said.append(capsys.readouterr().out) or "checkpoints not taken over" in "".join(said), "told"
        )
        if mended:
            obstacle.rmdir()
            run.wait()
            check_promise(config)
        else:
            run["trainer-0"].thread.join(PATIENCE_SECONDS)
            assert isinstance(run["trainer-0"].error, RunFailedError)
            assert "can't be taken over, tried for 0.5 s (trainer.checkpoint.timeout): " in str(run["trainer-0"].error)


def test_a_trainer_that_waits_for_a_silent_packer_before_it_takes_the_checkpoints_hears_a_drain(tmp_path):
    """SIGTERM must not wait for bus.peer_timeout. To this trainer every directive is too old to take the folder by."""
    config = ring_config(tmp_path, eval={"num_prompts": 0})
    deaf = config.model_copy(update={"bus": config.bus.model_copy(update={"lease": 1e-9})})
    with ring(config) as run, ring(deaf) as late:
        run.start("packer-0")
        late.start("trainer-0")
        wait_until(lambda: _gangs(config) == 1, "the gang's order")
        turns = late["trainer-0"].turns
        wait_until(lambda: late["trainer-0"].turns > turns + 8, "the trainer waits to take the folder")
        assert not (config.output / "checkpoints" / "writer.json").exists()
        late["trainer-0"].actor.drain()
        late["trainer-0"].thread.join(PATIENCE_SECONDS)
        assert not late["trainer-0"].thread.is_alive()
        assert late["trainer-0"].error is None


def _gangs(config):
    """Return how many gangs have formed."""
    with contextlib.closing(LedgerReader.of(config.ledger_path)) as ledger:
        return (ledger.value("gang") or {"incarnation": 0})["incarnation"]


def test_a_last_checkpoint_that_never_finds_room_fails_the_run_for_everybody(tmp_path):
    """After trainer.checkpoint.timeout: path, reason, and what to do; all actors end with these words."""
    config = ring_config(tmp_path, trainer={"max_steps": 2, "checkpoint": {"timeout": 0.5}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=Unsaved)
        run["packer-0"].thread.join(PATIENCE_SECONDS)
        error = str(run["trainer-0"].error)
        assert "the last checkpoint can't be written, tried for 0.5 s (trainer.checkpoint.timeout)" in error
        assert "No space left on device" in error
        assert "start the same command again" in error
        for name in ("packer-0", *PEERS):
            run[name].thread.join(PATIENCE_SECONDS)
            assert str(run[name].error) == error, name
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_training_waits_for_room_for_a_version_and_goes_on(tmp_path):
    """Nothing is lost by it. A file in the way of version 2 stands for a full disk."""
    config = ring_config(tmp_path, trainer={"max_steps": 4}, eval={"num_prompts": 0})
    with capture_logs() as lines, ring(config) as run:
        run.start("packer-0", "trainer-0")
        in_the_way = weights_folder(config).path / ".1.2"
        in_the_way.touch()
        run.start(*PEERS)
        tried = lambda: [line for line in lines if line["event"] == "weights not published; trying again"]  # noqa: E731
        wait_until(lambda: len(tried()) > 1, "two attempts")
        assert (weights_folder(config).path / "1.1").is_dir()
        assert run["trainer-0"].thread.is_alive()
        assert run["trainer-0"].value("grpo_trainer_steps_total") == 1
        in_the_way.unlink()
        run.wait()
    assert check_promise(config).dropped == {}


def test_a_version_that_never_finds_room_fails_the_run_for_everybody(tmp_path):
    """After weights.timeout: folder, bytes, reason and what to do; the same command goes on when there is room."""
    config = ring_config(
        tmp_path, trainer={"max_steps": 3}, eval={"num_prompts": 0}, weights={"timeout": 0.2}, bus=SHORT_LEASE
    )
    with ring(config) as run:
        run.start("packer-0", "trainer-0")
        in_the_way = weights_folder(config).path / ".1.2"
        in_the_way.touch()
        run.start(*PEERS)
        run["packer-0"].thread.join(PATIENCE_SECONDS)
        error = str(run["trainer-0"].error)
        assert isinstance(run["trainer-0"].error, RunFailedError)
        assert (
            "weights 1.2 can't be published, tried for 0.2 s (weights.timeout): 0.000 GB of weights can't be" in error
        )
        assert f"written to {weights_folder(config).path}, where " in error
        assert "set weights.directory to a folder with room" in error
        for name in ("packer-0", *PEERS):
            run[name].thread.join(PATIENCE_SECONDS)
            assert str(run[name].error) == error, name
    in_the_way.unlink()
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_a_loss_that_is_not_finite_fails_the_run_for_everybody(tmp_path):
    """The trainer's words reach all; the ledger stands at the last good step, and the run can go on from there."""

    def blow_up(batch):
        if batch.step == 3:
            raise FloatingPointError(f"step {batch.step}: loss nan, gradient norm nan, twice")

    trainer = {"max_steps": 4, "checkpoint": {"interval": 1}}
    config = ring_config(tmp_path, trainer=trainer, eval={"num_prompts": 0}, bus=SHORT_LEASE)
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=lambda: FakeLearner(before_step=blow_up))
        run["packer-0"].thread.join(PATIENCE_SECONDS)
        for name in ("packer-0", "trainer-0", *PEERS):
            run[name].thread.join(PATIENCE_SECONDS)
            assert "step 3: loss nan, gradient norm nan" in str(run[name].error), name
        assert isinstance(run["trainer-0"].error, RunFailedError)
    assert steps_recorded(config) == 2
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_a_ledger_without_room_waits_for_it(tmp_path):
    """SQLite itself says that the disk is full; screens show it at once, peers hear nothing, and nothing is lost."""
    config = ring_config(tmp_path, trainer={"max_steps": 8}, eval={"num_prompts": 0})
    stand = Stand(step=3)
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=stand.learner)
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        database = run.packer.store.database
        with watching(config) as before:
            wait_until(before.progress, "a screen")
            database.execute("PRAGMA max_page_count=1")  # SQLite takes the present size where it is more
            stand.go_on.set()
            wait_until(lambda: before.progress().get("unwritten"), "the screen shows it")
            assert "ledger.sqlite: database or disk is full" in diagnose(before.progress(), 0.0)[-1]
            with watching(config) as later:
                wait_until(lambda: later.progress().get("unwritten"), "a screen that comes now shows it too")
        time.sleep(1.5)  # longer than the pause between two attempts
        assert run["packer-0"].thread.is_alive()
        database.execute("PRAGMA max_page_count=1000000")
        run.wait()
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_a_ledger_that_stays_locked_fails_the_run_in_words(tmp_path):
    """A backup tool holds the file: after ledger.commit_timeout the reason, the key, and what to do."""
    config = ring_config(
        tmp_path,
        ledger={"commit_timeout": 0.1},
        trainer={"max_steps": 8},
        eval={"num_prompts": 0},
        bus=SHORT_LEASE,  # the packer stays for two of them, and its successor waits for one
    )
    stand = Stand(step=2)
    with ring(config) as run:
        run.start("packer-0", *PEERS).start("trainer-0", learner=stand.learner)
        wait_until(lambda: steps_recorded(config) >= 1, "step 1")
        ledger = sqlite3.connect(config.ledger_path, isolation_level=None, timeout=PATIENCE_SECONDS)
        with contextlib.closing(ledger) as other:
            other.execute("BEGIN IMMEDIATE")
            stand.go_on.set()
            run["packer-0"].thread.join(PATIENCE_SECONDS)
        error = run["packer-0"].error
        assert isinstance(error, RunFailedError)
        assert "can't be written, tried for 0.1 s (ledger.commit_timeout): database is locked" in str(error)
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


def test_a_run_whose_ledger_is_not_there_is_refused_and_not_begun_anew(tmp_path):
    """A disk that was not mounted: a new ledger would bury the checkpoints; words name path and newest checkpoint."""
    ledger = tmp_path / "disk" / "ledger.sqlite"
    config = ring_config(tmp_path, trainer={"max_steps": 3}, eval={"num_prompts": 0}, ledger={"path": str(ledger)})
    with ring(config) as run:
        run.start().wait()
    ledger.parent.rename(tmp_path / "elsewhere")
    with ring(config) as run, pytest.raises(ConfigError, match=r"no ledger at .*up to step 3; is its disk mounted"):
        run.start("packer-0")
    assert not ledger.exists()
    assert (config.output / "checkpoints" / "step_3").is_dir()


@pytest.mark.parametrize("steps", [3, 2], ids=["with a checkpoint", "before the first checkpoint"])
def test_a_rewind_without_the_ledgers_disk_is_refused_and_makes_no_ledger(tmp_path, steps):
    """A ledger made by the rewind would be taken for the run's by the next start, which then buries the checkpoints."""
    ledger = tmp_path / "disk" / "ledger.sqlite"
    config = ring_config(tmp_path, trainer={"max_steps": 3}, eval={"num_prompts": 0}, ledger={"path": str(ledger)})
    with ring(config) as run:
        run.start().wait()
    if steps < 3:
        shutil.rmtree(config.output / "checkpoints" / "step_3")
    left = sorted(config.output.rglob("*"))
    ledger.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"ledger\.path: there is no ledger at .*is its disk mounted\?"):
        rewind(config.output, 3)
    assert not ledger.exists()
    assert sorted(config.output.rglob("*")) == left


def test_an_empty_file_beside_checkpoints_is_not_taken_for_the_runs_ledger(tmp_path):
    """Neither a start nor a rewind begins a ledger in it."""
    config = ring_config(tmp_path, trainer={"max_steps": 3}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
    path = config.ledger_path
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()
    path.touch()
    with ring(config) as run, pytest.raises(ConfigError, match=r"there is no ledger at .*up to step 3"):
        run.start("packer-0")
    with pytest.raises(ConfigError, match=r"there is no ledger at .*up to step 3"):
        rewind(config.output, 3)
    assert path.stat().st_size == 0


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
    with pytest.raises(ConfigError, match=r"ledger\.path: .* can't be used: .*(backup|new run)"):
        Store(path)
    assert path.read_bytes() == damaged
    path.write_bytes(whole)
    store = Store(path)
    assert json.dumps(store.value("recorded_step")) == "3"
    store.close()
