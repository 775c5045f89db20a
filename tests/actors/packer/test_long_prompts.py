"""Examples whose prompts are too long: left out and counted by the packer, or cut by a rollout actor."""

import itertools

import pytest

from actors.algorithms.curriculum import Curriculum
from actors.datasets import Example
from actors.datasets.prompts import Prompts
from actors.packer.examples import DRAWS_IN_A_ROW, Examples
from actors.telemetry.metrics import Metrics
from schemas.config.data import DatasetBase, JsonlConfig
from schemas.errors import ConfigError


class Rows:
    """Prompts of a letter each, as long as they are told."""

    def __init__(self, lengths: list[int] | None) -> None:
        self._lengths = lengths
        self.num_examples = None if lengths is None else len(lengths)

    def example(self, index: int) -> Example:
        """A prompt of this length; without lengths, ten letters."""
        return Example("a" * (10 if self._lengths is None else self._lengths[index]), {})


def letters(prompt: str) -> list[int]:
    """A token per letter."""
    return list(range(len(prompt)))


def config(**keys: object) -> DatasetBase:
    """A file's configuration."""
    return JsonlConfig.model_validate({"path": "rows.jsonl", "name": "rows"} | keys)


def examples(lengths: list[int] | None, metrics: Metrics, **keys: object) -> Examples:
    """Of a single environment, evaluated on at most three prompts."""
    rows = Rows(lengths)
    curriculum = Curriculum([rows.num_examples], None, seed=5)
    return Examples(
        {"rows": rows}, {"rows": rows}, curriculum, {"rows": 3}, metrics, Prompts({"rows": config(**keys)}, letters)
    )


def left_out(metrics: Metrics) -> float | None:
    """As Prometheus sees it."""
    return metrics.registry.get_sample_value("grpo_packer_long_prompts", {"environment": "rows"})


def test_examples_with_long_prompts_are_left_out_and_counted() -> None:
    """Each epoch has the others once, in an order that a restart repeats; each long row counts once."""
    lengths, metrics = [3, 9, 4, 5, 7, 1], Metrics("packer")
    drawn = examples(lengths, metrics, max_prompt_tokens=4)
    order = [drawn.draw().index for _ in range(6)]
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 2, 5]
    assert left_out(metrics) == 3
    again = examples(lengths, Metrics("packer"), max_prompt_tokens=4)
    assert [again.draw().index for _ in range(6)] == order
    assert [one.index for one in drawn.of_evaluation()] == [0, 2, 5]


@pytest.mark.parametrize("lengths", [[5, 6], None])
def test_a_limit_that_no_prompt_keeps_ends_the_run_with_the_key(lengths: list[int] | None) -> None:
    """Of a file after an epoch, without an end after many draws; evaluations are then empty."""
    drawn = examples(lengths, Metrics("packer"), max_prompt_tokens=4)
    with pytest.raises(ConfigError, match=r"environments\[\].max_prompt_tokens: of rows no prompt is short enough"):
        drawn.draw()
    assert drawn.of_evaluation() == []
    assert DRAWS_IN_A_ROW > 1000


@pytest.mark.parametrize("lengths", [[9, 2], None])
def test_nothing_is_left_out_where_prompts_are_cut(lengths: list[int] | None) -> None:
    """A rollout actor cuts them."""
    metrics = Metrics("packer")
    drawn = examples(lengths, metrics, max_prompt_tokens=4, long_prompts="truncate_left")
    assert sorted({drawn.draw().index for _ in range(2)}) == [0, 1]
    assert left_out(metrics) == 0


def test_cut_prompts_keep_their_end_or_their_start() -> None:
    """Each is told; prompts that fit stay as they are, and so do long ones without a limit."""
    cut: list[str] = []
    kinds = {"truncate_left": [2, 3, 4, 5], "truncate_right": [0, 1, 2, 3], "drop": [0, 1, 2, 3, 4, 5]}
    for kind, expected in kinds.items():
        prompts = Prompts({"rows": config(max_prompt_tokens=4, long_prompts=kind)}, letters, cut.append)
        assert prompts.encode("rows", Example("abcdef", {})).ids == expected
        assert prompts.encode("rows", Example("abcd", {})).ids == [0, 1, 2, 3]
    assert cut == ["rows", "rows"]
    whole = Prompts({"rows": config()}, letters, cut.append).encode("rows", Example("abcdef", {}))
    assert whole.ids == [0, 1, 2, 3, 4, 5]


def test_variables_of_the_template_are_those_of_the_environment() -> None:
    """They are passed on where there are any, also to measure."""
    asked = []

    def encode(prompt: str, *options: object) -> list[int]:
        asked.append(options)
        return letters(prompt)

    given = config(chat_template_kwargs={"enable_thinking": False}, max_prompt_tokens=2)
    prompts = Prompts({"rows": given, "plain": config(name="plain")}, encode)
    assert prompts.is_left_out("rows", Example("abc", {}))
    prompts.encode("plain", Example("abc", {}))
    assert asked == [((), {"enable_thinking": False}), ()]
    assert all(itertools.chain(asked[:1]))
