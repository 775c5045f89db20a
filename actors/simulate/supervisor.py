"""Deaths of processes, and the start of their successors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from actors.simulate.engine import Engine
from actors.simulate.failures import Death, deaths_of
from actors.simulate.reward import Reward
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.simulate.ring import Ring


class Supervisor:
    """Killer and starter of processes.

    Args:
        ring: the simulation.
    """

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring

    def plan_deaths(self) -> None:
        """Plan the deaths that were asked for, and the first random ones.

        Raises:
            ConfigError: there is no such process.
        """
        numbers = {
            "packer": 1,
            "rollout": len(self._ring.rollouts),
            "reward": len(self._ring.rewards),
            "trainer": 1,
            "inference": len(self._ring.engines),
        }
        for death in self._ring.plan.deaths:
            if death.number >= numbers[death.role]:
                raise ConfigError(f"--kill {death.role}-{death.number}: there are {numbers[death.role]} of this role")
            self._ring.events.at(death.seconds, self._kill, death)
        for role, seconds in self._ring.plan.mean_seconds_between_deaths:
            for number in range(numbers[role]):
                self._next_death(deaths_of(role, number, seconds, self._ring.plan.seed))

    def _next_death(self, deaths: Iterator[Death]) -> None:
        death = next(deaths)
        self._ring.events.at(death.seconds, self._die, death, deaths)

    def _die(self, death: Death, later: Iterator[Death]) -> None:
        self._kill(death)
        self._next_death(later)

    def _kill(self, death: Death) -> None:
        """Kill a process; its supervisor starts the next one."""
        packer = self._ring.packer
        if death.role == "packer":
            if packer.alive:
                self._ring.meter.num_deaths += 1
                packer.die(self._ring.times.packer_restart_seconds)
            return
        processes: dict[str, list[Any]] = {
            "rollout": [*self._ring.rollouts],
            "reward": [*self._ring.rewards],
            "trainer": [self._ring.trainer],
            "inference": [*self._ring.engines],
        }
        process = processes[death.role][death.number]
        if not process.alive:
            return
        self._ring.meter.num_deaths += 1
        identities = self.end(process)
        lease, restart = self._ring.settings.lease, self._ring.times.restart_seconds
        # the lease ends, or the successor takes the name: whichever comes first
        self._ring.events.after(min(lease, restart), self._missed, identities)
        self._ring.events.after(restart, self._restart, process)

    def leave(self, process: Any) -> None:
        """End a process that says so, without a successor; what it has not finished, others do again."""
        if process.alive:
            self._missed(self.end(process))

    def end(self, process: Any) -> list[str]:
        """End a process with all its work; return its identities."""
        identities = self._ring.trainer.identities if process is self._ring.trainer else [process.identity]
        for identity in identities:
            self._ring.packer.leave(identity)
        if isinstance(process, Engine):
            self._ring.requests.forget_engines()
            before = process.tokens
            owners = process.kill()
            self._ring.meter.lost_tokens += process.tokens - before
            for sampling in owners:
                if not sampling.is_over:
                    self._ring.requests.ask_again(sampling)
        else:
            process.kill()
        return identities

    def _missed(self, identities: list[str]) -> None:
        for identity in identities:
            self._ring.packer.lose(identity)
        for rollout in self._ring.rollouts:
            for sampling in rollout.held.values():
                if sampling.is_sampled and sampling.reward in identities:
                    self._ring.send(self._ring.send_to_reward, sampling)

    def _restart(self, process: Any) -> None:
        # given back meanwhile
        if getattr(process, "leaves", False):
            return
        if process is self._ring.trainer:
            for identity in self._ring.trainer.identities:
                self._ring.packer.join(identity, self._ring.trainer.told)
        elif isinstance(process, Engine):
            process.restart()
            self._ring.inference[process.name].join()
            return
        else:
            self._ring.packer.join(process.identity, getattr(process, "told", None))
        process.restart()
        if isinstance(process, Reward):
            # without any reward actor, groups have waited for this one
            for rollout in self._ring.rollouts:
                for sampling in rollout.held.values():
                    if sampling.is_sampled and not sampling.reward:
                        self._ring.send_to_reward(sampling)
