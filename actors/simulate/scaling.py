"""Numbers of processes that change in a simulation, by the rules of the real packer (`actors.algorithms.scaling`).

A process that is asked for works after `restart_seconds`. One that is given back takes no new work, and leaves once its
own is done, or after the time that a real one has; then others do the rest again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.algorithms.scaling import Bounds, State, Use, look
from actors.packer.scaling import moment
from actors.process.membership import DRAIN_SECONDS
from actors.simulate.engine import Engine
from actors.simulate.reward import Reward
from actors.simulate.rollout import Rollout

if TYPE_CHECKING:
    from actors.simulate.ring import Ring

Process = Rollout | Reward | Engine


@dataclass(frozen=True)
class Scaled:
    """Change of the number of processes of a role."""

    seconds: float
    """Time from the start of the simulation."""
    role: str
    before: int
    wanted: int
    because: str


class Scaling:
    """Numbers of processes by role.

    Args:
        ring: the simulation.
    """

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring
        self._bounds = {str(role): Bounds(keys.min, keys.most) for role, keys in ring.config.scale.roles.items()}
        self._window = ring.config.scale.window
        self._state = State({role: len(processes) for role, processes in self._processes.items()})
        self.changes: list[Scaled] = []
        self._leaving: list[tuple[float, str, Process]] = []
        """Time at which each process is ended, and its role."""
        self._paid: dict[str, float] = dict.fromkeys(self._processes, 0.0)
        """Seconds of processes by role up to `_paid_at`."""
        self._paid_at = 0.0
        self._numbers = dict(self._state.wanted)
        """Processes by role that are paid for: from the order until the leave."""

    @property
    def _processes(self) -> Mapping[str, Sequence[Process]]:
        ring = self._ring
        return {"inference": ring.engines, "reward": ring.rewards, "rollout": ring.rollouts}

    def seconds_of(self, role: str) -> float:
        """Return the seconds of all processes of a role so far: 3 processes for 10 s are 30."""
        return self._paid[role] + self._numbers[role] * (self._ring.events.now - self._paid_at)

    def look(self) -> None:
        """Take in the state of the run, and carry out what is wanted then."""
        if not self._bounds:
            return
        self._let_leave()
        ring, before = self._ring, self._state.wanted
        sample = moment(ring.events.now, ring.machine, self._uses())
        self._state = look(self._state, sample, self._bounds, self._window)
        for role, number in self._state.wanted.items():
            if number != before[role]:
                self.changes.append(Scaled(sample.at, role, before[role], number, self._state.because))
                for _ in range(number - before[role]):
                    self._pay(role, 1)
                    ring.events.after(ring.times.restart_seconds, self._start, role)
                for _ in range(before[role] - number):
                    self._give_back(role)

    def _uses(self) -> dict[str, Use]:
        ring = self._ring
        engines = [one for one in ring.engines if one.alive and not one.leaves and one.policy is not None]
        rewards = [one for one in ring.rewards if one.alive and not one.leaves]
        rollouts = [one for one in ring.rollouts if one.alive and not one.leaves]
        sampling, scoring = sum(one.num_sampling for one in ring.rollouts), sum(one.load for one in ring.rewards)
        busy = sum(one.num_scoring / one.threads for one in rewards)
        return {
            "inference": Use(len(engines), sum(one.load > 0 for one in engines), sampling),
            "reward": Use(len(rewards), busy, scoring),
            "rollout": Use(len(rollouts), sum(one.num_sampling / one.slots for one in rollouts), sampling),
        }

    def _pay(self, role: str, more: int) -> None:
        self._paid = {one: self.seconds_of(one) for one in self._paid}
        self._paid_at = self._ring.events.now
        self._numbers[role] += more

    def _start(self, role: str) -> None:
        # a number is never used again, so that the ledger takes no new process for one that has left
        self._ring.add(role, len(self._processes[role]))

    def _give_back(self, role: str) -> None:
        staying = [one for one in self._processes[role] if not one.leaves]
        process = staying[-1]
        process.leaves = True
        seconds = self._ring.config.inference.drain_timeout if role == "inference" else DRAIN_SECONDS
        self._leaving.append((self._ring.events.now + seconds, role, process))
        self._ring.told_to_leave(process)

    def _let_leave(self) -> None:
        staying = []
        for end, role, process in self._leaving:
            if process.has_work and self._ring.events.now < end:
                staying.append((end, role, process))
                continue
            self._pay(role, -1)
            self._ring.remove(process)
        self._leaving = staying
