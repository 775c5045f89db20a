"""What goes wrong for good ends the run, at every actor, with the cause in words."""

import copy
import json
import re
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import actors.process.membership
import actors.reward.loop
import actors.rollout.loop
from actors.datasets import Example
from actors.datasets.generated import ReverseText
from actors.engines.fake import FakeEngine
from actors.engines.protocol import Completion, RequestError, SampleRequest
from actors.process.exits import EXIT_ERROR, EXIT_START_OVER
from actors.process.membership import Drain, PackerSilentError, StartOverError
from actors.rollout.held import HeldTicket
from actors.rollout.loop import RolloutActor
from actors.runtime import REWARD_OOM_SCORE
from schemas.config import RunConfig
from schemas.errors import PeerRefusedError, RunFailedError
from tests.ring.harness import (
    PATIENCE_SECONDS,
    Ring,
    Stand,
    check_promise,
    children,
    go_on,
    held_reward,
    own_reward,
    processes,
    ring,
    ring_config,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow

PEERS = ("rollout-0", "reward-0", "inference-0", "trainer-0")


def join(run: Ring, *names: str, timeout: float = PATIENCE_SECONDS) -> None:
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
        ("infinite", "reward_invalid: infinite returned inf for completion 0"),
        ("text", "reward_invalid: text returned '1' for completion 0"),
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


def test_with_on_error_fail_the_first_error_of_a_function_ends_the_run_in_words(tmp_path):
    """Function, error, line and example; nothing was trained on what was left."""
    reward = own_reward("failing") | {"on_error": "fail"}
    config = ring_config(tmp_path, "inproc", reward=reward, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start()
        join(run, "packer-0", *PEERS)
        words = str(run["packer-0"].error)
    assert words.startswith(
        "a reward function failed (reward.on_error: fail): failing raised RuntimeError: the judge is out of order "
        "(rewards.py, line "
    )
    assert "; reverse_text example " in words
    assert steps_recorded(config) == 0


def test_a_function_that_fails_on_most_examples_ends_the_run_in_words(tmp_path):
    """About three of four groups are poison, others settle in between."""
    config = ring_config(
        tmp_path,
        "inproc",
        reward=own_reward("failing_on_most"),
        packer={"groups_per_step": 8},
        rollout={"max_concurrent_groups": 16},
        trainer={"max_steps": 1000},
        eval={"num_prompts": 0},
    )
    with ring(config) as run:
        run.start()
        join(run, "packer-0", *PEERS)
        words = str(run["packer-0"].error)
    assert "of the last 100 groups were dropped as poison after three failed attempts each" in words
    assert "failing_on_most raised KeyError" in words


def test_reward_that_always_hangs_fails_the_run_in_words_and_not_by_restarts(tmp_path, monkeypatch):
    """Each attempt fails with the function's name; a reward actor that has lost 16 threads starts over every time."""
    monkeypatch.setattr(actors.process.membership, "FAREWELL_SECONDS", 0.05)
    config = ring_config(
        tmp_path,
        "inproc",
        reward=own_reward("slow", seconds=4.0)
        | {"timeout": 0.05, "timeout_retries": 0, "on_timeout": "fail", "max_concurrent_groups": 16},
        packer={"groups_per_step": 8},
        rollout={"max_concurrent_groups": 16},
        eval={"num_prompts": 0},
    )
    lives = 1
    with ring(config) as run:
        run.start()
        while True:
            join(run, "reward-0")
            error = run["reward-0"].error
            if not isinstance(error, StartOverError):
                break
            assert re.match(r"calls of slow \(\d+\) have not returned within reward.timeout 0.05 s", str(error))
            run.start("reward-0")
            lives += 1
        join(run, "packer-0", *PEERS)
        words = "reward_timeout: slow took more than 0.05 s (reward.timeout)"
        assert "32 groups in a row were dropped as poison after three failed attempts each" in str(
            run["packer-0"].error
        )
        assert words in str(run["packer-0"].error)
    assert lives > 1


def test_reward_that_always_hangs_and_counts_as_none_teaches_nothing_and_ends_the_run_in_time(tmp_path, monkeypatch):
    """Each process that is used up has brought some groups to an end; all is counted, and no reward is made up."""
    monkeypatch.setattr(actors.process.membership, "FAREWELL_SECONDS", 0.05)
    config = ring_config(
        tmp_path,
        "inproc",
        # no function returns in time, though the process is held up for some seconds
        reward=own_reward("slow", seconds=10.0) | {"timeout": 0.05, "max_concurrent_groups": 2},
        trainer={"max_steps": 6},
        eval={"num_prompts": 0},
    )
    lives = []
    with ring(config) as run:
        run.start()
        while True:
            lives.append(run["reward-0"])
            join(run, "reward-0")
            if run["reward-0"].error is None:
                break
            assert isinstance(run["reward-0"].error, StartOverError), run["reward-0"].error
            run.start("reward-0")
        run.wait()
    assert len(lives) > 1
    none, failed = (
        sum(life.value("grpo_reward_timeouts_total", outcome=outcome) for life in lives) for outcome in ("none", "fail")
    )
    assert none >= 18
    assert failed == 0
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [(line["reward_mean"], line["reward_unscorable"]) for line in lines] == [(None, 1.0)] * 6
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_async_reward_that_blocks_fails_its_group_by_name_and_costs_no_other_an_attempt(tmp_path):
    """The reward actor starts over with a loop that runs; of all groups only the one that blocked is sampled again."""
    gate = tmp_path / "gate"
    sections = {"trainer": {"max_steps": 12}, "eval": {"num_prompts": 0}}
    function = own_reward("blocking", gate=str(gate))
    config = ring_config(tmp_path, "inproc", reward=function, **sections)
    impatient = ring_config(tmp_path, "inproc", reward=function | {"timeout": 1.0}, **sections)
    with ring(config) as run, ring(impatient) as first:
        run.start("packer-0", "trainer-0", "inference-0", "rollout-0")
        reward = first.start("reward-0")["reward-0"]  # the next one has time for what does not block
        wait_until(lambda: run["trainer-0"].value("grpo_trainer_steps_total"), "the function has returned")
        gate.touch()
        join(first, "reward-0")
        error = reward.error
        assert isinstance(error, StartOverError)
        assert "blocking blocks the event loop of all async reward functions; make it a plain def" in str(error)
        assert reward.value("grpo_reward_failures_total", reason="reward_timeout") == 1
        gate.unlink()
        run.start("reward-0").wait()
        assert "blocking took more than 1 s (reward.timeout); blocking blocks" in last_failure(run)
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 1


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.slow
def test_reward_that_hangs_sometimes_costs_attempts_and_not_the_run(tmp_path, retries):
    """Sixteen calls never return: the process ends with 75, which no limit counts, and the next completes the run.

    Called again they return, so that no attempt is lost, and no process, for it may lose as many as it calls again.
    """
    # called again they have to return in this time; where they are not, the next process has all the time that it needs
    timeout = 3.0 if retries else 0.2

    def config_of(timeout: float) -> RunConfig:
        return ring_config(
            tmp_path,
            reward=own_reward("hanging_at_first", folder=str(tmp_path), calls=16)
            | {"timeout": timeout, "timeout_retries": retries, "on_timeout": "fail", "max_concurrent_groups": 16},
            packer={"groups_per_step": 8},
            rollout={"max_concurrent_groups": 16},
            inference={"engine": {"type": "fake", "token_seconds": 0.02}},
            trainer={"max_steps": 12},
            eval={"num_prompts": 0},
        )

    config = config_of(PATIENCE_SECONDS)
    with ring(config) as run, processes(config_of(timeout), tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "rollout-0")
        reward = started.run("reward-0")
        if not retries:
            assert reward.wait(PATIENCE_SECONDS) == EXIT_START_OVER
            run.start("reward-0")
        run.wait()
    assert f"hanging_at_first took more than {timeout:g} s (reward.timeout)" in started.text("reward-0")
    words = f"calls of hanging_at_first (16) have not returned within reward.timeout {timeout:g} s"
    assert (words in started.text("reward-0")) == (not retries)
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == (0 if retries else 16)


def test_reward_actor_whose_event_loop_user_code_has_ended_does_not_live_on(tmp_path):
    """Exit 1 with the thread's name and the traceback, so that a supervisor starts it again."""
    config = ring_config(tmp_path, reward=own_reward("ending_the_loop"), eval={"num_prompts": 0})
    with ring(config) as run, processes(config, tmp_path) as started:
        run.start("packer-0", "trainer-0", "inference-0", "rollout-0")
        assert started.run("reward-0").wait(PATIENCE_SECONDS) == EXIT_ERROR
        log = started.text("reward-0")
    assert "thread failed" in log
    assert "reward-async" in log
    assert "SystemExit: 3" in log


def test_groups_that_no_function_scores_are_trained_with_nothing_and_counted(tmp_path):
    """None for all is no 0: no reward is recorded, all advantages are 0, and the share is in every line."""
    config = ring_config(tmp_path, "inproc", reward=own_reward("unscorable"), trainer={"max_steps": 2})
    with ring(config) as run:
        run.start().wait()
        assert run["reward-0"].value("grpo_reward_unscorable_completions_total", purpose="train") == 12
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [(line["reward_mean"], line["reward_unscorable"]) for line in lines] == [(None, 1.0)] * 2


# --- sampling ----------------------------------------------------------------------------------------------------


def last_failure(run: Ring) -> str:
    """What the packer would say if the run failed now."""
    return run.packer.machine.groups.last_failure


def empty_completion(engine: FakeEngine, request: SampleRequest) -> "Future[list[Completion]]":
    """One completion is whole and one has no tokens."""
    answer: Future[list[Completion]] = Future()
    answer.set_result([Completion([5], [-1.0], [(0, 1, 0)], "stop"), Completion([], [], [(0, 1, 0)], "stop")])
    return answer


def failing(error: Exception):
    """An engine that raises it."""

    def submit(engine: FakeEngine, request: SampleRequest) -> "Future[list[Completion]]":
        raise error

    return submit


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (failing(RuntimeError("out of memory")), "engine", r"HTTP 500: .*RuntimeError: out of memory"),
        (failing(RequestError("n: 2 exceeds 1")), "engine", "HTTP 400: .*n: 2 exceeds 1"),
        (lambda *_: Future(), "timeout", r"not sampled within 1 s \(rollout.group_timeout\): .* has not answered"),
        (empty_completion, "engine", "2 completions for 2, or an empty one"),
    ],
    ids=["HTTP 500", "HTTP 400", "hangs", "one completion fails"],
)
@pytest.mark.slow
def test_group_that_the_engine_never_answers_is_dropped_after_three_attempts(
    tmp_path, monkeypatch, answer, reason, words
):
    """One group of the run fails three times, by name; nothing of it is scored, and all others are trained."""
    original, chosen = FakeEngine.submit, []

    def submit(self: FakeEngine, request: SampleRequest) -> "Future[list[Completion]]":
        chosen[:] = chosen or [request.seed]  # a group keeps its seed over attempts
        return (answer if request.seed == chosen[0] else original)(self, request)

    monkeypatch.setattr(FakeEngine, "submit", submit)
    config = ring_config(
        tmp_path,
        "inproc",
        rollout={"group_timeout": 60.0, "completion_retries": 1},
        trainer={"max_steps": 3},
        bus={"lease": 3.0, "beat_interval": 0.1},  # an engine that has failed is avoided for one
        eval={"num_prompts": 0},
    )
    impatient, attempt = config.rollout.model_copy(update={"group_timeout": 1.0}), RolloutActor.attempt

    async def attempt_for_a_second(actor: RolloutActor, run: str, held: HeldTicket) -> None:
        chosen[:] = chosen or [held.ticket.seed]
        if held.ticket.seed == chosen[0]:  # the only one that may be late, however busy the machine is
            actor = copy.copy(actor)
            actor._config = config.model_copy(update={"rollout": impatient})
        await attempt(actor, run, held)

    if reason == "timeout":
        monkeypatch.setattr(RolloutActor, "attempt", attempt_for_a_second)
    with capture_logs() as lines, ring(config) as run:
        run.start().wait()
        assert run["reward-0"].value("grpo_reward_groups_total", purpose="train") == 9
        assert re.search(rf"reverse_text example \d+ \(\w+\): {reason}: .*{words}", last_failure(run))
    failed = [line for line in lines if line["event"] == "attempt failed"]
    assert [(line["attempt"], line["reason"]) for line in failed] == [(1, reason), (2, reason), (3, reason)]
    assert all(re.search(words, line["detail"]) for line in failed)
    assert list(check_promise(config).dropped.values()) == ["poison"]


