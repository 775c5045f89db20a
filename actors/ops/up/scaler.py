"""Processes that `actors up` and `actors node` start and give back during a run, as the packer's `scale` wants.

Children of the largest numbers are planned at the start, with their nodes and GPUs. Children beyond the wanted number
are *parked*. A child that is given back drains: it takes no new work and finishes its own. What it does not finish in
time, others do again. The last children of a role come last and go first, on whichever node they are.
"""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from actors.ops.up.child import Child
from actors.process.membership import DRAIN_SECONDS
from schemas.config import RunConfig

log = structlog.get_logger("up")

KILL_SECONDS = 5.0
"""Time beyond the drain of a process until it is killed."""


class Scaler:
    """Starter and ender of the children of scaled roles.

    Args:
        config: configuration of the run.
        children: children of this machine; on all machines together each scaled role has as many as `scale` allows.
        drain_signal: signal upon which a child drains.
    """

    def __init__(
        self, config: RunConfig, children: Sequence[Child], drain_signal: signal.Signals = signal.SIGTERM
    ) -> None:
        self._config, self._drain_signal = config, drain_signal
        self._numbers: dict[str, int] = {str(role): config.processes[role] for role in config.scale.roles}
        """Number of each scaled role that was wanted last, on all machines together."""
        self._of = {role: [child for child in children if child.kind == role] for role in self._numbers}
        for role, own in self._of.items():
            for child in own:
                child.parked = _index(child) >= self._numbers[role]

    def follow(self, scale: Mapping[str, Any]) -> Iterator[str]:
        """Start and give back children as the packer wants; yield a line for each role that changes.

        Args:
            scale: the packer's progress under this name; empty before it is known.
        """
        for role, number in scale.get("wanted", {}).items():
            before = self._numbers.get(role, number)
            if number != before:
                self._numbers[role] = number
                for child in self._of[role]:
                    self._use(child) if _index(child) < number else self._give_back(child)
                log.info("scaled", role=role, before=before, wanted=number, because=scale["because"])
                yield f"{role}: {before} → {number}, since {scale['because'] or 'the run had as many before'}"
        for child in (child for own in self._of.values() for child in own):
            if child.parked and child.running and time.monotonic() > child.kill_at:
                log.warning("killed, since it has not drained", child=child.name)
                child.signal(signal.SIGKILL)
                child.kill_at = math.inf

    def _use(self, child: Child) -> None:
        if child.parked:
            # a process that still drains ends first
            child.parked, child.start_at, child.kill_at, child.restarts = False, time.monotonic(), math.inf, 0

    def _give_back(self, child: Child) -> None:
        if child.parked:
            return
        child.parked = True
        seconds = self._config.inference.drain_timeout if child.kind == "inference" else DRAIN_SECONDS
        child.kill_at = time.monotonic() + seconds + KILL_SECONDS
        if child.running:
            child.signal(self._drain_signal)


def _index(child: Child) -> int:
    """Return the number in a child's name: that of the process in the whole run."""
    return int(child.name.rpartition("-")[2])
