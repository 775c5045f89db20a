"""Whole episodes of real packages with a scripted model, through worker processes with an interpreter of their own."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.environments.pool import EpisodeCalls, WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from actors.rollout.episode import Trajectory, play
from actors.trajectories.recorder import TurnLimits, TurnRequest
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer
from tests.system.tools import missing

ROOT = Path(__file__).parents[3]
ADAPTERS = ROOT / "actors/environments/adapters"
PYTHON = ROOT / ".venv-environments/bin/python"
WAIT = 120.0
LIMITS = TurnLimits(1_000_000, 100_000, max_turns=1000)
"""Tokens are bytes here."""
Json = dict[str, Any]
Script = Sequence[str] | Callable[[str, Json], str]
"""Answers of the model in turn, or a function of all that it sees, and of the example's columns."""


def python() -> str:
    """The interpreter with the packages. Without it the test is not run and says why; where CI=true it fails."""
    if not PYTHON.is_file():
        missing("make system-deps brings the packages of environments")
    return str(PYTHON)


def spec(path: Path, **options: Any) -> EnvironmentSpec:
    """An environment of a file; with limits that only a hang passes."""
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)
    return EnvironmentSpec(path.stem, f"{path}:Env", options, python=python(), limits=limits)


def adapter(name: str, **options: Any) -> EnvironmentSpec:
    """An environment of an adapter."""
    return spec(ADAPTERS / f"{name}.py", **options)


async def play_one(
    pool: WorkerPool, script: Script, row: Json, seed: int = 7, limits: TurnLimits = LIMITS
) -> tuple[Trajectory, Json]:
    """An episode, and the columns of its example."""
    chat = Chat("qwen2_5")
    async with await pool.episode(WAIT) as episode:
        writer = Writer(chat, script if isinstance(script, Sequence) else _reading(chat, script, episode))
        trajectory = await play(episode, writer.recorder(limits, seed), "", row)
        return trajectory, episode.columns


def _reading(chat: Chat, script: Callable[[str, Json], str], episode: EpisodeCalls) -> Callable[[TurnRequest], str]:
    return lambda request: script(chat.decode(request.prompt_ids), episode.columns)


def contents(trajectory: Trajectory) -> list[str]:
    """The texts of a conversation."""
    return [str(message["content"]) for message in trajectory.messages]


def computed(code: str, *arguments: object) -> Any:
    """What a program of the packages' interpreter prints, as JSON: the packages' own answer, without an adapter."""
    command = [python(), "-c", code, json.dumps(arguments)]
    # some tasks are made of sets, whose order the workers fix
    variables = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=variables)
    return json.loads(done.stdout.splitlines()[-1])
