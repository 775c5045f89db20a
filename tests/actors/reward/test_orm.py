"""Reward classes of ms-swift by their path, sync and async, and classes that are none."""

import asyncio
from pathlib import Path

import pytest

from actors.reward.functions import load_rewards
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError
from tests.actors.reward.test_loop import group

PLUGIN = """
class ORM:
    def __init__(self, args=None, **kwargs):
        self.args = args


class AsyncORM(ORM):
    pass


class Lengths(ORM):
    def __call__(self, completions, answer, **kwargs):
        ids = kwargs["response_token_ids"]
        assert [turn["content"] for turn in kwargs["messages"][0]] in (["p"], ["q"])
        return [self.args.factor * len(t) + (t == a) + 10 * len(i) for t, a, i in zip(completions, answer, ids)]


class Later(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [2.0] * len(completions)


class Needs(ORM):
    def __init__(self, args):
        self.size = args.repetition_n_grams


class Plain:
    def __call__(self, completions, **kwargs):
        return []
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """A plugin as ms-swift loads it, with bases of the same names."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return str(tmp_path / "plugin.py")


def test_a_class_of_ms_swift_scores_texts(plugin: str) -> None:
    """A text and a chat prompt alike; `args` has the configured kwargs, `response_token_ids` the tokens."""
    [reward] = load_rewards([RewardFunctionConfig(path=f"{plugin}:Lengths", kwargs={"factor": 0.5})])
    assert reward.name == "Lengths"
    chat = group().model_copy(update={"prompt": [{"role": "user", "content": "q"}]})
    for one in (group(), chat):
        assert reward.function(**reward.arguments(one)) == [0.5 + 10, 1.0 + 1 + 20]


def test_an_async_class_runs_on_the_event_loop(plugin: str) -> None:
    """As an `async def` function does."""
    [reward] = load_rewards([RewardFunctionConfig(path=f"{plugin}:Later")])
    assert reward.is_async
    assert asyncio.run(reward.function(**reward.arguments(group()))) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Plain", "Plain is a class without the base ORM or AsyncORM of ms-swift; name a function"),
        ("Needs", "has no attribute 'repetition_n_grams'; args has the attributes of kwargs: other"),
    ],
)
def test_a_class_that_cant_be_used_is_named(plugin: str, name: str, words: str) -> None:
    """With the key to change."""
    with pytest.raises(ConfigError, match=r"reward.functions.0.path: ") as raised:
        load_rewards([RewardFunctionConfig(path=f"{plugin}:{name}", kwargs={"other": 1})])
    assert words in str(raised.value)
