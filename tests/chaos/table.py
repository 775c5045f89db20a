"""What has come of the faults, as a table."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median

from tests.chaos.stage import Outcome, Result

LEASE_SECONDS = 3.0
TARGETS = {"packer": LEASE_SECONDS + 2, "rollout": 3.0, "reward": 3.0, "inference": 10.0}
TRAINER_TARGETS = {1: 12.0, 2: 20.0}
"""By number of ranks."""


def show(results: Sequence[Result]) -> list[str]:
    """Recovery by run, actor and state, by actor, then what the witnesses say."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    by_state = {(o.plan, _actor(o), o.fault.kind, o.fault.point) for o in outcomes}
    lines = [_line("run", "actor", "fault", "at", "n", "median", "worst")]
    for key in sorted(by_state):
        own = [o for o in outcomes if (o.plan, _actor(o), o.fault.kind, o.fault.point) == key]
        lines.append(_line(*key, *_figures(own)))
    lines += ["", _line("run", "actor", "fault", "target of the median", "n", "median", "worst")]
    ranks = {result.plan.name: result.plan.ranks for result in results}
    for key, own in groupby(sorted(outcomes, key=_short), key=_short):
        lines.append(_line(*key, _target(*key[1:], ranks[key[0]]), *_figures(list(own))))
    return [*lines, "", *_promise(results)]


def verdict(results: Iterable[Result]) -> bool:
    """Whether nothing was lost, twice or dropped, every fault was taken, and every run recovered from each."""
    return not any(result.problems or any(o.problem for o in result.outcomes) for result in results)


def _promise(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        said = result.testimony
        told = "no testimony"
        if said is not None:
            told = f"{said.steps} steps, {len(said.trained)} groups trained, lost 0, trained twice 0"
            told += f", dropped {sum(result.dropped.values())} {dict(result.dropped) or ''}"
        lines.append(f"{result.plan.name}: {told}")
        lines += [f"  not run: {words}" for words in result.skipped]
        lines += [f"  PROBLEM: {words}" for words in result.problems]
        lines += [f"  PROBLEM: {outcome.fault}: {outcome.problem}" for outcome in result.outcomes if outcome.problem]
    return lines


def _target(actor: str, kind: str, ranks: int) -> str:
    """What is asked of the median, in seconds; a process that is stopped or cut off is so for a lease."""
    seconds = TARGETS.get(actor) if actor != "trainer" else TRAINER_TARGETS[ranks]
    if seconds is None or kind == "full disk":
        return ""
    return f"{seconds + (LEASE_SECONDS if kind in ('SIGSTOP', 'partition') else 0):g}"


def _actor(outcome: Outcome) -> str:
    return outcome.fault.actor


def _short(outcome: Outcome) -> tuple[str, str, str]:
    return outcome.plan, outcome.fault.actor.partition("-")[0], outcome.fault.kind


def _figures(outcomes: Sequence[Outcome]) -> tuple[str, str, str]:
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    if not seconds:
        return str(len(outcomes)), "-", "-"
    return str(len(outcomes)), f"{median(seconds):.1f}", f"{max(seconds):.1f}"


def _line(run: str, actor: str, kind: str, at: str, number: str, middle: str, worst: str) -> str:
    return f"{run:15} {actor:16} {kind:11} {at:22} {number:>4} {middle:>7} {worst:>6}".rstrip()
