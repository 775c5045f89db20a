"""Environments as users write them, in each form; a worker process of the tests imports this file alone."""

import asyncio
import concurrent.futures
import datetime
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


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


class Places:
    """Notes the thread and the task of each call, and fails if two of them overlap or leave sqlite3's thread."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.places = [threading.get_ident()]

    async def reset(self, mark: str = "") -> str:
        """Remember the task."""
        self.mark, self.task = mark, asyncio.current_task()
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Note the thread."""
        self.database.execute("select 1")
        self.places.append(threading.get_ident())
        return "on", 0.0, False

    async def get_reward(self) -> float:
        """Return 1 if all calls so far had one thread and one task."""
        return float(len(set(self.places)) == 1 and asyncio.current_task() is self.task)

    def close(self) -> None:
        """Say that this ran where the rest did."""
        self.database.close()
        Path(self.mark).write_text("closed")


class Waits:
    """A step that waits for a file, and a close that says whether it came in the middle of it."""

    def reset(self, gate: str, mark: str) -> str:
        """Remember the files."""
        self.gate, self.mark, self.is_inside = Path(gate), Path(mark), False
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Wait."""
        self.is_inside = True
        self.mark.write_text("waits")
        while not self.gate.exists():
            time.sleep(0.01)
        self.is_inside = False
        return "on", 0.0, False

    def close(self) -> None:
        """Write what was seen."""
        self.mark.write_text("in the middle" if self.is_inside else "after the step")


class Silent(Exception):  # noqa: N818
    """An error whose text can't be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Ways:
    """Fails in ways that are hard to tell of."""

    async def reset(self, way: str) -> str:
        """Remember the way."""
        self.way = way
        return "go"

    async def step(self, answer: str) -> tuple[str, float, bool]:
        """Fail."""
        if self.way == "cancelled":
            raise asyncio.CancelledError
        if self.way == "cancels itself":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)
        if self.way == "surrogate":
            raise ValueError("bad \ud800")
        if self.way == "silent":
            raise Silent
        return "on", float(self.way), False

    def get_reward(self) -> float:
        """Return what the way says."""
        return float(self.way)


class Orphans:
    """Leaves processes behind: one in its session, and one in a session of its own."""

    def reset(self, mark: str) -> str:
        """Start them."""
        both = [subprocess.Popen(["sleep", "3600"], start_new_session=own) for own in (False, True)]
        Path(mark).write_text(" ".join(str(child.pid) for child in both))
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """End the process."""
        os._exit(3)


class Named:
    """Gives its process a name that is no UTF-8, which any process may."""

    def reset(self) -> str:
        """Rename."""
        Path("/proc/self/task", str(os.getpid()), "comm").write_bytes(b"\xff\xfe) Z (")
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Go on."""
        return "on", 0.0, False


class Script:
    """Runs a script that imports the module beside it, and uses a pool of processes."""

    def reset(self, script: str) -> str:
        """Return what the script prints."""
        names = sorted(name for name in os.environ if name in ("PYTHONSAFEPATH", "PYTHONUNBUFFERED"))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        return f"{names} {done.stdout}{done.stderr}"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Double a number in another process."""
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return str(pool.submit(doubled, int(answer)).result()), 0.0, True


def doubled(number: int) -> int:
    """Return twice the number."""
    return 2 * number


class Driver:
    """A class that drives: made outside of the event loop, and closed."""

    def __init__(self, mark: str) -> None:
        self.mark, self.thread = mark, threading.current_thread()

    async def run(self, example: dict[str, str], policy: object) -> float:
        """Return whether this object was made in another thread, or ask until cancelled."""
        if example["way"] == "nan":
            return float("nan")
        if example["way"] == "leaves":
            self.asking = asyncio.create_task(policy.sample([]))  # type: ignore[attr-defined]
            while not Path(example["asked"]).exists():
                await asyncio.sleep(0.01)
        if example["way"] == "waits":
            Path(self.mark).write_text("runs")
            try:
                await asyncio.sleep(3600)
            finally:
                Path(self.mark).write_text("cancelled")
        return float(self.thread is not threading.current_thread())

    def close(self) -> None:
        """Leave a mark."""
        with Path(self.mark).open("a") as mark:
            mark.write(" closed")


class Swift:
    """ms-swift's form, by its published interface."""

    def __init__(self, env_config: dict[str, int]) -> None:
        self.level = env_config["level"]

    async def reset(self, config: Any) -> tuple[str, dict[str, int], str]:
        """Read the row."""
        return f"{config.data_dict['problem']} at level {self.level}", {}, "You play."

    async def step(self, messages: list[dict[str, str]]) -> tuple[str, float, bool, dict[str, int]]:
        """End."""
        return "", 1.0, True, {}


class BadClose(Bad):
    """Can't be closed."""

    def close(self) -> None:
        """Fail."""
        raise ValueError("stays open")


