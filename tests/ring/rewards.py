"""Reward functions for ring tests, named in configurations by this file's path."""

import asyncio
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 150.0


def constant(prompts, completions, **_):
    """1 for all."""
    return [1.0] * len(completions)


def checksum(prompts, completions, modulus=2, **_):
    """One of as many values, whatever the model has learned."""
    return [float(sum(map(ord, text)) % modulus) for text in completions]


def slow(prompts, completions, seconds=0.1, **_):
    """1 for all, after a while."""
    time.sleep(seconds)
    return [1.0] * len(completions)


def slow_while(prompts, completions, gate, seconds=1.0, **_):
    """About 1 for all, after a while as long as the file `gate` is there."""
    time.sleep(seconds if Path(gate).exists() else 0.01)
    return [1.0 + i / 1000 for i in range(len(completions))]


def gated(prompts, completions, gate, **_):
    """About 1 for all, once the file `gate` is gone; until then `gate`.entered shows that a group has been read."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(gate).exists() and time.monotonic() < deadline:
        Path(f"{gate}.entered").touch()
        time.sleep(0.01)
    return [1.0 + i / 1000 for i in range(len(completions))]


def held(prompts, completions, folder, calls, **_):
    """About 1 for all; calls after so many wait for the file `folder`/go_on."""
    place, deadline = Path(folder), time.monotonic() + PATIENCE_SECONDS
    scores = [1.0 + i / 1000 for i in range(len(completions))]
    for number in range(calls):
        with contextlib.suppress(FileExistsError):
            (place / f"call_{number}").touch(exist_ok=False)
            return scores
    while not (place / "go_on").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return scores


_calls = itertools.count()


def held_each(prompts, completions, go_on, calls, **_):
    """About 1 for all; after so many calls of this process, each waits for the file `go_on`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while next(_calls) >= calls and not Path(go_on).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [1.0 + i / 1000 for i in range(len(completions))]


def of_one_run(prompts, completions, label, expected, foreign, **_):
    """1 for all; a row with another label than the expected one leaves the file `foreign`."""
    if set(label) != {expected}:
        Path(foreign).touch()
    return [1.0] * len(completions)


def failing(prompts, completions, **_):
    """Never scores."""
    raise RuntimeError("the judge is out of order")


def failing_on_most(prompts, completions, answer, **_):
    """Scores the words whose last letter is one of the first seven."""
    if answer[0][0] > "g":
        raise KeyError(answer[0][0])
    return [1.0] * len(completions)


def too_few(prompts, completions, **_):
    """One value less than completions."""
    return [1.0] * (len(completions) - 1)


def not_a_number(prompts, completions, **_):
    """NaN instead of None."""
    return [float("nan")] * len(completions)


def ending(prompts, completions, unless="", **_):
    """Ends the process, as a crash in native code does, unless a file is there."""
    if unless and Path(unless).exists():
        return constant(prompts, completions)
    os._exit(5)


def infinite(prompts, completions, **_):
    """No number to learn from."""
    return [float("inf")] * len(completions)


def text(prompts, completions, **_):
    """A number in words."""
    return ["1"] * len(completions)


def unscorable(prompts, completions, **_):
    """Applies to nothing."""
    return [None] * len(completions)


def first_and_last(prompts, completions, completion_ids, **_):
    """Two steps, the first token and the rest, each rewarded by the token that it ends with."""
    return [[(1, float(ids[0])), (len(ids), float(ids[-1]))] for ids in completion_ids]


def positive_share(rewards, lengths):
    """Of each reward in the sum of their distances from the lowest."""
    above = rewards - rewards.min(axis=1, keepdims=True)
    return above / (above.sum(axis=1, keepdims=True) + 1.0)


def hanging_at_first(prompts, completions, folder, calls, **_):
    """1 for all, but the first calls of all processes never return."""
    for number in range(calls):
        try:
            Path(folder, str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        time.sleep(3600.0)
    return [1.0] * len(completions)


async def blocking(prompts, completions, gate, **_):
    """1 for all; a group that comes while the file `gate` is there blocks the event loop until it is gone."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [1.0] * len(completions)


async def ending_the_loop(prompts, completions, **_):
    """Never scores; what it leaves on the event loop ends that."""
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(3600.0)


def different_letters(prompts, completions, **columns):
    """How many different letters there are, of twelve: much for a policy that is unsure, little for a ruined one."""
    return [len(set(text)) / 12 for text in completions]


def troubled(prompts, completions, folder, **_):
    """As `checksum`; one call hangs, one ends the process, and all together print more than 10 MB."""
    call = len([*Path(folder).glob("call_*")])
    Path(folder, f"call_{call}_{time.monotonic_ns()}").touch()
    print("x" * 1_000_000, flush=True)
    # the death comes first: it would end the call that hangs
    for way, first in (("died", 3), ("hung", 8)):
        if call >= first:
            with contextlib.suppress(FileExistsError):
                Path(folder, way).touch(exist_ok=False)
                if way == "died":
                    os._exit(9)
                time.sleep(3600.0)
    return checksum(prompts, completions, modulus=5)


def early_letters(prompts, completions, **_):
    """Share of the letters before `m` in each text, or in the model's last message of each chat."""
    answers = [
        one if isinstance(one, str) else [m["content"] for m in one if m["role"] == "assistant"][-1]
        for one in completions
    ]
    return [sum(letter < "m" for letter in answer) / max(1, len(answer)) for answer in answers]