class BrokenDataset(ReverseText):
    """Cannot give its first example."""

    def example(self, index: int) -> Example:
        """The generated word, but for the first."""
        if index == 0:
            raise ValueError("row 0 is damaged")
        return super().example(index)


def broken_for(broken_purpose, config, purpose, seed, **options):
    """As `make_dataset`; the data set of one purpose is broken."""
    return (BrokenDataset if purpose == broken_purpose else ReverseText)(config, purpose, seed)


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_example_that_the_environment_can_not_give_is_dropped_after_three_attempts(tmp_path, monkeypatch, purpose):
    """Its group is poison, by name; training goes on, and an evaluation is of the prompts that there are."""
    config = ring_config(tmp_path, "inproc", trainer={"max_steps": 3})
    with ring(config) as run:
        with monkeypatch.context() as rollout_only:
            rollout_only.setattr("actors.datasets.make_dataset", partial(broken_for, purpose))
            run.start("rollout-0")
        run.start("packer-0", "trainer-0", "inference-0", "reward-0").wait()
        assert "environment: reverse_text example 0: ValueError: row 0 is damaged" in last_failure(run)
    dropped = check_promise(config).dropped
    summary = summary_of(config)
    prompts = [summary[key]["reverse_text"]["num_prompts"] for key in ("eval_before", "eval_after")]
    if purpose == "train":
        assert (list(dropped.values()), prompts) == (["poison"], [3, 3])
    else:
        assert (dropped, prompts, summary["eval_ledger"]["dropped"]) == ({}, [2, 2], {"poison": 2})


