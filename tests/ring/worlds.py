"""Environments for runs of the whole ring; workers import this file alone."""

import contextlib
import os
import signal
import struct
import sys
import threading
import time
import uuid
import zlib
from pathlib import Path
from typing import Any


class Letters:
    """Three turns; each earns the share of letters before `m`."""

    def __init__(self, fails_at: int = -1) -> None:
        self._fails_at = fails_at

    def reset(self, seed: int, **row: object) -> str:
        """Ask for letters."""
        self.columns = {"asked": seed % 7}
        self.turns = 0
        return f"Write letters {seed % 7}."

    def step(self, answer: str) -> tuple[str, float, bool, dict[str, int]]:
        """Count."""
        if self.turns == self._fails_at:
            raise ValueError("the board is broken")
        self.turns += 1
        reward = sum(letter < "m" for letter in answer) / max(1, len(answer))
        return "More.", reward, self.turns == 3, {"turn": self.turns}

    def get_reward(self) -> dict[str, float]:
        """Say how many turns there were."""
        return {"turns_taken": float(self.turns)}


class DiesOnce(Letters):
    """Ends its process in the first episode of the run; the file in `folder` tells."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._told = Path(folder) / "died"

    def step(self, answer: str) -> tuple[str, float, bool, dict[str, int]]:
        """Die once."""
        if not self._told.exists():
            self._told.touch()
            os._exit(3)
        return super().step(answer)


class FailsHalf(Letters):
    """Fails in the second turn of every other episode."""

    number = 0

    def reset(self, seed: int, **row: object) -> str:
        """Count the episodes of the process."""
        FailsHalf.number += 1
        self._fails_at = 1 if FailsHalf.number % 2 else -1
        return super().reset(seed, **row)


class Gated(Letters):
    """Its second step waits until the file `gate` is gone; `gate`.entered tells that it waits."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self._gate = Path(gate)

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Wait, as a slow tool does."""
        if self.turns == 1:
            Path(f"{self._gate}.entered").touch()
            while self._gate.exists():
                time.sleep(0.01)
        return super().step(answer)


class Swallows:
    """Drives, and takes each failure of a sample for an answer without value."""

    async def run(self, example: dict[str, Any], policy: Any) -> float:
        """Ask twice."""
        for _ in range(2):
            try:
                await policy.sample([{"role": "user", "content": "Go."}])
            except Exception:
                return 0.0
        return 1.0


PLACES = ("load", "reset", "step", "score")


class Ruined(Letters):
    """Does harm at each place once in the run; a file in `folder` for each place tells. No reward is ever 0."""

    def __init__(self, folder: str, way: str) -> None:
        super().__init__()
        self._folder, self._way = folder, way

    @staticmethod
    def examples(split: str, folder: str, way: str) -> None:
        """Know no end. A part of the load."""
        ruin(folder, "load", way)

    def reset(self, seed: int, **row: object) -> str:
        """Ask, or do harm."""
        # at examples of their own: a group that fails three times is poison
        self._harmless = [place for place in PLACES if row["index"] != PLACES.index(place)]
        self._ruin("reset")
        return super().reset(seed, **row)

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Count, or do harm."""
        if self.turns == 1:
            self._ruin("step")
        return super().step(answer)

    def get_reward(self) -> dict[str, float]:
        """Say how many turns there were, or do harm."""
        self._ruin("score")
        return super().get_reward()

    def _ruin(self, place: str) -> None:
        if place not in self._harmless:
            ruin(self._folder, place, self._way)


def ruin(folder: str, place: str, way: str) -> None:
    """Do harm at a place once."""
    with contextlib.suppress(FileExistsError):
        (Path(folder) / f"{place}.{way}").touch(exist_ok=False)
        harm(way)


def harm(way: str) -> None:
    """Do harm to this process."""
    match way:
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case "sys.exit":
            sys.exit(7)
        case "_exit":
            os._exit(7)
        case "output":
            for _ in range(100):
                sys.stdout.write("x" * 99 + "\n" + "y" * (1_000_000 - 101) + "\n")
        case "fork bomb":
            while True:
                with contextlib.suppress(OSError):
                    os.fork()
                # twice as many each time, but not more than a machine can bear until they are seen
                time.sleep(0.25)


