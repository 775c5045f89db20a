"""Example, and the protocol of a source of examples."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

from actors.datasets.images import Image
from bus import codec
from schemas.messages import Prompt


@dataclass(frozen=True)
class Example:
    """A prompt and the further columns of its row."""

    prompt: Prompt
    """Text, or a list of messages."""
    columns: dict[str, Any]
    """Columns of the row besides the prompt; reward functions receive them."""
    is_known_by_columns: bool = False
    """True if columns say which example it is, because an environment makes the prompt."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order of their parts in the messages."""

    def key(self, environment: str) -> str:
        """Return the key of the content: sha256 over the environment's name and the prompt, first 16 hex digits.

        Columns are not part of the key, so a corrected answer does not change an example's key; unless an environment
        makes the prompt of them.
        """
        content = [environment, self.prompt, self.columns] if self.is_known_by_columns else [environment, self.prompt]
        # sort_keys: the order of a message's fields must not matter
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def why_not_sendable(example: Example) -> str:
    """Return why an example can't be sent with its group, naming the column; empty if it can.

    The header of a message holds msgpack values alone, with bounds on size, nesting and integers.
    """
    # a prompt of plain text can always be sent; messages may hold arbitrary values
    travels: dict[str, Any] = {"": example.columns}
    if not isinstance(example.prompt, str):
        travels["prompt"] = example.prompt
    if not (why := _bound_passed(travels)):
        return ""
    parts = {f"column {name!r}": value for name, value in example.columns.items()} | {
        "the prompt": travels.get("prompt")
    }
    return next((f"{name}: {its}" for name, value in parts.items() if (its := _bound_passed(value))), why)


def _bound_passed(value: object) -> str:
    try:
        codec.check_plain(value)
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return ""


def is_message(turn: Any) -> bool:
    """Return whether a value is a message of a chat: an object with a role, and a content of text or parts."""
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str | list)


class Dataset(Protocol):
    """Source of examples by number."""

    num_examples: int | None
    """Number of examples; None: endless."""

    def example(self, index: int) -> Example:
        """Return example `index` ≥ 0, equal in every process."""
        ...