class Quiz:
    """Has examples of its own, columns for reward functions, and rewards by rank in the group."""

    @staticmethod
    def examples(split: str, size: int = 3) -> int | None:
        """Endless for training."""
        return None if split == "train" else size

    def __init__(self, size: int = 3) -> None:
        self.size, self.answered = size, ""

    def reset(self, index: int, split: str, way: str = "") -> str:
        """Ask."""
        self.columns: Any = {"answer": str(index), "task": split, "parts": [1, {"a": None}], "size": self.size}
        if way == "date":
            self.columns["answer"] = datetime.date(2026, 1, 1)
        if way == "number":
            self.columns[7] = 1
        if way == "width":
            self.columns = 7
        return f"Question {index} of {split}"

    def step(self, answer: str) -> tuple[None, float, bool]:
        """Remember the answer, or end the process."""
        self.answered = answer
        if answer == "die":
            os._exit(7)
        return None, 0.0, True

    @classmethod
    async def score_group(cls, environments: "list[Quiz]") -> "list[Any]":
        """Return a map, a number, or nothing: as the answers say."""
        texts = [one.answered for one in environments]
        if "raise" in texts:
            raise ValueError("no ranks")
        if "few" in texts:
            return []
        if "nan" in texts:
            return [float("nan")] * len(texts)
        ranks = [sorted(texts).index(text) for text in texts]
        kinds = [{"rank": float(rank), "pid": os.getpid()} for rank in ranks]
        return [
            None if text == "none" else rank if text == "9" else kind
            for text, rank, kind in zip(texts, ranks, kinds, strict=True)
        ]


class Chosen:
    """Drives; its columns are there at the end. Scored in groups, by a function that is not async."""

    async def run(self, example: dict[str, Any], policy: object) -> float:
        """Take the place of a model."""
        self.columns = {"index": example["index"]}
        return 1.0

    @staticmethod
    def score_group(environments: "list[Chosen]") -> list[float]:
        """Return each one's share."""
        return [one.columns["index"] / len(environments) for one in environments]


class NoCount(Guess):
    """Does not know its examples."""

    @staticmethod
    def examples(split: str) -> Any:
        """Return no count."""
        return "many"


class NoStatic(Guess):
    """Counts examples of an object, which nobody has yet."""

    def examples(self, split: str) -> int:
        """Return a count."""
        return 1


def made_guess() -> Guess:
    """Make one; the module has no examples, for its `examples` is something else."""
    return Guess()


def counted_guess() -> Guess:
    """Make one."""
    return Guess()


counted_guess.examples = lambda split: 5 if split == "train" else 0  # type: ignore[attr-defined]


def examples() -> None:
    """No function of a split."""
    raise AssertionError


async def scored_drive(example: dict[str, str], policy: object) -> float:
    """Has a score for groups, but no objects."""
    return 1.0


scored_drive.score_group = lambda environments: [1.0] * len(environments)  # type: ignore[attr-defined]


class WaitsInGroup(Waits):
    """Waits; scores whether any was found in the middle of a step."""

    @staticmethod
    def score_group(environments: "list[WaitsInGroup]") -> list[float]:
        """Return 1 for each that is at rest."""
        return [float(not one.is_inside) for one in environments]


class Shelf:
    """TRL's form, with a tool that has the name of another function of ours."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def examples(self, topic: str) -> str:
        """Find examples.

        Args:
            topic: What they are of
        """
        self.read.append(topic)
        return f"an example of {topic}"

    def reset(self, **row: object) -> None:
        """Begin."""

    @staticmethod
    def score_group(environments: "list[Shelf]") -> list[dict[str, int]]:
        """Count."""
        return [{"read": len(one.read)} for one in environments]

    def get_reward(self) -> dict[str, float | None]:
        """Return rewards by name."""
        return {"read": float(len(self.read)), "liked": None}


class Litters:
    """Leaves processes of every kind behind in one place, and then hangs or dies there."""

    def reset(self, place: str, way: str, mark: str) -> str:
        """Remember."""
        self.place, self.way, self.mark = place, way, Path(mark)
        self._litter("reset")
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Go on."""
        self._litter("step")
        return "on", 0.0, False

    def get_reward(self) -> float:
        """Return 1."""
        self._litter("score")
        return 1.0

    def _litter(self, place: str) -> None:
        if place == self.place:
            litter(self.mark)
            if self.way == "exit":
                os._exit(3)
            if self.way == "kill the guard":
                time.sleep(float(self.mark.with_suffix(".pause").read_text()))
                os.kill(os.getppid(), 9)
            time.sleep(3600)


