"""Reward functions for ring tests, named in configurations by this file's path."""

import os
import time
from pathlib import Path

PATIENCE_SECONDS = 60.0


def constant(prompts, completions, **_):
    """1 for all."""
    return [1.0] * len(completions)


def slow(prompts, completions, seconds=0.1, **_):
    """1 for all, after a while."""
    time.sleep(seconds)
    return [1.0] * len(completions)


def gated(prompts, completions, gate, **_):
    """1 for all, once the file `gate` is gone; until then `gate`.entered shows that a group has been read."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(gate).exists() and time.monotonic() < deadline:
        Path(f"{gate}.entered").touch()
        time.sleep(0.01)
    return [1.0] * len(completions)


def failing(prompts, completions, **_):
    """Never scores."""
    raise RuntimeError("the judge is out of order")


def too_few(prompts, completions, **_):
    """One value less than completions."""
    return [1.0] * (len(completions) - 1)


def not_a_number(prompts, completions, **_):
    """NaN instead of None."""
    return [float("nan")] * len(completions)


def ending(prompts, completions, **_):
    """Ends the process, as a crash in native code does."""
    os._exit(5)
