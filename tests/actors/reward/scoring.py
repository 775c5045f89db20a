"""Reward functions for tests of worker processes, named by this file's path."""

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np


def lengths(prompts, completions, factor=1.0, **columns):
    """The length of each completion, times a factor."""
    return [factor * len(text) for text in completions]


def arguments(prompts, completions, **columns):
    """The number of arguments, and of all that is in them."""
    return [len(columns), float(sum(len(repr(value)) for value in (prompts, completions, *columns.values())))]


def without_token_ids(prompts, completions, answer):
    """1 for all; refuses any further argument."""
    return [1.0] * len(completions)


async def waiting(prompts, completions, **columns):
    """An async function."""
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


def array(prompts, completions, **columns):
    """Values of numpy."""
    return np.arange(len(completions), dtype=np.float32)


def lazy(prompts, completions, **columns):
    """A generator, with None."""
    return (None if text == "a" else np.int64(3) for text in completions)


def large(prompts, completions, **columns):
    """More than 64 bits."""
    return [2**70] * len(completions)


def too_few(prompts, completions, **columns):
    """No value."""
    return []


def texts(prompts, completions, **columns):
    """Numbers as texts."""
    return ["1"] * len(completions)


def objects(prompts, completions, **columns):
    """Nothing that can be sent."""
    return [{"a": object()}] * len(completions)


def not_a_number(prompts, completions, **columns):
    """NaN."""
    return [float("nan")] * len(completions)


def mapping(prompts, completions, **columns):
    """No list."""
    return {"a": 1.0, "bb": 2.0}


def raising(prompts, completions, **columns):
    """Raise below a helper."""
    return [_helper(text) for text in completions]


def lazily_raising(prompts, completions, **columns):
    """Raise while the values are read."""
    return (_helper(text) for text in completions)


def leaving(prompts, completions, **columns):
    """End the process, as a script does."""
    sys.exit(3)


def _helper(text):
    raise KeyError(text)


def steps(prompts, completions, completion_ids, **columns):
    """A step for each token, with arrays in it."""
    return [[(np.int64(end + 1), np.float64(0.5)) for end in range(len(ids))] for ids in completion_ids]


def by_answer(prompts, completions, answer, folder, **columns):
    """1 for all. What the column says happens besides, once the file `folder`/go_on is there."""
    way = answer[0]
    Path(folder, f"{way}.{time.monotonic_ns()}").touch()
    while not Path(folder, "go_on").exists():
        time.sleep(0.01)
    if way == "hang" or (way == "hang_once" and len([*Path(folder).glob("hang_once.*")]) == 1):
        time.sleep(3600.0)
    if way == "die":
        os._exit(7)
    return [1.0] * len(completions)


async def blocking(prompts, completions, answer, folder, **columns):
    """1 for all; blocks the event loop for one group."""
    Path(folder, f"{answer[0]}.{time.monotonic_ns()}").touch()
    while not Path(folder, "go_on").exists():
        await asyncio.sleep(0.01)
    if answer[0] == "block":
        time.sleep(3600.0)
    return [1.0] * len(completions)


def interpreter(prompts, completions, **columns):
    """1 if the process was started by the test's own program."""
    return [float(os.environ.get("STARTED_BY", "") == "mine")] * len(completions)


def process(prompts, completions, **columns):
    """The process."""
    return [os.getpid()] * len(completions)
