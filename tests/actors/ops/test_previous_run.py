"""What is read from an output_dir before a run begins there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.learner.checkpoints import CheckpointFolder
from actors.learner.fake import FakeLearner
from actors.ledger import Changes, Step, Store
from actors.ops.previous_run import check_ledger_is_own, done_at, newest_checkpoint, run_so_far
from schemas.config import RunConfig, dump_config
from schemas.config.resume import as_tree
from schemas.errors import ConfigError
from tests.ring.harness import ring_config


def leave_done(folder: Path, step: int = 5, chain: str = "chain") -> RunConfig:
    """What a run that is done leaves behind: summary, ledger, the last checkpoint."""
    config = ring_config(folder, trainer={"max_steps": step})
    config.output.mkdir()
    (config.output / "summary.json").write_text(json.dumps({"steps": step}))
    store = Store(config.ledger_path)
    store.commit(Changes(steps=[Step(step, (0,), (), ("digest",), chain)]), {})
    checkpoints = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint)
    checkpoints.save(step, "chain", 0, [], store.run, FakeLearner().snapshot())
    store.close()
    return config


def test_run_is_done_at_its_max_steps_and_not_when_they_have_been_raised(tmp_path):
    """With fewer steps asked for than it has trained it is done as well."""
    config = leave_done(tmp_path)
    assert done_at(config) == 5
    assert done_at(ring_config(tmp_path, trainer={"max_steps": 3})) == 5
    assert done_at(ring_config(tmp_path, trainer={"max_steps": 6})) is None


def _go_back(config: RunConfig) -> None:
    store = Store(config.ledger_path)
    store.commit(Changes(values={"going_back": {"at_most": 3, "sample_anew": True}}), {})
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda config: (config.output / "summary.json").unlink(),
        lambda config: config.ledger_path.unlink(),
        lambda config: (config.output / "checkpoints" / "step_5").rename(config.output / "elsewhere"),
        lambda config: (config.output / "checkpoints" / "step_5" / "trainer" / "fake.json").write_text("damaged"),
        _go_back,
    ],
    ids=["no summary", "no ledger", "no checkpoint", "damaged checkpoint", "rewound"],
)
def test_run_is_not_done_without_its_record_and_a_good_last_checkpoint(
    tmp_path: Path, change: Callable[[RunConfig], None]
) -> None:
    """A summary alone says nothing: it may be of a history that was given up."""
    config = leave_done(tmp_path)
    assert done_at(config) == 5
    change(config)
    assert done_at(config) is None


def test_a_last_checkpoint_of_another_history_than_the_ledgers_is_not_the_end(tmp_path: Path) -> None:
    """The chain of its witness tells which groups it was trained on."""
    assert done_at(leave_done(tmp_path, chain="another chain")) is None


def test_newest_checkpoint_is_the_highest_that_is_complete(tmp_path):
    """Step 12 is newer than step 9; what is still being written and what was moved away don't count."""
    config = ring_config(tmp_path)
    assert newest_checkpoint(config) == 0
    for name in ("step_9", "step_12", ".step_15", "dead/step_20", "witness"):
        (config.output / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(config) == 12


def test_configuration_of_the_run_so_far_counts_while_there_is_its_ledger(tmp_path):
    """Who removes the ledger begins another run, with whatever configuration."""
    config = ring_config(tmp_path, trainer={"max_steps": 5})
    config.output.mkdir()
    (config.output / "config.resolved.yaml").write_text(dump_config(config))
    assert run_so_far(config) == {}
    config.ledger_path.touch()
    assert run_so_far(config)["trainer"]["max_steps"] == 5


def test_a_ledger_of_another_run_is_refused_and_that_of_a_moved_run_is_not(tmp_path: Path) -> None:
    """Two runs of one run.yaml with `ledger.path`, one after the other, in folders of their own."""
    sections = {"ledger": {"path": str(tmp_path / "shared.sqlite")}}
    first, second = (ring_config(tmp_path / name, **sections) for name in "ab")
    check_ledger_is_own(first)
    first.output.mkdir(parents=True)
    (first.output / "config.resolved.yaml").write_text(dump_config(first))
    store = Store(first.ledger_path)
    store.commit(Changes(values={"config": as_tree(first)}), {})
    store.close()
    check_ledger_is_own(first)
    with pytest.raises(ConfigError, match=rf"^ledger.path: \S+ is the ledger of the run in {first.output}; "):
        check_ledger_is_own(second)
    second.output.parent.mkdir()
    first.output.rename(second.output)
    check_ledger_is_own(second)
