"""Reward functions in real worker processes: values, failures, and who is to blame for them."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actors.environments.worker.rewards import sendable
from actors.reward.errors import RewardError
from actors.reward.functions import NamedReward, load_rewards, load_steps
from actors.reward.scorer import Scorer
from actors.reward.workers import WorkerHost
from schemas.config.data import RewardFunctionConfig, StepRewardConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup
from tests.actors.reward.conftest import WAIT
from tests.actors.reward.test_loop import group
from tests.actors.reward.test_scorer import _group as group_of
from tests.marks import first_of
from tests.ring.harness import wait_until

pytestmark = pytest.mark.slow
FUNCTIONS = Path(__file__).with_name("scoring.py")
TIMEOUT = 4.0
"""Limit of calls that hang, long enough for all others on a busy machine."""


class Scored:
    """Functions of scoring.py in workers, with the scorer that calls them."""

    def __init__(self, timeout: float, retries: int, on_timeout: Any) -> None:
        self.host = WorkerHost(timeout)
        self.scorer = Scorer(timeout, 8, retries, on_timeout, lambda group, words, outcome: self.late.append(outcome))
        self.late: list[str] = []

    def load(self, *names: str, python: str = "same", **keys: Any) -> list[NamedReward]:
        """Functions, once workers have loaded them."""
        configs = [RewardFunctionConfig(path=f"{FUNCTIONS}:{name}", python=python, **keys) for name in names]
        rewards = load_rewards(configs, self.host)
        self.host.wait_until_loaded()
        return rewards

    def score(self, rewards: list[NamedReward], one: RolloutGroup) -> list[list[float]]:
        """Rewards by function and completion."""
        rows: list[list[float]] = self.scorer.score(rewards, one).tolist()
        return rows

    def close(self) -> None:
        """As the reward actor does."""
        self.scorer.runner.close()
        self.host.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Scored]]:
    """Scorers that are closed at the end."""
    made: list[Scored] = []

    def scored(timeout: float = WAIT, retries: int = 0, on_timeout: str = "fail") -> Scored:
        made.append(Scored(timeout, retries, on_timeout))
        return made[-1]

    yield scored
    for one in made:
        one.close()


def outcome(scored: Scored, rewards: list[NamedReward], one: RolloutGroup) -> Any:
    """Rewards, or the error."""
    try:
        return scored.score(rewards, one)
    except RewardError as error:
        return error


def chat() -> RolloutGroup:
    """A group with a chat prompt."""
    return group_of(["a", "bb"], [{"role": "user", "content": "x"}], {"answer": "y", "level": 3, "tags": ["q", None]})


def test_values_are_those_of_the_same_function_inside_the_actor(make: Any) -> None:
    """Arguments too: kwargs, columns, chats, token ids; sync, async, lazy, of numpy, beyond 64 bits."""
    scored, names = make(), ["lengths", "arguments", "waiting", "array", "lazy", "large"]
    inside = load_rewards([RewardFunctionConfig(path=f"{FUNCTIONS}:{name}") for name in names])
    workers = scored.load(*names)
    for one in (group(), chat()):
        assert str(scored.score(workers, one)) == str(scored.score(inside, one))
    assert scored.score(scored.load("lengths", kwargs={"factor": 2.5}), group()) == [[2.5, 5.0]]
    assert scored.score(scored.load("without_token_ids"), group()) == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["too_few", "texts", "objects", "not_a_number", "mapping"])
def test_wrong_values_fail_as_inside_the_actor(make: Any, name: str) -> None:
    """By `check_values`, with the same reason, and the function's name."""
    scored = make()
    [inside] = load_rewards([RewardFunctionConfig(path=f"{FUNCTIONS}:{name}")])
    failures = [outcome(scored, [reward], group()) for reward in (inside, *scored.load(name))]
    assert [failure.reason for failure in failures] == ["reward_invalid"] * 2
    assert all(str(failure).startswith(f"{name} returned ") for failure in failures)