# --- peers -------------------------------------------------------------------------------------------------------


def test_peers_of_a_packer_that_never_comes_give_up(tmp_path):
    """Each kind of peer ends with PackerSilentError soon after bus.peer_timeout."""
    config = ring_config(tmp_path, bus={"peer_timeout": 0.5})
    with ring(config) as run:
        run.start(*PEERS)
        join(run, *PEERS)
        for name in PEERS:
            assert isinstance(run[name].error, PackerSilentError), (name, run[name].error)
            assert "bus.peer_timeout 0.5 s" in str(run[name].error)


def test_drain_without_a_packer_is_bounded(tmp_path, monkeypatch):
    """A rollout and a reward actor that hold groups leave after the drain's time though nobody releases them."""
    monkeypatch.setattr(actors.rollout.loop, "Drain", partial(Drain, seconds=0.7))
    monkeypatch.setattr(actors.reward.loop, "Drain", partial(Drain, seconds=0.7))
    # more steps than end while this test is held up
    config = ring_config(
        tmp_path, reward=own_reward("slow", seconds=1.0), trainer={"max_steps": 1000}, eval={"num_prompts": 0}
    )
    with ring(config) as run:
        run.start()
        wait_until(lambda: run["reward-0"].value("grpo_reward_held_groups"), "reward-0 holds a group")
        run["packer-0"].crash()
        for name in PEERS:
            run[name].actor.drain()
        join(run, *PEERS)
        assert [run[name].error for name in PEERS] == [None] * 4
        assert run["rollout-0"].value("grpo_rollout_held_groups") > 0