class Hangs(Letters):
    """Hangs in the first step of one example: of an even seed. The others wait for its end, between two calls."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._entered = Path(folder) / "entered"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Hang, if this is the one and the first time."""
        if self.columns["asked"] == -1 and not self._entered.exists():
            self._entered.touch()
            threading.Event().wait()
        return super().step(answer)

    def reset(self, seed: int, **row: object) -> str:
        """Know the one by its number."""
        text = super().reset(seed, **row)
        if row["index"] == 13:
            self.columns["asked"] = -1
        return text


class CountedAtGate(Letters):
    """Waits behind its first turn until the file `gate` is gone; a file in `folder` for each object has its turns."""

    def __init__(self, gate: str, folder: str) -> None:
        super().__init__()
        self._gate, self._count = Path(gate), Path(folder) / uuid.uuid4().hex

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Count."""
        found = super().step(answer)
        self._count.write_text(str(self.turns))
        while self._gate.exists():
            time.sleep(0.01)
        return found


class Armed(Letters):
    """Does the harm that the file `armed` in `folder` names, once; the file is then called `hit`."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Count, or do harm."""
        with contextlib.suppress(FileNotFoundError):
            # one worker alone can rename it
            (self._folder / "armed").rename(self._folder / "hit")
            harm((self._folder / "hit").read_text())
        return super().step(answer)


class Odd(Letters):
    """Adds columns or rewards that can't travel, or names that are taken."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way

    def reset(self, seed: int, **row: object) -> str:
        """Add columns."""
        text = super().reset(seed, **row)
        if self._way == "columns":
            self.columns = {f"c{number}": number for number in range(100_000)}
        if self._way == "prompts":
            self.columns = {"prompts": 1}
        return "x" * 9_000_000 if self._way == "huge" else text

    def get_reward(self) -> dict[Any, float]:
        """Name the rewards."""
        rewards: dict[str, dict[Any, float]] = {
            "number": {1: 1.0},
            "turns": {"turns": 1.0},
            "large": {"a": 1.7e308, "b": 1.7e308},
            "many": {f"r{number}": 1.0 for number in range(10_000)},
        }
        return rewards.get(self._way, {"turns_taken": 3.0})


class Agent:
    """Drives: asks again from within its conversation, three times; and once with its first answer left out."""

    async def run(self, example: dict[str, Any], policy: Any) -> float:
        """Earn the share of letters before `m`."""
        talk = [{"role": "user", "content": "go" * (1 + example["index"] % 3)}]
        first = await policy.sample(talk)
        answers = [first]
        for words in ("on", "or", "off"):
            answers.append(await policy.sample([*talk, first, {"role": "user", "content": words}]))
        answers.append(await policy.sample([*talk, {"role": "user", "content": "anew"}]))
        text = "".join(str(answer["content"]) for answer in answers)
        return sum(letter < "m" for letter in text) / max(1, len(text))


class Draws:
    """Shows drawn images in turns 2 and 3, other ones to each answer; each letter before `m` earns.

    Args:
        folder: folder of image files.
        hostile: show a file that is no image to every other episode.
        shade: difference of all pixels.
    """

    number = 0

    def __init__(self, folder: str, hostile: bool = False, shade: int = 0) -> None:
        self._folder, self._hostile, self._shade = Path(folder), hostile, shade

    def reset(self, seed: int, **row: object) -> str:
        """Ask for letters."""
        self.turns = 0
        Draws.number += 1
        self._breaks = self._hostile and Draws.number % 2 == 0
        return f"write {'ab'[seed % 2]}"

    def step(self, answer: str) -> tuple[object, float, bool]:
        """Draw: of as many rows as the answer has letters."""
        self.turns += 1
        reward = sum(letter < "m" for letter in answer) / max(1, len(answer))
        drawn = picture(8 * (1 + len(answer) % 3), 8 + 8 * self.turns, self._shade + sum(map(ord, answer)))
        if self.turns == 1:
            data = b"GIF89a" if self._breaks else drawn
            return {"role": "user", "content": [{"type": "image", "bytes": data}, text("go")]}, reward, False
        file = self._folder / f"{uuid.uuid4()}.png"
        file.write_bytes(drawn)
        content = [text("on"), {"type": "image", "path": str(file)}, {"type": "image", "path": str(file)}]
        return {"role": "user", "content": content}, reward, self.turns == 3


def text(words: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": "text", "text": words}


def picture(height: int, width: int, shade: int) -> bytes:
    """A PNG with stripes."""
    rows = b"".join(b"\0" + bytes((shade + 37 * row) % 256 for _ in range(3 * width)) for row in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
