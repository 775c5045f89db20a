"""Real processes, killed, stopped and drained by the state they are in. What is not under test runs as threads."""

import signal
import threading

import pytest

from actors.engines.fake import FakeEngine
from actors.process.exits import EXIT_NAME_TAKEN
from schemas.messages import RolloutHeartbeat
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    Stand,
    check_promise,
    held_by,
    own_reward,
    processes,
    ring,
    ring_config,
    rows,
    scraped,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow

SAMPLING = {"engine": {"type": "fake", "token_seconds": 0.05}}
"""A group takes 0.2 to 0.6 s to sample: long enough to be caught at it."""
SHORT = {"trainer": {"max_steps": 3}, "eval": {"num_prompts": 0}}


def test_rollout_killed_while_it_holds_tickets_is_replaced(tmp_path, monkeypatch):
    """SIGKILL with tickets in hand: its successor under the same name gets them, as new attempts, at once."""
    killed, sample = threading.Event(), FakeEngine._sample

    def sample_later(engine, request, future):
        assert killed.wait(PATIENCE_SECONDS)
        sample(engine, request, future)

    monkeypatch.setattr(FakeEngine, "_sample", sample_later)
    config = ring_config(tmp_path, **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "reward-0")
        rollout = started.run("rollout-0")
        lost = wait_until(lambda: held_by(config, "rollout-0"), "rollout-0 holds tickets")
        rollout.kill()
        rollout.wait()
        killed.set()
        started.run("rollout-0")
        run.wait()
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] >= len(lost)


def test_reward_killed_with_a_group_that_it_has_read_is_replaced(tmp_path):
    """SIGKILL while a group is being scored: the rollout sends it again to the successor, in the same attempt."""
    gate = tmp_path / "gate"
    gate.touch()
    config = ring_config(tmp_path, reward=own_reward("gated", gate=str(gate)), **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "rollout-0")
        reward = started.run("reward-0")
        wait_until((tmp_path / "gate.entered").exists, "reward-0 has read a group")
        assert {state for _, state, *_ in rows(config, "1")} == {"issued"}
        reward.kill()
        reward.wait()
        gate.unlink()
        started.run("reward-0")
        run.wait()
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


@pytest.mark.slow
def test_engine_killed_in_the_middle_of_requests_poisons_no_group(tmp_path):
    """SIGKILL of the only engine mid-request: the groups wait for its successor instead of failing three times."""
    config = ring_config(tmp_path, inference=SAMPLING, **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "reward-0", "rollout-0")
        engine = started.run("inference-0")
        wait_until(lambda: scraped(config, "inference-0", "grpo_inference_running_completions"), "a request runs")
        engine.kill()
        engine.wait()
        started.run("inference-0")
        run.wait()
        failed = run["rollout-0"].value("grpo_rollout_failures_total", reason="engine")
    assert failed == 0
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_rollout_stopped_beyond_its_lease_does_no_harm_when_it_goes_on(tmp_path):
    """SIGSTOP until its tickets have been given to another, SIGCONT: it lets go of them, nothing is trained twice."""
    config = ring_config(
        tmp_path, inference=SAMPLING, trainer={"max_steps": 6}, eval={"num_prompts": 0}, bus=SHORT_LEASE
    )
    stand = Stand(step=2)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "inference-0", "reward-0").start("trainer-0", learner=stand.learner)
        rollout = started.run("rollout-0")
        wait_until(lambda: held_by(config, "rollout-0"), "rollout-0 holds tickets")
        rollout.send_signal(signal.SIGSTOP)
        run.start("rollout-1")
        wait_until(lambda: not held_by(config, "rollout-0"), "its lease has ended")
        rollout.send_signal(signal.SIGCONT)
        # else it might be back when the run is over and the packer gone
        wait_until(lambda: run["packer-0"].value("grpo_packer_peers", role="rollout") == 2, "it is heard again")
        stand.go_on.set()
        run.wait()
        assert rollout.wait(PATIENCE_SECONDS) == 0
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_drained_actors_exit_with_0_and_leave_no_work_behind(tmp_path):
    """SIGTERM to a rollout and a reward actor at work: they finish what they hold, exit 0, and others go on."""
    config = ring_config(tmp_path, inference=SAMPLING, trainer={"max_steps": 6}, eval={"num_prompts": 0})
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "reward-0")
        rollout, reward = started.run("rollout-1"), started.run("reward-1")
        peers = lambda role: run["packer-0"].value("grpo_packer_peers", role=role)  # noqa: E731
        wait_until(lambda: (peers("rollout"), peers("reward")) == (1, 2), "both are there before anything is sampled")
        run.start("trainer-0", "inference-0")
        wait_until(lambda: held_by(config, "rollout-1"), "rollout-1 holds tickets")
        wait_until(lambda: scraped(config, "reward-1", 'grpo_bus_messages_total{edge="groups"}'), "reward-1 works")
        run.start("rollout-0")
        rollout.terminate()
        reward.terminate()
        assert rollout.wait(PATIENCE_SECONDS) == 0
        assert reward.wait(PATIENCE_SECONDS) == 0
        assert held_by(config, "rollout-1") == []
        run.wait()
        assert run["packer-0"].value("grpo_packer_holder_deaths_total") == 0
    assert check_promise(config).dropped == {}


