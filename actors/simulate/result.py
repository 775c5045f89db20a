"""Figures of a simulated run, from its first step on: the start of all processes is left out."""

from collections import Counter
from dataclasses import dataclass

from actors.ledger import GroupState
from actors.simulate.meter import StepLine
from actors.simulate.plan import Plan
from actors.simulate.ring import Marks, Ring
from actors.simulate.scaling import Scaled


@dataclass(frozen=True)
class Result:
    """Figures of a run. Shares are of the time between the first and the last step."""

    steps: int
    seconds: float
    """Virtual seconds from the first step to the last."""
    steps_per_second: float
    trainer_idle: float
    """Share of the time in which the trainer waits for a batch."""
    engine_idle: float
    """Share of the engines' time without a completion under way."""
    engine_paused: float
    """Share of the engines' time in pauses for new weights."""
    completions_per_engine: float
    """Mean number of completions that run at once in an engine."""
    reward_idle: float
    """Share of the time of all scoring slots in which nothing is scored."""
    rollout_idle: float
    """Share of the time of all sampling slots in which nothing is sampled."""
    lag_mean: float
    lag_max: int
    tokens_per_second: float
    """Tokens of trained completions per second."""
    engine_seconds_per_token: float
    """Seconds of the engines' work ÷ tokens sampled."""
    compute_seconds: float
    """Mean seconds of forward, backward and optimizer of a step."""
    wait_seconds: float
    """Mean seconds for which a step waits for its batch."""
    sampled_tokens: int
    """Tokens sampled in the whole simulation."""
    wasted_tokens: dict[str, int]
    """Tokens sampled and never trained, by reason: lost, filtered, copies."""
    issued: int
    trained: int
    dropped: dict[str, int]
    """Dropped groups by reason."""
    open: int
    """Groups that are neither trained nor dropped at the end."""
    deaths: int
    scaled: tuple[Scaled, ...] = ()
    """Changes of the numbers of processes (`scale`)."""

    @property
    def wasted_share(self) -> float:
        """Wasted tokens ÷ sampled tokens."""
        return sum(self.wasted_tokens.values()) / self.sampled_tokens if self.sampled_tokens else 0.0


def simulate(plan: Plan) -> Result:
    """Simulate a plan and return its figures.

    Raises:
        ConfigError: the run fails, or trains nothing for long.
    """
    ring = Ring(plan)
    ring.run()
    return result_of(ring)


def result_of(ring: Ring) -> Result:
    """Return the figures of a ring that has run. A run of a single step counts from the start of the simulation."""
    assert ring.end is not None
    lines, machine = ring.meter.lines, ring.machine
    start = ring.start if ring.start is not None and len(lines) > 1 else Marks()
    later = lines[1:] or lines
    first = lines[0].time if len(lines) > 1 else 0.0
    span = lines[-1].time - first
    # sums of processes are taken in a round after the first step: a little later than the step itself
    sampled = ring.end.engine_tokens - start.engine_tokens
    spent = {role: max(ring.end.processes[role] - start.processes[role], 1e-12) for role in ring.end.processes}
    slots, threads = ring.config.rollout.max_concurrent_groups, ring.config.reward.max_concurrent_groups
    counts = machine.groups.counts("train")
    busy = ring.end.engine_busy - start.engine_busy
    return Result(
        steps=len(lines),
        seconds=span,
        steps_per_second=len(later) / span,
        trainer_idle=sum(line.seconds_wait_batch for line in later) / span,
        engine_idle=max(0.0, 1.0 - busy / spent["inference"]),
        engine_paused=(ring.end.engine_paused - start.engine_paused) / spent["inference"],
        completions_per_engine=(ring.end.engine_slots - start.engine_slots) / spent["inference"],
        reward_idle=max(0.0, 1.0 - (ring.end.reward_busy - start.reward_busy) / (spent["reward"] * threads)),
        rollout_idle=max(0.0, 1.0 - (ring.end.rollout_slots - start.rollout_slots) / (spent["rollout"] * slots)),
        lag_mean=sum(line.lag_mean for line in lines) / len(lines),
        lag_max=max(line.lag_max for line in lines),
        tokens_per_second=sum(line.tokens for line in later) / span,
        engine_seconds_per_token=busy / sampled if sampled else 0.0,
        compute_seconds=_mean(later, "seconds_compute"),
        wait_seconds=_mean(later, "seconds_wait_batch"),
        sampled_tokens=ring.end.engine_tokens,
        wasted_tokens=dict(ring.end.lost),
        issued=machine.groups.num_issued["train"],
        trained=counts[GroupState.TRAINED] + counts[GroupState.DURABLE],
        dropped=_non_zero(machine.groups.dropped["train"]),
        open=sum(counts[one] for one in (GroupState.ISSUED, GroupState.SETTLED, GroupState.COMPOSED)),
        deaths=ring.meter.num_deaths,
        scaled=tuple(ring.scaling.changes),
    )


def _mean(lines: list[StepLine], name: str) -> float:
    return sum(float(getattr(line, name)) for line in lines) / len(lines)


def _non_zero(counts: Counter[str]) -> dict[str, int]:
    return {reason: number for reason, number in sorted(counts.items()) if number}