def litter(mark: Path) -> None:
    """Start a child, one in a session of its own, one with another group, and a daemon; write their ids at once."""
    children = [subprocess.Popen(["sleep", "1000"], start_new_session=own).pid for own in (False, True)]
    children.append(subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp).pid)
    # forks twice, with a session in between; its parents have ended when this returns
    daemon = "sh -c 'sleep 1000 >/dev/null & echo $!' & wait"
    done = subprocess.run(["setsid", "sh", "-c", daemon], stdout=subprocess.PIPE, text=True, check=True)
    children.append(int(done.stdout))
    staging = mark.with_suffix(".new")
    staging.write_text(" ".join(map(str, [os.getpid(), os.getppid(), *children])))
    staging.rename(mark)


def litters_and_hangs(completions: list[str], mark: list[str], **_: object) -> list[float]:
    """As a reward function: leave processes behind, and hang."""
    litter(Path(mark[0]))
    time.sleep(3600)
    return [0.0] * len(completions)


class Paid:
    """Drives, and gives turns rewards: at once, later, by their numbers, and with the whole group."""

    async def run(self, example: dict[str, Any], policy: Any) -> float | None:
        """Ask twice, and once in a branch; then do what the row says."""
        start = [{"role": "user", "content": "Why?"}]
        first = await policy.sample(start)
        policy.reward(first, 9.0)
        history = [*start, first, {"role": "user", "content": "Sure?"}]
        second = await policy.sample(history)
        branch = await policy.sample([{"role": "user", "content": "Other?"}])
        policy.reward(second.turn, 2.0)
        policy.reward(branch, 5.0)
        policy.reward(first, 0.5)
        policy.reward(branch, None)
        self.policy, self.branch = policy, branch
        match example["way"]:
            case "limit":
                while True:
                    history += [second, {"role": "user", "content": "Sure?"}]
                    second = await policy.sample(history)
            case "copy":
                policy.reward(dict(first), 1.0)
            case "unknown":
                policy.reward(3, 1.0)
            case "nan":
                policy.reward(first, float("nan"))
        return example.get("reward")


class PaidInGroup(Paid):
    """The branch is paid once all have ended."""

    @staticmethod
    def score_group(environments: "list[PaidInGroup]") -> list[None]:
        """Pay by the place in the group."""
        for number, one in enumerate(environments):
            one.policy.reward(one.branch, float(number))
        return [None] * len(environments)


class TakesBackInGroup(Paid):
    """The last of a group loses all that its turns were given."""

    @staticmethod
    def score_group(environments: "list[TakesBackInGroup]") -> list[float]:
        """Take back, and give 1 to each."""
        for turn in range(3):
            environments[-1].policy.reward(turn, None)
        return [1.0] * len(environments)


class Family:
    """Has many processes, of every kind, while it is loaded or reset, and then hangs."""

    @staticmethod
    def examples(split: str, place: str, folder: str, children: int) -> int:
        """Count, or hang while being loaded."""
        if place == "load":
            family(Path(folder), children)
        return 1

    def __init__(self, place: str, folder: str, children: int) -> None:
        self.folder, self.children = folder, children

    def reset(self, **row: object) -> str:
        """Hang."""
        family(Path(self.folder), self.children)
        return "never"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Never called."""
        return "on", 0.0, False


def family(folder: Path, children: int) -> None:
    """Start children, each with one of its own; write all ids to a file of this process, and hang.

    By turns: in this process's session, in one of their own, with a group of their own, and daemons that have forked
    twice, each time in another session. All ignore the signals that programs are asked to end with.
    """
    pair = "trap '' TERM HUP INT; sleep 1000 & echo $$ $!; wait"
    apart = f'setsid sh -c "{pair}" & wait'.replace("$", "\\$")
    pids = [os.getpid(), os.getppid()]
    for number in range(children):
        kind = number % 4
        daemon = subprocess.Popen(
            ["setsid", "sh", "-c", apart] if kind == 3 else ["sh", "-c", pair],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=kind == 1,
            preexec_fn=os.setpgrp if kind == 2 else None,
        )
        assert daemon.stdout is not None
        pids += map(int, daemon.stdout.readline().split())
        if kind == 3:
            # the daemon's parent: what it has started is an orphan now
            daemon.kill()
            daemon.wait()
    staging = folder / f"{os.getpid()}.new"
    staging.write_text(" ".join(map(str, pids)))
    staging.rename(staging.with_suffix(".pids"))
    time.sleep(1000)


def family_reward(completions: list[str], folder: list[str], children: list[int], **_: object) -> list[float]:
    """As a reward function."""
    family(Path(folder[0]), children[0])
    return [0.0] * len(completions)


class Bomb:
    """Starts processes that start processes, up to 2¹⁰."""

    def reset(self, mark: str, groups: str) -> str:
        """Remember."""
        self.mark, self.groups = mark, groups
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        """Double nine times, and wait; each process notes its start, and may have a group and a session of its own."""
        marks = os.open(self.mark, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for _ in range(10):
            if not os.fork() and self.groups == "own":
                os.setsid()
            os.write(marks, b"x")
        time.sleep(1000)
        return "on", 0.0, False
