"""Share of a machine in a run over several nodes: its actors, and its view of the actors elsewhere."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.ops.device_plan import Actor
from schemas.config import RunConfig

NODES = "nodes"
"""Folder below `output_dir` with a folder for each node that has no packer: lock and configuration."""
DONE_PATIENCE_SECONDS = 30.0
"""Time for a packer to be heard, on a node that finds the run done. Without a packer there is nothing left to do."""
TOLD_BEATS = 3.0
"""Heartbeats after which the packer has heard of the drain of every actor that was told at the same time."""


@dataclass(frozen=True)
class Share:
    """Share of one machine.

    Args:
        rank: number of the node.
        num_nodes: number of nodes.
        actors: processes of this node.
    """

    rank: int
    num_nodes: int
    actors: tuple[Actor, ...]

    @property
    def has_packer(self) -> bool:
        """True for the node that prepares the output_dir, shows the progress, and leaves last."""
        return any(actor.kind == "packer" for actor in self.actors)

    def folder(self, config: RunConfig) -> Path:
        """Return the folder of this node's lock and configuration."""
        return config.output if self.has_packer else config.output / NODES / str(self.rank)

    def log_name(self) -> str:
        """Return the name of the supervisor's log; screens read up.log."""
        return "up.log" if self.has_packer else f"node-{self.rank}.log"

    def draining_elsewhere(self, actors: Iterable[dict[str, Any]], kinds: Sequence[str], lease: float) -> list[str]:
        """Return the names of actors on other nodes that are about to leave.

        Args:
            actors: entries of the packer's progress.
            kinds: kinds of actors that are asked for.
            lease: seconds after which a silent actor counts as gone.
        """
        here = {str(actor) for actor in self.actors}
        return [
            one["name"]
            for one in actors
            if one["kind"].replace("_", "-") in kinds
            and one["name"] not in here
            and one["phase"] == "draining"
            and one["age"] < lease
        ]


def looks_done(config: RunConfig) -> bool:
    """Return whether the summary says that the run is done. Only the packer's node can be sure (`done_at`)."""
    try:
        steps = int(json.loads((config.output / "summary.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError):
        return False
    return bool(config.trainer.max_steps) and steps >= config.trainer.max_steps
