"""Values as JSON can hold them, and texts that are cut for a list."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.telemetry.conversations import content_text

SNIPPET_CHARACTERS = 160
"""Characters around the place of a search in a list."""


def number(value: float | None) -> float | None:
    """Return a number; None for NaN and infinity."""
    return None if value is None or not math.isfinite(value) else float(value)


def numbers(values: Iterable[float], digits: int | None = None) -> list[float | None]:
    """Return numbers, rounded to so many digits behind the point; None for NaN and infinity."""
    return [number(value) if digits is None or not math.isfinite(value) else round(value, digits) for value in values]


def storable(text: str) -> str:
    """Return a text that UTF-8 can hold: half a surrogate pair, which a model's answer may have, becomes `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, characters: int) -> str:
    """Return the start of a text, with an ellipsis if it is longer."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def around(text: str, at: int, length: int) -> dict[str, Any]:
    """Return the surroundings of a place in a text: what stands before it, the place itself, and what follows."""
    start, end = max(0, at - SNIPPET_CHARACTERS // 2), at + length
    return {
        "before": ("…" if start else "") + text[start:at],
        "match": text[at:end],
        "after": cut(text[end:], SNIPPET_CHARACTERS // 2),
    }


def message_text(message: Mapping[str, Any]) -> str:
    """Return all that a message says: thoughts, content and tool calls."""
    calls = message.get("tool_calls") or []
    written = [call_of(call) for call in calls]
    parts = [str(message.get("reasoning_content") or ""), content_text(message.get("content"))]
    return "\n".join([*filter(None, parts), *(f"{name}({arguments})" for name, arguments in written)])


def call_of(call: Any) -> tuple[str, str]:
    """Return name and arguments of a tool call, the arguments as text."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name", "?")), written


def conversation(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt as messages: plain text is a single message without a role."""
    return [{"role": "", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def prompt_text(prompt: Any) -> str:
    """Return all that a prompt says."""
    messages: Sequence[Mapping[str, Any]] = conversation(prompt)
    return "\n".join(map(message_text, messages))