def test_drained_trainer_saves_what_it_has_trained(tmp_path):
    """A trainer drained between checkpoints leaves one of its last step, and its successor goes on from it."""
    config = ring_config(
        tmp_path,
        "inproc",
        trainer={"max_steps": 30, "checkpoint": {"interval": 30}},
        eval={"num_prompts": 0},
    )
    stand = Stand(step=3)
    with ring(config) as run:
        run.start("packer-0", *PEERS[:-1]).start("trainer-0", learner=stand.learner)
        assert stand.reached.wait(PATIENCE_SECONDS)
        run["trainer-0"].actor.drain()
        stand.go_on.set()
        join(run, "trainer-0")
        saved = run["trainer-0"].value("grpo_trainer_steps_total")
        assert saved == 3
        assert [path.name for path in (config.output / "checkpoints").glob("step_*")] == [f"step_{saved:.0f}"]
        run.start("trainer-0").wait()
        assert run["trainer-0"].value("grpo_trainer_steps_total") == 30 - saved


@pytest.mark.slow
def test_an_engine_that_freezes_with_requests_under_way_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connections and answers nothing: rollouts ask another one as soon as its heartbeats have stopped."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(faults))
    slow = {"engine": {"type": "fake", "token_seconds": 0.01}}
    config = ring_config(
        tmp_path,
        trainer={"max_steps": 30, "checkpoint": {"interval": 10}},
        up={"inference": 2},
        inference=slow,
        reward=held_reward(tmp_path, calls=24),  # the run does not end before the engine freezes
        eval={"num_prompts": 0},
        bus={"lease": 4.0},  # the others go on after one, and the rollout must not lose its own
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        (faults / "inference-1@inference.request").write_text("SIGSTOP")
        go_on(tmp_path)
        wait_until((faults / "inference-1@inference.request.hit").exists, "the fault")
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


def test_reward_actors_hand_over_to_new_processes_after_so_many_groups(tmp_path):
    """Nothing is lost or sampled again, and the kernel would choose them first when memory runs out.

    One reward actor scores all 36 groups. How many more than 9 its first process gets depends on when the rollout hears
    that it drains, so one hand-over is certain.
    """
    config = ring_config(
        tmp_path,
        trainer={"max_steps": 12},
        reward=own_reward("slow", seconds=0.05) | {"max_groups_per_process": 9},
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(
            lambda: _oom_score(up.pid, "reward-0") >= REWARD_OOM_SCORE > _oom_score(up.pid, "packer-0") >= 0, "scores"
        )
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    log = (config.output / "logs" / "reward-0.log").read_text()
    assert "groups have been scored here (reward.max_groups_per_process 9)" in log
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


def _oom_score(up: int, name: str) -> int:
    """What /proc says of an actor; −1 while it is not there."""
    try:
        return int(Path(f"/proc/{children(up)[name]}/oom_score_adj").read_text())
    except (KeyError, OSError):
        return -1
