"""Requests of rollout actors to engines: which engine is asked, and again after its death."""

import random
from typing import TYPE_CHECKING

from actors.algorithms.balancing import less_loaded
from actors.ledger import Group
from actors.simulate.engine import Engine, Turn
from actors.simulate.models import lognormal
from actors.simulate.sampling import Sampling
from schemas.messages import PolicyVersion

if TYPE_CHECKING:
    from actors.simulate.ring import Ring

POLL_SECONDS = 0.025
"""Mean seconds until a rollout actor that waits for an engine looks again."""


class Requests:
    """All requests under way.

    Args:
        ring: the simulation.
    """

    def __init__(self, ring: "Ring") -> None:
        self._ring = ring
        self._waiting: list[Sampling] = []
        """Attempts that wait for an engine with their version."""
        self._asked: dict[tuple[str, str], int] = {}
        """Completions asked of an engine and not answered, by rollout and engine."""
        self._fit: dict[PolicyVersion | int, list[Engine]] = {}
        """Engines that may sample, by policy or oldest version; emptied with each change of an engine."""

    def forget_engines(self) -> None:
        """Look again for engines that may sample, since an engine has changed."""
        self._fit.clear()

    def ask(self, sampling: Sampling) -> None:
        """Ask an engine that may sample, chosen as `actors.rollout.engine_choice` does; or wait."""
        if sampling.is_over:
            return
        fit, name, asked = self._fit_for(sampling.group), sampling.rollout.name, self._asked
        if not fit:
            self._waiting.append(sampling)
            return
        # the load of the last second's heartbeat, and what this rollout actor has asked for
        best = less_loaded(
            fit, lambda engine: engine.reported_load + asked.get((name, engine.name), 0), sampling.group.seed
        )
        turns = sampling.begin(best)
        self._count_asked(sampling, len(turns))
        self._ring.send(self._submit, best, best.boot, sampling, turns)

    def _fit_for(self, group: Group) -> list[Engine]:
        """Return the engines that may sample a group; the same groups of a version share one list."""
        key = group.policy or group.min_version
        if key not in self._fit:
            self._fit[key] = [
                engine
                for engine in self._ring.engines
                if engine.alive
                and not engine.leaves
                and (policy := engine.policy) is not None
                and (policy == group.policy if group.policy is not None else policy.version >= group.min_version)
            ]
        return self._fit[key]

    def _submit(self, engine: Engine, boot: int, sampling: Sampling, turns: list[Turn]) -> None:
        if sampling.is_over:
            return
        if boot != engine.boot or engine.policy is None:
            self.ask_again(sampling)
            return
        engine.accept(turns)

    def ask_again(self, sampling: Sampling) -> None:
        """Repeat a request elsewhere, after the engine has died (P11: inside the same attempt)."""
        self._count_asked(sampling, -sampling.num_open)
        sampling.engine = None
        self._ring.events.after(self._ring.times.hop_seconds + POLL_SECONDS, self.ask, sampling)

    def _count_asked(self, sampling: Sampling, number: int) -> None:
        assert sampling.engine is not None
        key = (sampling.rollout.name, sampling.engine.name)
        self._asked[key] = self._asked.get(key, 0) + number

    def turn_ended(self, turn: Turn) -> None:
        """Bring the end of a turn from the engine to the rollout actor."""
        sampling: Sampling = turn.owner
        if not sampling.turns_left[turn.number]:
            self._count_asked(sampling, -1)
        self._ring.send(sampling.rollout.turn_ended, turn)

    def ask_environment(self, sampling: Sampling, number: int) -> None:
        """Wait for an environment's answer, then ask for the next turn of a completion."""
        rng = random.Random(sampling.group.seed + 7919 * (number + 1) + sampling.turns_left[number])
        seconds = lognormal(rng, self._ring.times.environment_seconds, self._ring.times.environment_spread)
        self._ring.events.after(seconds, self._answered, sampling, number, sampling.engine)

    def _answered(self, sampling: Sampling, number: int, engine: Engine) -> None:
        if sampling.is_over or sampling.engine is not engine:
            return
        self._ring.send(self._submit, engine, engine.boot, sampling, [sampling.next_turn(number)])

    def search(self) -> None:
        """Let all attempts that wait for an engine look again."""
        searching, self._waiting = self._waiting, []
        for sampling in searching:
            self.ask(sampling)
