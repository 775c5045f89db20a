"""What is read from an output_dir before a run begins there."""

from actors.remains import is_done, newest_checkpoint, run_so_far
from schemas.config import dump_config
from tests.ring.harness import ring_config


def test_run_is_done_at_its_max_steps_and_not_when_they_have_been_raised(tmp_path):
    """A summary of as many steps beside a ledger; without the ledger another run begins."""
    config = ring_config(tmp_path, trainer={"max_steps": 5})
    config.output.mkdir()
    assert not is_done(config)
    (config.output / "summary.json").write_text('{"steps": 5}')
    assert not is_done(config)
    config.ledger_path.touch()
    assert is_done(config)
    assert not is_done(ring_config(tmp_path, trainer={"max_steps": 6}))


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
