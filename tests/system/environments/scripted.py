"""Whole episodes of real packages with a model that writes given texts, in workers with the packages' interpreter."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from actors.environments.pool import EpisodeCalls, WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from actors.rollout.episode import Trajectory, play
from actors.trajectories.recorder import TurnLimits, TurnRequest
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer
from tests.system.environments.playing import ADAPTERS, ROOT
from tests.system.tools import missing

WAIT = 240.0
"""Imports of these packages take up to a minute on a busy machine."""


def python_of(name: str) -> str:
    """The interpreter of an environment that `make system-deps` sets up, such as `verifiers-v0`."""
    path = ROOT / f".venv-{name}" / "bin" / "python"
    if not path.exists():
        missing(f"make .venv-{name}/stamp")
    return str(path)


def workers(adapter: str, python: str, episodes: int = 32, **options: Any) -> WorkerPool:
    """A worker with an adapter."""
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)
    return WorkerPool(
        EnvironmentSpec("real", f"{ADAPTERS / adapter}.py:Env", options, python, episodes=episodes, limits=limits)
    )


THOUGHT = "<think>\nWell.\n</think>\n\n"
"""What Qwen3 writes first."""


def call(name: str, **arguments: Any) -> str:
    """What Qwen writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(
    episode: EpisodeCalls,
    texts: Sequence[str] | Callable[[TurnRequest], str],
    index: int = 0,
    split: str = "train",
    limits: TurnLimits | None = None,
    family: str = "qwen2_5",
    **row: Any,
) -> Trajectory:
    """An episode to its end."""
    writer = Writer(Chat(family), texts)
    trajectory = await play(episode, writer.recorder(limits), "", {"index": index, "split": split, **row})
    sampled = sum(len(answer.token_ids) for answer in writer.answers)
    trained = sum(sum(sample.loss_mask) for sample in trajectory.tree.samples())
    assert trained == sampled, "each sampled token trains once"
    return trajectory