def test_second_sigterm_ends_an_actor_at_once(tmp_path):
    """A rollout drains as long as its groups are sampled (20 s and more); the second SIGTERM ends it with 143."""
    config = ring_config(tmp_path, inference={"engine": {"type": "fake", "token_seconds": 30.0}}, **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "reward-0")
        rollout = started.run("rollout-0")
        wait_until(lambda: held_by(config, "rollout-0"), "rollout-0 holds tickets")
        rollout.terminate()
        heard = run.packer.machine.peers.all(RolloutHeartbeat)  # of two signals that are pending the process hears one
        wait_until(lambda: [one.phase for one in list(heard.values())] == ["draining"], "the first signal was taken")
        assert rollout.poll() is None
        rollout.terminate()
        assert rollout.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM


def test_second_process_of_a_living_name_is_refused_in_words_and_the_first_goes_on(tmp_path):
    """Two rollouts called rollout-0: the second exits 4 naming the first and --name, the first completes the run."""
    gate = tmp_path / "gate"
    gate.touch()  # nothing is scored, so the run can't end before the second has been told
    lease = {"lease": 4.0}  # the second is refused after one, and the first must not lose its own
    config = ring_config(tmp_path, inference=SAMPLING, reward=own_reward("gated", gate=str(gate)), bus=lease, **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "reward-0")
        older = started.run("rollout-0")
        held = wait_until(lambda: held_by(config, "rollout-0"), "the first holds tickets")
        newer = started.spawn("newer", "run", "rollout", "--config", str(started.config_path), "--name", "rollout-0")
        assert newer.wait(PATIENCE_SECONDS) == EXIT_NAME_TAKEN
        assert "another process named rollout-0 is alive (boot " in started.text("newer")
        assert "give this one another --name" in started.text("newer")
        assert older.poll() is None
        assert set(held) <= set(held_by(config, "rollout-0"))
        gate.unlink()
        run.wait()
        assert older.wait(PATIENCE_SECONDS) == 0
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


@pytest.mark.slow
def test_second_packer_on_a_ledger_is_refused(tmp_path):
    """Exit 2, naming ledger.path and the file; the first packer is not disturbed."""
    config = ring_config(tmp_path, **SHORT)
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0")
        second = started.run("packer-1")
        assert second.wait(PATIENCE_SECONDS) == 2
        assert f"ledger.path: another packer holds {config.ledger_path}" in started.text("packer-1")
        run.start("trainer-0", "inference-0", "reward-0", "rollout-0").wait()
    assert check_promise(config).dropped == {}


def test_actor_gives_up_when_the_packer_stays_silent(tmp_path):
    """No packer anywhere: exit 1 after bus.peer_timeout, which the message names with the address."""
    config = ring_config(tmp_path, bus={"peer_timeout": 0.5})
    with processes(config, tmp_path) as started:
        assert started.run("reward-0").wait(PATIENCE_SECONDS) == 1
        assert "bus.peer_timeout 0.5 s" in started.text("reward-0")
        assert "the packer at ipc://" in started.text("reward-0")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_stepz=3", "trainer.max_stepz: no such key, did you mean 'max_steps'?"),
        ("reward.functions.0.path=exact_macth", "no built-in reward 'exact_macth', did you mean 'exact_match'?"),
    ],
)
def test_wrong_configuration_exits_2_with_the_words_on_stderr(tmp_path, override, words):
    """An unknown key (found by the parser) and an unknown reward (found by the actor that needs it)."""
    with processes(ring_config(tmp_path), tmp_path) as started:
        assert started.run("reward-0", override).wait(PATIENCE_SECONDS) == 2
        assert words in started.text("reward-0")


@pytest.mark.slow
def test_a_trainer_stopped_in_a_save_leaves_the_checkpoints_of_its_successor_alone(tmp_path, monkeypatch):
    """SIGSTOP when step_2 is whole and not renamed; its successor saves 2, 4 and 6; SIGCONT: nothing is moved away."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(faults))
    (faults / "trainer-0@checkpoint.complete").write_text("SIGSTOP")
    trainer = {"max_steps": 12, "checkpoint": {"interval": 2, "keep_last": 9}}
    weights = {"channel": "rendezvous"}  # as on two machines: with files, the folder of versions is locked
    config = ring_config(
        tmp_path, inference=SAMPLING, trainer=trainer, weights=weights, eval={"num_prompts": 0}, bus=SHORT_LEASE
    )
    checkpoints, stand = config.output / "checkpoints", Stand(step=8)  # the late one is told to exit by a packer
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "inference-0", "reward-0", "rollout-0")
        late = started.run("trainer-0")
        wait_until((faults / "trainer-0@checkpoint.complete.hit").exists, "it saves step 2")
        run.start("trainer-0", learner=stand.learner)
        wait_until((checkpoints / "step_6").is_dir, "its successor has saved step 6")
        late.send_signal(signal.SIGCONT)
        assert late.wait(PATIENCE_SECONDS) != 0, started.text("trainer-0")
        stand.go_on.set()
        assert {"step_2", "step_4", "step_6"} <= {path.name for path in checkpoints.iterdir()}
        run.wait()
    assert not (checkpoints / "dead").exists()
    assert not list(checkpoints.glob(".step_*"))
    assert check_promise(config).dropped == {}
