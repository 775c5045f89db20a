"""A run that learns nothing says so: on the screens, in `status`, after its end too."""

import pytest

from actors.ops.screens.disk import view_on_disk
from actors.ops.screens.render import describe
from tests.ring.harness import own_reward, ring, ring_config

NO_EVAL = {"num_prompts": 0}


def ended(config, run):
    """The run to its end, and what `status` shows then."""
    run.start()
    run.wait()
    return view_on_disk(config)


@pytest.mark.slow
def test_a_run_whose_rewards_are_all_equal_is_not_healthy_and_says_why(tmp_path):
    """It is done, its exit code is 0, and no group of its 8 steps of 3 groups has taught anything."""
    config = ring_config(tmp_path, "inproc", reward=own_reward("constant"), eval=NO_EVAL)
    with ring(config) as run:
        view = ended(config, run)
    assert view.ended.startswith("done at step 8")
    assert not view.is_healthy
    (trouble,) = view.diagnostics
    assert trouble.startswith("nothing is learned: no group of the last 8 steps had different rewards")
    assert trouble in describe(view.progress, 0.0)


@pytest.mark.slow
def test_a_run_whose_rewards_are_always_late_says_how_many_calls_were(tmp_path):
    """Each group's only function is given up after 0.05 s, long before it returns, and called once."""
    late = own_reward("slow", seconds=6.0) | {"timeout": 0.05, "timeout_retries": 0, "max_concurrent_groups": 4}
    config = ring_config(tmp_path, "inproc", reward=late, eval=NO_EVAL, trainer={"max_steps": 4})
    with ring(config) as run:
        view = ended(config, run)
    assert view.progress["reward_calls"] == view.progress["late_reward_calls"] >= 3
    assert any("took longer than reward.timeout 0.05 s" in trouble for trouble in view.diagnostics)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["characters_in_place", "length_penalty"])
def test_a_run_that_learns_is_healthy(tmp_path, function):
    """Rewards differ within groups, and nothing is late."""
    kwargs = {"max_tokens": 12} if function == "length_penalty" else {}
    reward = {"functions": [{"path": function, "kwargs": kwargs}]}
    config = ring_config(tmp_path, "inproc", reward=reward, eval=NO_EVAL)
    with ring(config) as run:
        view = ended(config, run)
    assert view.is_healthy, view.diagnostics
