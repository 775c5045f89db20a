"""TRL's `log_extra`, `log_metric` and `trainer_state`: passed by name, and what is logged reaches the scored group."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.packer.results import step_values
from actors.reward.errors import RewardError
from actors.reward.functions import NamedReward, load_rewards
from actors.reward.group_scorer import GroupScorer
from actors.reward.logged import MOST_NAMES, TEXT_CHARACTERS
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from schemas.config.actors import RewardConfig
from schemas.config.data import RewardFunctionConfig
from schemas.messages import ScoredGroup
from tests.actors.reward.test_loop import group, ones

REWARD = RewardConfig(functions=[RewardFunctionConfig(path="exact_match")])


def logging(prompts, completions, log_extra=None, log_metric=None, trainer_state=None, **columns):
    """Log a column, two metrics twice, and the step."""
    assert not columns.keys() & {"log_extra", "log_metric", "trainer_state"}
    log_extra("upper", [text.upper() for text in completions])
    log_extra("step", [trainer_state.global_step, None])
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    return [1.0] * len(completions)


def by_keywords_alone(prompts, completions, **columns):
    """Every further argument is a column."""
    return [float(len(columns) - len(columns.keys() & {"answer", "completion_ids"}))] * len(completions)


@pytest.fixture
def score() -> Iterator[Any]:
    """Scores the group of two with functions."""
    made: list[GroupScorer] = []

    def scored(*functions: Any) -> ScoredGroup:
        rewards = [NamedReward(one.__name__, 1.0, {}, one) for one in functions]
        made.append(GroupScorer(REWARD, "reward-0", Metrics("reward"), rewards, NamedReward("match", 0.0, {}, ones)))
        return made[-1].score(group())

    yield scored
    for one in made:
        one.close()


def test_logged_values_are_in_the_scored_group(score: Any) -> None:
    """Columns as they are, metrics as their mean; a function with **columns alone gets none of the three."""
    found = score(logging, by_keywords_alone)
    assert found.logged_columns == {"upper": ["A", "BB"], "step": [0, None]}
    assert found.logged_metrics == {"share": 0.5}
    assert found.rewards_FG.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_logged_values_are_in_the_files(score: Any, tmp_path: Path) -> None:
    """The column in samples.jsonl, the metric in the step's values, its mean over the groups that have it."""
    logged = score(logging)
    other = score(ones).model_copy(update={"ordinal": 1})
    third = score(logging).model_copy(update={"logged_metrics": {"share": 1.5}})
    assert step_values(1, [logged, other, third])["logged/share"] == 1.0
    assert "logged/share" not in step_values(1, [other])
    reporter = Reporter(tmp_path)
    reporter.report_samples(1, logged)
    reporter.report_samples(1, other)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line.get("logged") for line in lines] == [{"upper": ["A", "BB"], "step": [0, None]}, None]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda extra, metric: extra("c", ["one"]), "log_extra('c') has 1 values for 2 completions"),
        (lambda extra, metric: metric("m", float("nan")), "log_metric('m') got nan; log finite numbers"),
        (lambda extra, metric: [metric(str(i), 1) for i in range(MOST_NAMES + 1)], f"at most {MOST_NAMES} names"),
    ],
)
def test_values_that_cant_be_logged_are_an_error_of_the_function(score: Any, log: Any, words: str) -> None:
    """The function raises, so that its line is named."""

    def wrong(prompts, completions, log_extra, log_metric, **columns):
        log(log_extra, log_metric)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="wrong raised ValueError") as raised:
        score(wrong)
    assert words in str(raised.value)


def test_long_texts_are_cut(score: Any) -> None:
    """A group has to fit into a message."""

    def long(prompts, completions, log_extra, **columns):
        log_extra("c", ["x" * 10**6, {"a": 1}])
        return [1.0] * len(completions)

    assert score(long).logged_columns == {"c": ["x" * TEXT_CHARACTERS, "{'a': 1}"]}


def test_rewards_of_trl_are_used_by_their_own_path() -> None:
    """TRL's functions log what they have parsed."""
    pytest.importorskip("trl.rewards")
    paths = ["trl.rewards:think_format_reward"]
    [reward] = load_rewards([RewardFunctionConfig(path=path) for path in paths])
    chat = group().model_copy(
        update={"prompt": [{"role": "user", "content": "q"}], "completions": ["<think>a</think>b", "b"]}
    )
    assert reward.function(**reward.arguments(chat)) == [1.0, 0.0]
