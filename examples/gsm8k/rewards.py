"""Rewards for GSM8K beside the built-in `final_number`."""

from typing import Any


def has_marker(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion announces its answer with ####, as the data set does."""
    return [float("####" in completion[0]["content"]) for completion in completions]