@pytest.mark.parametrize("name", ["raising", "lazily_raising", "leaving"])
def test_an_exception_has_the_same_words_as_inside_the_actor_and_a_traceback(make: Any, name: str) -> None:
    """Of the user's file and line; the worker goes on, with the same process."""
    scored = make()
    [inside] = load_rewards([RewardFunctionConfig(path=f"{FUNCTIONS}:{name}")])
    [reward] = scored.load(name)
    expected, failure = outcome(scored, [inside], group()), outcome(scored, [reward], group())
    assert (failure.reason, str(failure)) == ("reward_raised", str(expected))
    assert failure.origin == expected.origin
    trace = str(failure.__cause__).splitlines()
    assert trace[1] == "Traceback (most recent call last):"
    assert f'File "{FUNCTIONS}"' in trace[2]


def test_a_function_of_steps_returns_steps(make: Any) -> None:
    """With integers for ends."""
    scored = make()
    steps = load_steps(StepRewardConfig(path=f"{FUNCTIONS}:steps", python="same"), scored.host)
    scored.host.wait_until_loaded()
    assert scored.scorer.call([steps], group(), required=True) == [[[(1, 0.5)], [(1, 0.5), (2, 0.5)]]]


def test_the_workers_have_the_interpreter_of_the_configuration(make: Any, tmp_path: Path) -> None:
    """And as many processes as it says."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nSTARTED_BY=mine exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    scored = make()
    assert scored.score(scored.load("interpreter", python=str(program)), group()) == [[1.0, 1.0]]
    assert scored.score(scored.load("interpreter"), group()) == [[0.0, 0.0]]


# --- calls at the same time -------------------------------------------------------------------------------------------


def play(scored: Scored, rewards: list[NamedReward], folder: Path, *ways: str) -> dict[str, Any]:
    """Score groups at the same time on one worker; return the outcome of each, by its column."""
    with ThreadPoolExecutor(len(ways)) as threads:
        groups = {way: group().model_copy(update={"columns": {"answer": way}}) for way in ways}
        calls = {way: threads.submit(outcome, scored, rewards, one) for way, one in groups.items()}
        for way in ways:
            wait_until(lambda way=way: [*folder.glob(f"{way}.*")], f"{way} is called")
        (folder / "go_on").touch()
        return {way: call.result(WAIT) for way, call in calls.items()}


def num_calls(folder: Path, way: str) -> int:
    """Number of calls so far."""
    return len([*folder.glob(f"{way}.*")])


def test_a_call_that_hangs_once_is_late_and_called_again(make: Any, tmp_path: Path) -> None:
    """In a new worker, for the old one was killed. Nothing counts as a reward but what was returned."""
    scored = make(TIMEOUT, retries=1)
    rewards = scored.load("by_answer", kwargs={"folder": str(tmp_path)})
    assert play(scored, rewards, tmp_path, "hang_once") == {"hang_once": [[1.0, 1.0]]}
    assert scored.late == ["retried"]


@pytest.mark.parametrize(
    ("on_timeout", "row"), first_of([("none", "[[nan, nan]]"), ("zero", "[[0.0, 0.0]]"), ("fail", "")])
)
def test_a_call_that_always_hangs_counts_as_on_timeout_says(
    make: Any, tmp_path: Path, on_timeout: str, row: str
) -> None:
    """As for a function inside the actor."""
    scored = make(TIMEOUT, retries=1, on_timeout=on_timeout)
    rewards = scored.load("by_answer", kwargs={"folder": str(tmp_path)})
    found = play(scored, rewards, tmp_path, "hang")["hang"]
    assert scored.late == ["retried", on_timeout]
    assert str(found) == (row or "by_answer took more than 4 s (reward.timeout) 2 times (reward.timeout_retries)")


def test_a_hanging_call_costs_the_others_on_its_worker_a_repetition_alone(make: Any, tmp_path: Path) -> None:
    """Their time has not passed: they get their values, and are not late."""
    scored = make(TIMEOUT)
    rewards = scored.load("by_answer", kwargs={"folder": str(tmp_path)})
    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(outcome, scored, rewards, group().model_copy(update={"columns": {"answer": "hang"}}))
        wait_until(lambda: num_calls(tmp_path, "hang"), "it hangs")
        # later: its own limit has not passed when the worker is killed
        time.sleep(TIMEOUT / 2)
        slow = threads.submit(outcome, scored, rewards, group().model_copy(update={"columns": {"answer": "slow"}}))
        failure = hanging.result(WAIT)
        (tmp_path / "go_on").touch()
        assert slow.result(WAIT) == [[1.0, 1.0]]
    assert failure.reason == "reward_timeout"
    assert num_calls(tmp_path, "slow") == 2
    assert scored.late == ["fail"]


def test_the_call_that_kills_its_worker_fails_and_no_other(make: Any, tmp_path: Path) -> None:
    """All are called again, each on a worker of its own; the guilty one dies there alone."""
    scored = make()
    rewards = scored.load("by_answer", kwargs={"folder": str(tmp_path)})
    found = play(scored, rewards, tmp_path, "die", "good", "fine")
    failure = found.pop("die")
    assert found == {"good": [[1.0, 1.0]], "fine": [[1.0, 1.0]]}
    assert failure.reason == "reward_lost"
    assert str(failure) == "by_answer: worker by_answer-0 ended with status 7 during a call"
    assert num_calls(tmp_path, "die") == 2


def test_an_async_function_that_blocks_its_worker_is_late_and_no_other(make: Any, tmp_path: Path) -> None:
    """All are late on the blocked event loop; alone, only one is."""
    scored = make(TIMEOUT)
    rewards = scored.load("blocking", kwargs={"folder": str(tmp_path)})
    found = play(scored, rewards, tmp_path, "good", "block", "fine")
    failure = found.pop("block")
    assert failure.reason == "reward_timeout"
    assert found == {"good": [[1.0, 1.0]], "fine": [[1.0, 1.0]]}


# --- start and end ----------------------------------------------------------------------------------------------------


def test_functions_that_can_not_be_loaded_are_named_with_their_keys(make: Any, tmp_path: Path) -> None:
    """All of them, by the words of the worker, before anything runs."""
    (tmp_path / "bad.py").write_text("import not_installed_anywhere\n")
    paths = [f"{FUNCTIONS}:nothing", f"{tmp_path}/bad.py:f", f"{FUNCTIONS}:lengths"]
    host = make().host
    load_rewards([RewardFunctionConfig(path=path, python="same") for path in paths], host)
    load_rewards([], host)
    with pytest.raises(ConfigError) as caught:
        host.wait_until_loaded()
    first, second = caught.value.problems
    assert first.startswith("reward.functions.0.path: ")
    assert "has no 'nothing'" in first
    assert second.startswith("reward.functions.1.path: ")
    assert "No module named 'not_installed_anywhere'" in second


def test_kwargs_that_can_not_be_sent_are_refused(make: Any) -> None:
    """YAML has dates, messages have none."""
    import datetime

    with pytest.raises(ConfigError, match=r"reward\.functions\.0\.kwargs: can't be sent to a worker process: date"):
        make().load("lengths", kwargs={"until": datetime.date(2026, 1, 1)})


def test_a_built_in_function_has_no_interpreter() -> None:
    """The error says what to remove."""
    with pytest.raises(ValueError, match="exact_match is built in and runs inside the reward actor; remove python"):
        RewardFunctionConfig(path="exact_match", python="same")


def test_the_end_waits_for_no_call(make: Any, tmp_path: Path) -> None:
    """The call fails, the process and the thread are gone, and later calls are refused."""
    scored = make()
    [process, hanging] = scored.load("process", "by_answer", kwargs={"folder": str(tmp_path)})
    [[pid, _]] = scored.score([process], group())
    failures: list[Any] = []
    one = group().model_copy(update={"columns": {"answer": "hang"}})
    caller = threading.Thread(target=lambda: failures.append(outcome(scored, [hanging], one)))
    caller.start()
    wait_until(lambda: num_calls(tmp_path, "hang"), "it is called")
    scored.host.close()
    caller.join(WAIT)
    assert [failure.reason for failure in failures] == ["reward_lost"]
    assert not Path(f"/proc/{int(pid)}").exists()
    assert "reward-workers" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="loop is closed"):
        scored.score([process], group())


def test_values_are_sent_as_what_the_actor_would_get_from_them() -> None:
    """Texts stay texts, and what is no list of values is named by its type."""
    assert sendable([True, None, 1, "1"]) == {"values": [True, None, 1, "1"]}
    assert sendable({1.0}) == {"type": "set"}
    assert sendable(3.0) == {"type": "float"}
    assert sendable([object])["values"] == ["<class 'object'>"]
