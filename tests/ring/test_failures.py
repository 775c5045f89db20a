"""What goes wrong for good ends the run, at every actor, with the cause in words."""

from functools import partial

import pytest

import actors.reward
import actors.rollout
from actors.membership import Drain, PackerSilentError
from schemas.errors import PeerRefusedError, RunFailedError
from tests.ring.harness import Ring, own_reward, ring, ring_config, wait_until

PEERS = ("rollout-0", "reward-0", "inference-0", "trainer-0")


def join(run: Ring, *names: str, timeout: float = 20.0) -> None:
    """Until these actors have ended."""
    for name in names:
        run[name].thread.join(timeout)
        assert not run[name].thread.is_alive(), f"{name} hangs"


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("failing", "reward_raised: failing raised RuntimeError: the judge is out of order"),
        ("too_few", "reward_invalid: too_few returned 1 values for 2 completions"),
        ("not_a_number", "reward_invalid: not_a_number returned nan for completion 0"),
    ],
)
def test_reward_that_never_scores_fails_the_run_for_everybody(tmp_path, function, cause):
    """After 32 poisoned groups in a row the packer fails with the last cause, and all peers are told it and end."""
    config = ring_config(
        tmp_path,
        "inproc",
        reward=own_reward(function),
        packer={"groups_per_step": 8},
        rollout={"max_concurrent_groups": 16},
        eval={"num_prompts": 0},
    )
    with ring(config) as run:
        run.start()
        join(run, "packer-0", *PEERS)
        packer = run["packer-0"]
        assert isinstance(packer.error, RunFailedError)
        assert cause in str(packer.error)
        for name in PEERS:
            assert isinstance(run[name].error, PeerRefusedError), (name, run[name].error)
            assert str(run[name].error) == str(packer.error)
    assert not (config.output / "summary.json").exists()


def test_reward_calls_that_do_not_return_end_the_actor_and_name_the_timeout(tmp_path):
    """Calls beyond reward.timeout fail their groups; when they hold all threads, the process has to start anew."""
    config = ring_config(
        tmp_path,
        "inproc",
        reward=own_reward("slow", seconds=3.0) | {"timeout": 0.1, "max_concurrent_groups": 2},
        eval={"num_prompts": 0},
    )
    with ring(config) as run:
        run.start()
        join(run, "reward-0")
        error = run["reward-0"].error
        assert isinstance(error, RuntimeError)
        assert "2 reward calls have not returned within reward.timeout 0.1 s" in str(error)
        assert run["reward-0"].value("grpo_reward_failures_total", reason="reward_timeout") >= 2


def test_peers_of_a_packer_that_never_comes_give_up(tmp_path):
    """Each kind of peer ends with PackerSilentError soon after bus.peer_timeout."""
    config = ring_config(tmp_path, bus={"peer_timeout": 0.5})
    with ring(config) as run:
        run.start(*PEERS)
        join(run, *PEERS, timeout=5.0)
        for name in PEERS:
            assert isinstance(run[name].error, PackerSilentError), (name, run[name].error)
            assert "bus.peer_timeout 0.5 s" in str(run[name].error)


def test_drain_without_a_packer_is_bounded(tmp_path, monkeypatch):
    """A rollout and a reward actor that hold groups leave after the drain's time though nobody releases them."""
    monkeypatch.setattr(actors.rollout, "Drain", partial(Drain, 0.7))
    monkeypatch.setattr(actors.reward, "Drain", partial(Drain, 0.7))
    config = ring_config(tmp_path, reward=own_reward("slow", seconds=1.0), eval={"num_prompts": 0})
    with ring(config) as run:
        run.start()
        wait_until(lambda: run["reward-0"].value("grpo_reward_held_groups"), "reward-0 holds a group")
        run["packer-0"].crash()
        for name in PEERS:
            run[name].actor.drain()
        join(run, *PEERS, timeout=5.0)
        assert [run[name].error for name in PEERS] == [None] * 4
        assert run["rollout-0"].value("grpo_rollout_held_groups") > 0


def test_drained_trainer_saves_what_it_has_trained(tmp_path):
    """A trainer drained between checkpoints leaves one of its last step, and its successor goes on from it."""
    config = ring_config(
        tmp_path,
        "inproc",
        trainer={"max_steps": 30, "checkpoint": {"interval": 30}},
        reward=own_reward("slow", seconds=0.02),
        eval={"num_prompts": 0},
    )
    with ring(config) as run:
        run.start()
        wait_until(lambda: run["trainer-0"].value("grpo_trainer_steps_total") >= 2, "step 2")
        run["trainer-0"].actor.drain()
        join(run, "trainer-0")
        saved = run["trainer-0"].value("grpo_trainer_steps_total")
        assert [path.name for path in (config.output / "checkpoints").glob("step_*")] == [f"step_{saved:.0f}"]
        run.start("trainer-0").wait()
        assert run["trainer-0"].value("grpo_trainer_steps_total") == 30 - saved
