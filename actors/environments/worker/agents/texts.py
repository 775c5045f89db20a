"""Texts for a program: arguments and files with placeholders, and the prompt of an example."""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from .errors import AgentStartError

PLACEHOLDER = re.compile(r"\$\{\w+\}|\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")
"""A variable of a shell, `{{name}}` for the text `{name}`, or a placeholder."""
MOST_BYTES = 120_000
"""Longest argument or variable; the kernel takes 131 071 bytes, with the name."""


def filled(text: str, values: Mapping[str, Any], where: str) -> str:
    """Return an argument with its placeholders replaced, each once: no value is searched for placeholders.

    Args:
        text: argument, or value of a variable.
        values: by name; a value that is no text becomes JSON.
        where: words for messages.

    Raises:
        AgentStartError: there is no value of a name, or the result can't be an argument.
    """
    for match in PLACEHOLDER.finditer(text):
        if (name := match[2]) and name not in values:
            raise AgentStartError(
                f"{where} has {{{name}}}, but the example has no column {name}; there are {', '.join(sorted(values))}. "
                f"Write {{{{{name}}}}} for the text {{{name}}} itself"
            )
    # no argument has half a surrogate pair
    data = as_bytes(filled_file(text, values))
    if b"\0" in data:
        raise AgentStartError(
            f"{where} has a NUL character, which no argument can have; read the example's file instead"
        )
    if len(data) > MOST_BYTES:
        raise AgentStartError(
            f"{where} has {len(data)} bytes, but at most {MOST_BYTES} are possible; read prompt.txt or example.json in "
            "place of a placeholder"
        )
    return data.decode()


def filled_file(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with its placeholders replaced; braces around any other name stay."""

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        return as_text(values[match[2]]) if match[2] in values else match[0]

    return PLACEHOLDER.sub(replaced, text)


def has_placeholder(text: str) -> bool:
    """Return whether a text is known only with an example."""
    return PLACEHOLDER.search(text) is not None


def prompt_text(prompt: Any) -> str:
    """Return a prompt as a text: of messages the texts, with an empty line between them."""
    if not isinstance(prompt, list):
        return str(prompt or "")
    contents = [message.get("content") or "" for message in prompt]
    texts = [one if isinstance(one, str) else "".join(part.get("text") or "" for part in one) for one in contents]
    return "\n\n".join(text for text in texts if text)


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    """Return a value of an example as JSON: bytes as base64, what JSON does not know as its text."""
    return json.dumps(value, default=lambda one: base64.b64encode(one).decode() if isinstance(one, bytes) else str(one))


def as_bytes(text: str) -> bytes:
    """Return a text as UTF-8; half a surrogate pair becomes a question mark."""
    return text.encode(errors="replace")
