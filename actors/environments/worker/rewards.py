"""Reward functions in a worker: what they accept, and their values in a form that can be sent."""

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from .shapes import ShapeError

WORDS_CHARACTERS = 60
"""Limit of the text in place of a value that is no number: it is only named in an error."""


def check_function(target: Any) -> None:
    """Check that an object can be called.

    Raises:
        ShapeError: it can't.
    """
    if not callable(target):
        raise ShapeError(f"{target!r:.60} is not a function")
    if inspect.isclass(target):
        raise ShapeError(f"{target.__name__} is a class; in a worker process a reward is a function, or an instance")


def takes_token_ids(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts `completion_ids`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # a function written in C has no signature
        return False
    return any(p.name == "completion_ids" or p.kind is p.VAR_KEYWORD for p in parameters)


def sendable(values: Any) -> dict[str, Any]:
    """Return the answer to a call: `values`, or `type` for what is no list of values. The actor checks both."""
    # texts, maps and sets are iterable too, but are never a value per completion
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        return {"type": type(values).__name__}
    return {"values": [_plain(item) for item in values]}


def _plain(item: Any) -> Any:
    """Return a value as a number, text, None, or list: what the actor would get from the function itself."""
    if item is None or isinstance(item, (bool, str)):
        return item
    if hasattr(item, "tolist"):
        plain = item.tolist()
        if isinstance(plain, list):
            # a tensor with a single number is a number for torch, whatever its dimensions
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                return float(item)
        item = plain
    if isinstance(item, int):
        # beyond 64 bits a message has no integers
        return int(item) if -(2**63) <= item < 2**63 else float(item)
    if hasattr(item, "__float__"):
        return float(item)
    if hasattr(item, "__index__"):
        return _plain(operator.index(item))
    if isinstance(item, Iterable) and not isinstance(item, (str, bytes, Mapping, Set)):
        return [_plain(part) for part in item]
    return item if isinstance(item, str) else f"{item!r:.{WORDS_CHARACTERS}}"
