"""Texts of completions, which are texts or lists of messages."""

from typing import Any

Completion = str | list[dict[str, Any]]


def text_of(completion: Completion) -> str:
    """Return the text written by the model; of a chat completion, the texts of all assistant messages, joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(turn.get("content") or "") for turn in completion if turn.get("role") == "assistant")
