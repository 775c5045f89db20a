import asyncio
import json
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actors.reward.errors import RewardError
from actors.reward.functions import (
    NamedReward,
    StepReward,
    load_rewards,
)
from actors.reward.runner import MAX_STUCK_CALLS, TICK_SECONDS
from actors.reward.scorer import Scorer
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup, single_turn
from tests.actors.reward.conftest import WAIT, Hanging
from tests.actors.reward.test_loop import group as sampled_group
from tests.ring.harness import wait_until


def _reward(function: Any, name: str = "mine", **kwargs: Any) -> NamedReward:
    return NamedReward(name, 1.0, kwargs, function)


def _group(completions: list[str], prompt: Any = "p", columns: dict[str, Any] | None = None) -> RolloutGroup:
    """A sampled group; completion i has i + 1 tokens, counted through the group."""
    offsets = np.cumsum([0, *range(1, len(completions) + 1)])
    return sampled_group().model_copy(
        update={
            "prompt": prompt, "columns": columns or {}, "completions": completions,
            "token_ids": np.arange(offsets[-1], dtype=np.int32),
            **single_turn(np.array([1], np.int32), offsets, np.array([[0, 1, 0]])),
        }
    )  # fmt: skip


class _Scorer(Scorer):
    """A scorer with functions f0, f1, … that scores completions."""

    def __init__(self, functions: tuple[Any, ...], timeout: float, retries: int, on_timeout: Any) -> None:
        super().__init__(timeout, 2 * len(functions), retries, on_timeout, self._note)
        self.late: list[tuple[str, str]] = []
        self.rewards = [_reward(function, f"f{i}") for i, function in enumerate(functions)]

    def _note(self, group: RolloutGroup, words: str, outcome: str) -> None:
        self.late.append((words, outcome))

    def scored(self, *completions: str, **columns: Any) -> list[list[float]]:
        """Rewards by function and completion."""
        return cast(list[list[float]], self.score(self.rewards, _group(list(completions), columns=columns)).tolist())


@pytest.fixture
def make_scorer() -> Iterator[Callable[..., _Scorer]]:
    """Scorers that are closed at the end."""
    made: list[_Scorer] = []

    def make(*functions: Any, timeout: float = WAIT, retries: int = 0, on_timeout: str = "fail") -> _Scorer:
        made.append(_Scorer(functions, timeout, retries, on_timeout))
        return made[-1]

    yield make
    for scorer in made:
        scorer.runner.close()


def test_functions_are_called_as_trl_calls_them(make_scorer: Any) -> None:
    """Lists of prompts, completions, token ids and columns with one item per completion, by keyword."""
    seen = {}

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.5, 1.5]

    assert make_scorer(reward).scored("a", "b", answer="x", level=3) == [[0.5, 1.5]]
    assert seen == {
        "prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[0], [1, 2]], "answer": ["x", "x"],
        "level": [3, 3],
    }  # fmt: skip


def test_token_ids_go_to_functions_that_name_them_and_to_no_other_that_would_refuse_them(make_scorer: Any) -> None:
    """One counts tokens; one takes prompts and completions, and nothing else."""
    rows = make_scorer(
        lambda prompts, completions, completion_ids: [len(ids) for ids in completion_ids],
        lambda prompts, completions: [9.0, 9.0],
    ).scored("a", "b")
    assert rows == [[1.0, 2.0], [9.0, 9.0]]


def test_chat_prompts_get_chat_completions(make_scorer: Any) -> None:
    """As TRL does: a completion of a list of messages is a list with the assistant's message."""
    scorer = make_scorer(lambda prompts, completions: [len(c[0]["content"]) for c in completions])
    assert scorer.score(scorer.rewards, _group(["abc"], [{"role": "user", "content": "hi"}])).tolist() == [[3.0]]


