"""Additional reward for GSM8K. The configuration also uses the built-in `final_number`."""

from typing import Any


def has_marker(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Return 1 for each completion with `####`, the data set's mark in front of an answer, else 0."""
    return [float("####" in completion[0]["content"]) for completion in completions]
