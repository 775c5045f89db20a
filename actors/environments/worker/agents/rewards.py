"""Rewards in the file that a program has written."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from .errors import AgentRewardError

Rewards = dict[str, float | None]
MOST_BYTES = 1 << 20


def rewards_in(file: Path, name: str) -> Rewards | None:
    """Return the rewards in a file; None if the program has written none.

    Args:
        file: a number, or an object of numbers and null, as JSON.
        name: name of a reward that is only a number.

    Raises:
        AgentRewardError: the file holds no reward.
    """
    content = _content(file)
    if content is None:
        return None
    shown = repr(content[:200].decode(errors="replace"))
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentRewardError(f"{file.name} is no JSON: {shown}") from error
    rewards = value if isinstance(value, dict) else {name: value}
    for key, one in rewards.items():
        if one is not None and not _is_finite(one):
            raise AgentRewardError(f"{file.name} has {shown}, but the reward {key!r} must be a finite number")
    return {key: None if one is None else float(one) for key, one in rewards.items()}


def _content(file: Path) -> bytes | None:
    """Return the bytes of a file that a program may have replaced by anything; None if there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentRewardError(f"{file.name} can't be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AgentRewardError(f"{file.name} is no file")
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            content = opened.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MOST_BYTES:
        raise AgentRewardError(f"{file.name} has more than {MOST_BYTES} bytes")
    return content


def _is_finite(value: Any) -> bool:
    """Return whether a value of JSON is a number that is finite as a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:  # an integer of any length
        return False