def test_sync_and_async_functions_run_side_by_side(make_scorer: Any) -> None:
    """Two that wait for each other both finish."""
    met = threading.Barrier(2, timeout=WAIT)

    def sync(prompts: Any, completions: Any) -> list[float]:
        met.wait()
        return [1.0]

    async def asynchronous(prompts: Any, completions: Any) -> list[float]:
        await asyncio.to_thread(met.wait)
        return [2.0]

    assert make_scorer(sync, asynchronous).scored("c") == [[1.0], [2.0]]


def test_none_means_not_applicable(make_scorer: Any) -> None:
    """None arrives as NaN, and only there."""
    [[first, second]] = make_scorer(lambda prompts, completions: [None, 0.0]).scored("a", "b")
    assert math.isnan(first)
    assert second == 0.0


def test_kwargs_win_over_columns_of_the_data(make_scorer: Any) -> None:
    """The configuration says level 1, a column says 7."""
    reward = _reward(lambda prompts, completions, level: [level], level=1.0)
    assert make_scorer().score([reward], _group(["a"], columns={"level": 7.0})).tolist() == [[1.0]]


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_never_replaces_what_was_sampled(make_scorer: Any, name: str) -> None:
    """It is refused by name, as is one of `kwargs`."""
    with pytest.raises(ConfigError, match=f"has a column '{name}'.*rename the column"):
        make_scorer(lambda **arguments: [1.0]).scored("a", **{name: "of the data"})
    with pytest.raises(ConfigError, match=f"reward.functions.0.kwargs.{name}: "):
        load_rewards([RewardFunctionConfig(path="exact_match", kwargs={name: []})])


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (
            lambda **_: 1 / 0,
            "reward_raised",
            r"f0 raised ZeroDivisionError: division by zero \(test_scorer.py, line \d+",
        ),
        (lambda **_: json.loads("x"), "reward_raised", r"f0 raised JSONDecodeError.*\(test_scorer.py, line \d+"),
        (lambda **_: (_raise(ValueError("late")) for _ in "ab"), "reward_raised", r"f0 raised ValueError: late"),
        (lambda **_: [1.0], "reward_invalid", "f0 returned 1 values for 2 completions"),
        (lambda **_: 3, "reward_invalid", "f0 returned int, expected a list of 2"),
        (lambda **_: "10", "reward_invalid", "f0 returned str, expected a list of 2"),
        (lambda **_: {0: 1.0, 1: 2.0}, "reward_invalid", "f0 returned dict, expected a list of 2"),
        (lambda **_: [1.0, "1"], "reward_invalid", "f0 returned '1' for completion 1"),
        (lambda **_: [[1.0], 1.0], "reward_invalid", r"f0 returned \[1.0\] for completion 0"),
        (lambda **_: [math.nan, 1.0], "reward_invalid", "f0 returned nan for completion 0"),
        (lambda **_: [1.0, math.inf], "reward_invalid", "f0 returned inf for completion 1"),
        (lambda prompts: [1.0, 1.0], "reward_raised", "unexpected keyword argument 'completions'"),
    ],
)
def test_a_bad_function_fails_the_group_by_name(make_scorer: Any, function: Any, reason: str, words: str) -> None:
    """Nothing is scored 0 instead: the group fails with a countable reason and words that name the function."""
    with pytest.raises(RewardError, match=words) as caught:
        make_scorer(function).scored("a", "b")
    assert caught.value.reason == reason


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_a_function_that_raises_to_end_the_process_fails_its_group_and_nothing_else(
    make_scorer: Any, error: BaseException
) -> None:
    """Sync and async alike: the error names the function, and the next group is scored."""

    def sync(prompts: Any, completions: list[str]) -> list[float]:
        return [1.0] if completions == ["fine"] else _raise(error)

    async def asynchronous(prompts: Any, completions: list[str]) -> list[float]:
        return sync(prompts, completions)

    for function in (sync, asynchronous):
        scorer = make_scorer(function)
        with pytest.raises(RewardError, match=f"f0 raised {type(error).__name__}"):
            scorer.scored("bad")
        assert scorer.scored("fine") == [[1.0]]


