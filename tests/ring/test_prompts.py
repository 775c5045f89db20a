"""Whole runs with limits of prompts, and with texts that end a completion."""

from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests.ring.harness import ALL, ring, ring_config, wait_until


def config_of(folder: Path, rollout: dict[str, Any] | None = None, **environment: Any) -> RunConfig:
    """A run whose prompts have 5 to 9 tokens."""
    one = {"type": "reverse_text", "min_letters": 4, "max_letters": 8} | environment
    return ring_config(folder, environments=[one], rollout={"group_size": 2} | (rollout or {}))


def prompts_of(config: RunConfig) -> list[str]:
    """Prompts of all groups that were trained or evaluated."""
    return [record["prompt"] for record in read_lines(config.output / "samples.jsonl")]


@pytest.mark.slow
def test_long_prompts_are_left_out_of_training_and_evaluations(tmp_path: Path) -> None:
    """All steps are trained, on the others."""
    config = config_of(tmp_path, max_prompt_tokens=6)
    with ring(config) as run:
        run.start(*ALL).wait()
        assert run["packer"].value("grpo_packer_long_prompts", environment="reverse_text") > 0
    assert {len(prompt) for prompt in prompts_of(config)} == {5, 6}


@pytest.mark.slow
def test_long_prompts_are_cut_and_counted(tmp_path: Path) -> None:
    """Reward functions and the files of the run show them whole."""
    config = config_of(tmp_path, max_prompt_tokens=6, long_prompts="truncate_left")
    with ring(config) as run:
        run.start(*ALL).wait()
        assert run["rollout"].value("grpo_rollout_cut_prompts_total", environment="reverse_text") > 0
    assert max(map(len, prompts_of(config))) > 6


@pytest.mark.slow
def test_a_limit_that_no_prompt_keeps_ends_the_packer_in_words(tmp_path: Path) -> None:
    """At its first draw."""
    with ring(config_of(tmp_path, max_prompt_tokens=4)) as run:
        run.start(*ALL)
        error = wait_until(lambda: run["packer"].error, "the packer's end")
    assert isinstance(error, ConfigError)
    assert "environments[].max_prompt_tokens: of reverse_text no prompt is short enough" in str(error)


@pytest.mark.slow
def test_a_stop_text_ends_completions_of_training_and_evaluations(tmp_path: Path) -> None:
    """Their texts are without it, and they count as ended."""
    config = config_of(tmp_path, rollout={"stop": list("abcdefghijkl")})
    with ring(config) as run:
        run.start(*ALL).wait()
    records = read_lines(config.output / "samples.jsonl")
    assert {record["purpose"] for record in records} == {"train", "eval"}
    texts = [text for record in records for text in record["completions"]]
    assert not set("abcdefghijkl") & set("".join(texts))
    assert "stop" in {stop for record in records for stop in record["stop_conditions"]}
