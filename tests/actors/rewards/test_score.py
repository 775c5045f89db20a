import asyncio
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.rewards.load import load_function
from actors.rewards.score import NamedReward, RewardError, Scorer, load_rewards
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError


def _reward(function: Any, name: str = "mine", **kwargs: Any) -> NamedReward:
    return NamedReward(name, 1.0, kwargs, function)


@pytest.fixture
def make_scorer() -> Iterator[Any]:
    """Scorers that are closed at the end."""
    made: list[Scorer] = []

    def make(*functions: Any, timeout: float = 5.0) -> Scorer:
        made.append(Scorer([_reward(f, f"f{i}") for i, f in enumerate(functions)], timeout, num_threads=2))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def test_functions_are_called_as_trl_calls_them(make_scorer: Any) -> None:
    """Lists of prompts, completions and columns with one item per completion, by keyword."""
    seen = {}

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.5, 1.5]

    rewards_FG = make_scorer(reward).score("say", ["a", "b"], {"answer": "x", "level": 3})
    assert seen == {"prompts": ["say"] * 2, "completions": ["a", "b"], "answer": ["x"] * 2, "level": [3, 3]}
    np.testing.assert_array_equal(rewards_FG, [[0.5, 1.5]])


def test_chat_prompts_get_chat_completions(make_scorer: Any) -> None:
    """As TRL does: a completion of a list of messages is a list with the assistant's message."""
    messages = [{"role": "user", "content": "hi"}]
    rewards_FG = make_scorer(lambda prompts, completions: [len(c[0]["content"]) for c in completions]).score(
        messages, ["abc"], {}
    )
    assert rewards_FG.tolist() == [[3.0]]


def test_sync_and_async_functions_run_side_by_side(make_scorer: Any) -> None:
    """Two that wait for each other both finish."""
    met = threading.Barrier(2, timeout=5)

    def sync(prompts: Any, completions: Any) -> list[float]:
        met.wait()
        return [1.0]

    async def asynchronous(prompts: Any, completions: Any) -> list[float]:
        await asyncio.to_thread(met.wait)
        return [2.0]

    assert make_scorer(sync, asynchronous).score("p", ["c"], {}).tolist() == [[1.0], [2.0]]


def test_none_means_not_applicable(make_scorer: Any) -> None:
    """None arrives as NaN, and only there."""
    row = make_scorer(lambda prompts, completions: [None, 0.0]).score("p", ["a", "b"], {})[0]
    assert math.isnan(row[0])
    assert row[1] == 0.0


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (lambda prompts, completions: 1 / 0, "reward_raised", "f0 raised ZeroDivisionError: division by zero"),
        (lambda prompts, completions: [1.0], "reward_invalid", "f0 returned 1 values for 2 completions"),
        (lambda prompts, completions: 3, "reward_invalid", "f0 returned int, expected a list of 2"),
        (lambda prompts, completions: [1.0, "x"], "reward_invalid", "f0 returned 'x' for completion 1"),
        (lambda prompts, completions: [math.nan, 1.0], "reward_invalid", "f0 returned nan for completion 0"),
        (lambda prompts, completions: [1.0, math.inf], "reward_invalid", "f0 returned inf for completion 1"),
        (lambda prompts: [1.0, 1.0], "reward_raised", "unexpected keyword argument 'completions'"),
    ],
)
def test_a_bad_function_fails_the_group_by_name(make_scorer: Any, function: Any, reason: str, words: str) -> None:
    """Nothing is scored 0 instead: the group fails with a countable reason and words that name the function."""
    with pytest.raises(RewardError, match=words) as caught:
        make_scorer(function).score("p", ["a", "b"], {})
    assert caught.value.reason == reason


def test_a_slow_sync_function_is_given_up_and_named(make_scorer: Any) -> None:
    """Its thread can't be killed, so it is counted as stuck; other groups go on."""
    release = threading.Event()

    def slow(prompts: Any, completions: list[str]) -> list[float]:
        if completions == ["hang"]:
            release.wait(10)
        return [1.0]

    scorer = make_scorer(slow, timeout=0.1)
    with pytest.raises(RewardError, match=r"f0 took more than 0.1 s \(reward.timeout\)") as caught:
        scorer.score("p", ["hang"], {})
    assert (caught.value.reason, scorer.num_stuck) == ("reward_timeout", 1)
    assert scorer.score("p", ["fine"], {}).tolist() == [[1.0]]
    release.set()


def test_a_slow_async_function_is_cancelled(make_scorer: Any) -> None:
    """Nothing of it is left running."""
    cancelled = threading.Event()

    async def slow(prompts: Any, completions: Any) -> list[float]:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0]

    started = time.monotonic()
    with pytest.raises(RewardError):
        make_scorer(slow, timeout=0.1).score("p", ["c"], {})
    assert cancelled.wait(2)
    assert time.monotonic() - started < 5


def test_functions_load_from_name_module_and_file(tmp_path: Path) -> None:
    """All three spellings of a path."""
    (tmp_path / "mine.py").write_text("def f(prompts, completions): return [7.0]\n")
    assert load_function("exact_match", "k").__name__ == "exact_match"
    assert load_function("actors.rewards.builtin:exact_match", "k").__name__ == "exact_match"
    assert load_function(f"{tmp_path}/mine.py:f", "k")([], []) == [7.0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("exact_mach", "key: no built-in reward 'exact_mach', did you mean 'exact_match'"),
        ("no.such.module:f", "key: can't import no.such.module"),
        ("actors.rewards.builtin:nothing", "key: actors.rewards.builtin has no function 'nothing'"),
        ("/nowhere/mine.py:f", "key: there is no file /nowhere/mine.py"),
    ],
)
def test_a_function_that_can_not_be_found_is_named_with_its_key(path: str, words: str) -> None:
    """The error says which key, and what is there instead."""
    with pytest.raises(ConfigError, match=words):
        load_function(path, "key")


def test_a_file_that_fails_on_import_says_why(tmp_path: Path) -> None:
    """The cause is in the words."""
    (tmp_path / "bad.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError, match="fails on import: ModuleNotFoundError"):
        load_function(f"{tmp_path}/bad.py:f", "key")


def test_functions_of_the_same_name_are_told_apart() -> None:
    """So that their columns in metrics and samples do not overwrite each other."""
    configs = [
        RewardFunctionConfig(path="exact_match"),
        RewardFunctionConfig(path="actors.rewards.builtin:exact_match"),
    ]
    assert [reward.name for reward in load_rewards(configs)] == ["exact_match_0", "exact_match_1"]