def test_a_raising_function_is_told_apart_by_type_and_line_and_shows_its_own_frames(make_scorer: Any) -> None:
    """Two messages from one line are one error; the traceback begins in the function."""

    def reward(prompts: Any, completions: list[str]) -> list[float]:
        raise KeyError(completions[0])

    caught = []
    for completion in ("a", "b"):
        with pytest.raises(RewardError) as error:
            make_scorer(reward).scored(completion)
        caught.append(error.value)
    assert caught[0].origin == caught[1].origin
    assert str(caught[0]) != str(caught[1])
    cause = caught[0].__cause__
    assert cause is not None
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["reward"]


def test_a_slow_sync_function_is_given_up_and_named(make_scorer: Any, hanging: Hanging) -> None:
    """Its thread can't be killed; others take its place until a new process is due, which is said by name."""

    def slow(prompts: Any, completions: list[str]) -> list[float]:
        if completions == ["hang"]:
            hanging.hang()
        return [1.0]

    scorer = make_scorer(slow, timeout=0.02)
    for _ in range(MAX_STUCK_CALLS):
        assert scorer.runner.worn_out == ""
        with pytest.raises(RewardError, match=r"f0 took more than 0.02 s \(reward.timeout\)") as caught:
            scorer.scored("hang")
        assert caught.value.reason == "reward_timeout"
    assert f"calls of f0 ({MAX_STUCK_CALLS}) have not returned within reward.timeout 0.02 s" in scorer.runner.worn_out
    scorer.runner.timeout = WAIT
    assert scorer.scored("fine") == [[1.0]]
    hanging.release()
    wait_until(lambda: not scorer.runner.worn_out, "a call that returns after all gives its thread back")


@pytest.mark.usefixtures("loop_goes_on")
def test_a_slow_async_function_is_cancelled(make_scorer: Any, hanging: Hanging) -> None:
    """Nothing of it is left running."""
    cancelled = threading.Event()

    async def slow(prompts: Any, completions: Any) -> list[float]:
        try:
            await hanging.sleep()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0]

    scorer = make_scorer(slow, timeout=0.1)
    with pytest.raises(RewardError, match=r"f0 took more than 0.1 s \(reward.timeout\)$"):
        scorer.scored("c")
    assert cancelled.wait(WAIT)
    assert scorer.runner.worn_out == ""


@pytest.mark.parametrize("always", [False, True])
def test_an_async_function_that_blocks_fails_its_group_by_name_and_others_only_if_it_always_does(
    make_scorer: Any, hanging: Hanging, always: bool
) -> None:
    """A function that has returned before will do so for who waits behind; a blocked loop calls for a new process."""
    entered = threading.Event()

    async def blocking(prompts: Any, completions: list[str]) -> list[float]:
        if completions == ["block"]:
            entered.set()
            hanging.hang()
        await asyncio.sleep(0)
        return [1.0]

    scorer = make_scorer(blocking, timeout=0.5)
    if not always:
        scorer.scored("fine")
    words = "f0 took more than 0.5 s.*; f0 blocks the event loop.*make it a plain def"
    with ThreadPoolExecutor(2) as threads:
        blocked = threads.submit(scorer.scored, "block")
        assert entered.wait(WAIT)
        waiting = threads.submit(scorer.scored, "fine")
        with pytest.raises(RewardError, match=words):
            blocked.result(WAIT)
        wait_until(lambda: "f0 blocks the event loop" in scorer.runner.worn_out, "a new process is asked for")
        if always:
            with pytest.raises(RewardError, match=words):
                waiting.result(WAIT)
        else:
            wait_until(lambda: hanging.num_behind, "who waits behind gets more time")
        assert waiting.done() == always
        hanging.release()
        if not always:
            assert waiting.result(WAIT) == [[1.0]]


