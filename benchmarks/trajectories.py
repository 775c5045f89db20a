"""CPU of a rollout actor that plays environments: 256 trajectories at the same time, with a double of the engines.

    python -m benchmarks.trajectories [--json PATH]

64 groups of 4 trajectories are always under way. A trajectory has 10 turns; each turn is 50 sampled tokens and an
answer of the environment of about 50 characters, in Qwen3's chat template over a tokenizer of bytes. The environment
runs in two worker processes, whose CPU is not counted. The double answers after 2 s, as an engine under load does: 128
turns a second; and at once, as fast as workers and machine allow. `share` is the CPU time of the process, all threads,
÷ the wall time; `turn_ms` the CPU time ÷ the turns. A turn includes the prompt, the choice of an engine, the record of
the tokens, the call of the environment, and its part of the group's message in bytes; HTTP is not included. One
process, one run for each row, after 10 s (2 s at once) of warming up.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from actors.datasets import Example
from actors.engines.http.client import SampledCompletion
from actors.engines.protocol import PromptImage
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.trajectory_group import build_trajectory_group
from actors.telemetry.metrics import Metrics
from actors.trajectories.forms import AnswerForm
from benchmarks.machine import finish
from bus import codec
from schemas.messages import EnginePeer, Ticket
from tests.actors.rollout.doubles import directive, engine, ticket
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import language
from tests.ring.harness import ring_config

GROUPS, GROUP_SIZE, TURNS, TOKENS = 64, 4, 10, 50
SECONDS = {2.0: (10.0, 30.0), 0.0: (2.0, 10.0)}
"""Pause of the double before an answer → seconds of warming up, and of measuring."""
GAME = """
class Game:
    def reset(self, index, **row):
        self.turns = 0
        return f"Example {index}: make your first move on the board."

    def step(self, answer):
        self.turns += 1
        return f"Move {self.turns} was taken; the board has changed. Next?", 0.1, self.turns == TURNS
"""


class Client:
    """Double of the engines: 50 tokens, the last of which ends the turn."""

    def __init__(self, seconds: float, end: int) -> None:
        self._seconds, self._tokens = seconds, [*range(40, 40 + TOKENS - 1), end]
        self.num_turns = 0

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        form: AnswerForm | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[SampledCompletion]:
        """Answer after the pause."""
        await asyncio.sleep(self._seconds)
        self.num_turns += 1
        return [SampledCompletion(list(self._tokens), [-0.5] * TOKENS, [(0, 1, 3)], "stop", "")]

    async def close(self) -> None:
        """Close nothing."""


async def measured(folder: Path, seconds: float) -> dict[str, Any]:
    """Return the row of a pause of the engines."""
    path = folder / "game.py"
    path.write_text(GAME.replace("TURNS", str(TURNS)))
    one = {"type": "python", "name": "game", "path": f"{path}:Game", "workers": 2, "episodes_per_worker": 128}
    config = ring_config(
        folder,
        environments=[one],
        reward={"functions": []},
        packer={"sequence_len": 16384},
        rollout={"max_tokens": TOKENS + 1, "group_size": GROUP_SIZE, "group_timeout": 600.0},
    )
    chat, metrics = Chat("qwen3"), Metrics("rollout")
    client = Client(seconds, chat.token(chat.family.ends[0]))
    engines, numbers = EngineChoice(config, metrics, lambda: client), itertools.count()
    player = EnvironmentPlayer(config, "rollout-0", {"game": language(chat)}, engines, metrics, 16384)

    async def play_for_ever() -> None:
        while True:
            index = next(numbers)
            asked = ticket(index, environment="game", index=index, num_completions=GROUP_SIZE, max_tokens=TOKENS + 1)
            trajectories, columns = await player.play(asked, Example("", {"index": index, "split": "train"}))
            codec.encode(build_trajectory_group("run", "rollout-0", asked, columns, trajectories))

    async with engines, player:
        engines.note(time.monotonic(), directive(engines=[engine("inference-0")]))
        playing = [asyncio.create_task(play_for_ever()) for _ in range(GROUPS)]
        warm, length = SECONDS[seconds]
        await asyncio.sleep(warm)
        turns, started, cpu = client.num_turns, time.monotonic(), time.process_time()
        await asyncio.sleep(length)
        turns, wall, cpu = client.num_turns - turns, time.monotonic() - started, time.process_time() - cpu
        for task in playing:
            task.cancel()
        ended = await asyncio.gather(*playing, return_exceptions=True)
        if failures := [one for one in ended if not isinstance(one, asyncio.CancelledError)]:
            raise RuntimeError(f"{len(failures)} groups could not be played: {failures[0]}")
    return {
        "pause_s": seconds,
        "turns_per_s": round(turns / wall, 1),
        "share": round(cpu / wall, 3),
        "turn_ms": round(1e3 * cpu / max(turns, 1), 3),
    }


def measure() -> dict[str, Any]:
    """Return the rows of all pauses."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    rows = []
    for seconds in SECONDS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measured(Path(folder), seconds)))
    return {"rows": rows}


def table(results: dict[str, Any]) -> str:
    """Return a line for each pause."""
    rows = results["rows"]
    header = "".join(f"{name:>14}" for name in rows[0])
    return "\n".join([header, *("".join(f"{value:>14}" for value in row.values()) for row in rows)])


if __name__ == "__main__":
    finish(__doc__, measure, table)
