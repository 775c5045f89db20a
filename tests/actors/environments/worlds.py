"""Environments as users write them, in each form; a worker process of the tests imports this file alone."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path


class Guess:
    """Find the number: the example of a README, with plain text in and out."""

    def reset(self, target: int) -> str:
        """Remember the number."""
        self.target, self.turns = target, 0
        return "Guess a number from 1 to 9."

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Say where the number lies."""
        self.turns += 1
        guess = int(answer)
        if guess == self.target:
            return "Right.", 1.0, True
        return ("Higher." if guess < self.target else "Lower."), 0.0, self.turns == 5


class Seeded:
    """Wants the seed, and the whole message."""

    def reset(self, seed: int, **row: object) -> list[dict[str, str]]:
        """Show what came."""
        return [{"role": "system", "content": f"{seed} {sorted(row)}"}]

    async def step(self, message: dict[str, str]) -> tuple[None, None, bool, dict[str, object]]:
        """Return nothing to say, nothing to reward, and numbers of a kind that msgpack does not know."""
        import numpy as np

        assert message["role"] == "assistant"
        return None, None, True, {"score": 3, "long": "x" * 1000, "array": np.zeros(2)}


class Counter:
    """TRL's form: public methods are tools."""

    def reset(self, start: int = 0, **row: object) -> str:
        """Begin to count."""
        self.count = start
        return f"The count is {start}."

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: How much to add
        """
        self.count += number
        return self.count

    async def explode(self) -> None:
        """Fail."""
        raise RuntimeError("boom")

    def get_reward(self) -> float:
        """Return the count."""
        return float(self.count)

    def _hidden(self) -> None:
        """No tool."""


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: The key
    """
    return key.upper()


TOOLS = [lookup]


class Space:
    """Discrete space as gymnasium has it."""

    n, start = 4, 0

    def __str__(self) -> str:
        return "Discrete(4)"


class Lake:
    """gymnasium's form."""

    action_space, render_mode = Space(), "ansi"

    def reset(self, *, seed: int | None = None, options: dict[str, int] | None = None) -> tuple[int, dict[str, int]]:
        """Stand at the start."""
        self.place = (options or {}).get("start", 0)
        assert seed is not None
        return self.place, {"seed": seed}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, float]]:
        """Move; the sixth place is the goal, and the tenth the end of the time."""
        self.place += action
        return self.place, float(self.place == 6), self.place == 6, self.place >= 10, {"prob": 1.0}

    def render(self) -> str:
        """Draw."""
        return "." * self.place + "x"


class Gym:
    """ms-swift's form."""

    async def reset(self, config: dict[str, int]) -> tuple[str, dict[str, int], str]:
        """Return observation, info and a system message."""
        return f"level {config['level']}", {}, "You play."

    async def step(self, messages: list[dict[str, str]]) -> tuple[str, float, bool, dict[str, int]]:
        """Step with all messages."""
        return f"{len(messages)} messages", 0.5, len(messages) > 4, {}


async def drive(example: dict[str, str], policy: object) -> dict[str, float]:
    """Ask twice; the reward is the length of the second answer."""
    messages = [{"role": "user", "content": example["question"]}]
    first = await policy.sample(messages, max_tokens=5)  # type: ignore[attr-defined]
    second = await policy.sample([*messages, first, {"role": "user", "content": "Sure?"}])  # type: ignore[attr-defined]
    return {"length": len(second["content"]), "none": None}  # type: ignore[dict-item]


class Bad:
    """Fails where the row says: each row names a place and a way."""

    def reset(self, place: str = "", way: str = "", mark: str = "") -> str:
        """Remember."""
        self.place, self.way, self.mark = place, way, mark
        self._fail("reset")
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Fail, or go on."""
        self._fail("step")
        return f"{answer} from {os.getpid()}", 0.0, False

    def get_reward(self) -> float:
        """Fail, or return 1."""
        self._fail("score")
        return 1.0

    def _fail(self, place: str) -> None:
        if place == self.place:
            getattr(self, f"_{self.way}")()

    def _raise(self) -> None:
        raise ValueError("the world ended")

    def _huge(self) -> None:
        raise ValueError("x" * 50_000_000)

    def _exit(self) -> None:
        sys.exit("leaving")

    def _die(self) -> None:
        os._exit(7)

    def _kill(self) -> None:
        os.kill(os.getpid(), 9)

    def _stop(self) -> None:
        os.kill(os.getpid(), 19)

    def _hang(self) -> None:
        time.sleep(3600)

    def _print(self) -> None:
        for _ in range(100):
            sys.stdout.write("x" * 1000 + "\n" + "y" * 999_000)
            sys.stdout.flush()

    def _fork(self) -> None:
        for _ in range(30):
            child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            with Path(self.mark).open("a") as marks:
                marks.write(f"{child.pid}\n")
        # an orphan, as daemons make themselves
        subprocess.run(["sh", "-c", f"setsid sleep 3600 & echo $! >> {self.mark}"], check=True)


class Blocking:
    """An async function that blocks the loop of its process."""

    async def reset(self, **row: object) -> str:
        """Block."""
        time.sleep(3600)
        return ""

    async def step(self, answer: str) -> tuple[str, float, bool]:
        """Never reached."""
        await asyncio.sleep(0)
        return answer, 0.0, True


class Slow:
    """Takes the row's seconds for a step."""

    def reset(self, seconds: float) -> str:
        """Remember."""
        self.seconds = seconds
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Take the time."""
        time.sleep(self.seconds)
        return answer, 1.0, True