def test_a_call_that_was_held_up_has_its_own_time_once_the_event_loop_goes_on(
    make_scorer: Any, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocking function returns right before the look at who is late: the loop has only come to the others."""
    entered = threading.Event()

    async def blocking(prompts: Any, completions: list[str]) -> list[float]:
        if completions == ["block"]:
            entered.set()
            hanging.hang()
        await asyncio.sleep(0)
        return [1.0]

    scorer = make_scorer(blocking, timeout=0.5)
    scorer.scored("fine")

    def returns_meanwhile(calls: Any, timeout: float) -> Any:
        if timeout != TICK_SECONDS:
            return hanging.wait(calls, timeout)
        hanging.release()
        wait_until(lambda: not scorer.runner._loop_stalls, "the loop goes on")
        return SimpleNamespace(not_done=set(calls))

    monkeypatch.setattr("actors.reward.runner.wait", returns_meanwhile)
    with ThreadPoolExecutor(2) as threads:
        blocked = threads.submit(scorer.scored, "block")
        assert entered.wait(WAIT)
        assert threads.submit(scorer.scored, "fine").result(WAIT) == [[1.0]]
        blocked.exception(WAIT)  # late or not: it returned about when its limit passed


WORDS = "f0 took more than 0.4 s (reward.timeout)"


def test_a_late_function_is_called_again_and_no_other_is(make_scorer: Any, hanging: Hanging) -> None:
    """The first call of f0 hangs and its second returns; f1 is called once."""
    calls: Counter[str] = Counter()

    def slow_at_first(prompts: Any, completions: Any) -> list[float]:
        calls["f0"] += 1
        if calls["f0"] == 1:
            hanging.hang()
        return [1.0]

    def quick(prompts: Any, completions: Any) -> list[float]:
        calls["f1"] += 1
        return [2.0]

    scorer = make_scorer(slow_at_first, quick, timeout=0.4, retries=1)
    assert scorer.scored("a") == [[1.0], [2.0]]
    assert calls == {"f0": 2, "f1": 1}
    assert scorer.late == [(WORDS, "retried")]


@pytest.mark.usefixtures("loop_goes_on")
@pytest.mark.parametrize(("on_timeout", "value"), [("none", math.nan), ("zero", 0.0)])
def test_a_function_that_is_late_to_the_last_counts_as_the_run_says(
    make_scorer: Any, hanging: Hanging, on_timeout: str, value: float
) -> None:
    """For each completion; what the others returned stays, and each time is told."""

    async def slow(prompts: Any, completions: Any) -> list[float]:
        await hanging.sleep()
        return [1.0, 1.0]

    scorer = make_scorer(slow, lambda **_: [3.0, 4.0], timeout=0.4, retries=1, on_timeout=on_timeout)
    np.testing.assert_array_equal(scorer.scored("a", "b"), [[value, value], [3.0, 4.0]])
    assert scorer.late == [(WORDS, "retried"), (WORDS, on_timeout)]


@pytest.mark.usefixtures("loop_goes_on")
@pytest.mark.parametrize(("on_timeout", "purpose"), [("fail", "train"), ("none", "eval"), ("zero", "eval")])
def test_a_late_function_fails_the_group_where_told_to_and_always_in_an_evaluation(
    make_scorer: Any, hanging: Hanging, on_timeout: Any, purpose: str
) -> None:
    """What is measured is not made up."""

    async def slow(prompts: Any, completions: Any) -> list[float]:
        await hanging.sleep()
        return [1.0]

    scorer = make_scorer(slow, timeout=0.4, retries=1, on_timeout=on_timeout)
    group = _group(["a"]).model_copy(update={"purpose": purpose})
    with pytest.raises(RewardError) as caught:
        scorer.score(scorer.rewards, group)
    assert (caught.value.reason, str(caught.value)) == ("reward_timeout", f"{WORDS} 2 times (reward.timeout_retries)")
    assert scorer.late == [(WORDS, "retried"), (WORDS, "fail")]


def test_a_function_that_raises_fails_the_group_though_another_is_late(make_scorer: Any, hanging: Hanging) -> None:
    """The late one is given up like any other: it keeps a thread, and would be called again for nothing."""
    scorer = make_scorer(hanging.hang, lambda **_: 1 / 0, timeout=0.05, retries=1, on_timeout="none")
    with pytest.raises(RewardError, match="f1 raised ZeroDivisionError"):
        scorer.scored("a")
    assert scorer.runner.stuck == ["f0"]


def test_an_async_function_that_blocks_fails_its_group_whatever_counts_for_late_ones(
    make_scorer: Any, hanging: Hanging
) -> None:
    """Its event loop stands still, so nothing can be called again there; a new process is needed."""

    async def blocking(prompts: Any, completions: Any) -> list[float]:
        hanging.hang()
        return [1.0]

    scorer = make_scorer(blocking, timeout=0.5, retries=3, on_timeout="none")
    with pytest.raises(RewardError, match=r"f0 took more than 0.5 s \(reward.timeout\); f0 blocks the event loop"):
        scorer.scored("a")
    assert [outcome for _, outcome in scorer.late] == ["fail"]


def test_calls_that_are_to_be_repeated_do_not_wear_the_process_out(make_scorer: Any, hanging: Hanging) -> None:
    """Of each concluded group's calls MAX_STUCK_CALLS must hang, so that each process brings some groups to an end."""
    scorer = make_scorer(hanging.hang, timeout=0.01, retries=1, on_timeout="none")
    for _ in range(MAX_STUCK_CALLS // 2):
        assert np.isnan(scorer.scored("a")).all()
    assert scorer.runner.worn_out == ""  # two calls at once, each once again: two more may hang
    scorer.scored("a")
    assert f"calls of f0 ({MAX_STUCK_CALLS + 2}) have not returned" in scorer.runner.worn_out


def _steps(values: Any, *completions: str) -> Any:
    """What a function of `reward.steps` that returns these is understood to have said."""
    scorer = Scorer(WAIT, 2)
    try:
        (found,) = scorer.call(
            [StepReward("mine", 0.0, {}, lambda **_: values)], _group(list(completions)), required=True
        )
        return found
    finally:
        scorer.runner.close()


def test_steps_are_pairs_of_a_place_and_a_reward() -> None:
    """Numbers of numpy will do, and None is no steps; completion i has i + 1 tokens here."""
    assert _steps([[(1, 2)], [(np.int64(1), np.float32(0.5)), [2, 0.0]], None], "a", "b", "c") == [
        [(1, 2.0)], [(1, 0.5), (2, 0.0)], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[(1, 1.0)]], "mine returned 1 values for 2 completions"),
        (3, "mine returned int, expected a list of 2"),
        ([[], 0.5], r"mine returned 0.5 for completion 1, expected \(end, reward\) pairs"),
        ([[(1.5, 1.0)], []], r"mine returned \[\(1.5, 1.0\)\] for completion 0, expected"),
        ([[], [(3, 1.0)]], r"mine returned the step \(3, 1.0\) for completion 1; an end is from 1 to 2"),
        ([[(0, 1.0)], []], r"mine returned the step \(0, 1.0\) for completion 0; an end is from 1 to 1"),
        ([[(1, math.nan)], []], r"mine returned the step \(1, nan\) for completion 0; .* a reward is finite"),
    ],
)
def test_bad_steps_fail_the_group_by_name(values: Any, words: str) -> None:
    """The reason is that of any function that returns what it should not."""
    with pytest.raises(RewardError, match=words) as caught:
        _steps(values, "a", "b")
    assert caught.value.reason == "reward_invalid"
