"""Number of processes that a role should have, by what limits the run: pure functions of measured use.

The *use* of a role is the mean number of its processes at work: of reward and rollout actors the share of their places
in use, of engines those with a completion. A window is some seconds of samples.

    grow     the trainer waits, and the role is full (use ≥ GROW · processes), in GROW_WINDOWS windows in a row
    shrink   in each of the last SHRINK_WINDOWS windows the use would have fitted on fewer (use ≤ SHRINK · fewer)
    neither  after a change, until the new processes are there and a group has gone through the run since

No change is ever taken back under the same load. A role that grows from n processes has a use of GROW · n or more, and
the use does not fall by growth: the same work is done, at least as fast. To return to m processes the use must be
SHRINK · m or less, so m is above n · GROW ÷ SHRINK, and a step is too small to pass it. A role that shrinks to m has a
use of SHRINK · m at most, below the GROW · m of a full role. Both hold while the mean of a window is off by less than
(GROW − SHRINK) ÷ (GROW + SHRINK), which is 17 %.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

GROW = 0.85
"""Share of a role's processes in use from which the role counts as full."""
SHRINK = 0.6
"""Largest share in use of the processes that are left after a return."""
TRAINER_WAITS = 0.2
"""Share of a window for which the trainer waits, from which more processes are of use."""
GROW_WINDOWS, SHRINK_WINDOWS = 2, 6
"""Windows in a row that ask for a change. A process that is missing costs more than one too many."""
STEP = 4
"""A change is one process, or one in so many of the processes that are there."""
START_PATIENCE_SECONDS = 600.0
"""Longest wait for processes that were asked for; then the run is judged with those that are there."""
LONGEST_LATENCY_WINDOWS = 20
"""Limit of the wait for a group's way through the run, in windows."""
LONGEST_GAP_SECONDS = 5.0
"""Longest time that one sample stands for: a process that was stopped has not looked meanwhile."""
ROLES = ("inference", "reward", "rollout")
"""Roles whose number may change during a run."""


@dataclass(frozen=True)
class Use:
    """Processes of a role at one moment."""

    there: int
    """Processes that take work: neither starting nor draining."""
    used: float
    """Sum over these processes of the share of their places in use, from 0 to `there`."""
    groups: float
    """Groups in the role's stage."""


@dataclass(frozen=True)
class Sample:
    """State of a run at one moment."""

    at: float
    """Seconds on any clock that only rises."""
    counts: bool
    """False while the run says nothing about its limit: it starts, ends, or evaluates first."""
    trainer_waits: bool
    in_flight: int
    """Groups issued and not settled."""
    settled: int
    """Groups settled since the start of the run."""
    roles: Mapping[str, Use]


@dataclass(frozen=True)
class Bounds:
    """Least and largest number of processes of a role."""

    least: int
    most: int


@dataclass(frozen=True)
class Window:
    """Sums over the samples of a window."""

    seconds: float = 0.0
    number: int = 0
    waits: int = 0
    in_flight: int = 0
    settled: int = 0
    """Groups settled in the window."""
    there: Mapping[str, int] = field(default_factory=dict)
    """Fewest processes of each role in the window."""
    used: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)

    def plus(self, before: Sample, sample: Sample) -> "Window":
        """Return the window with one more sample, and the time since the sample before."""
        roles = sample.roles
        return Window(
            self.seconds + min(sample.at - before.at, LONGEST_GAP_SECONDS),
            self.number + 1,
            self.waits + sample.trainer_waits,
            self.in_flight + sample.in_flight,
            # a fork takes settled groups back
            self.settled + max(0, sample.settled - before.settled),
            {role: min(use.there, self.there.get(role, use.there)) for role, use in roles.items()},
            {role: self.used.get(role, 0.0) + use.used for role, use in roles.items()},
            {role: self.groups.get(role, 0.0) + use.groups for role, use in roles.items()},
        )


@dataclass(frozen=True)
class Means:
    """Means of a window."""

    waits: float
    """Share of the time for which the trainer waits."""
    there: Mapping[str, int]
    used: Mapping[str, float]
    groups: Mapping[str, float]

    @classmethod
    def of(cls, window: Window) -> "Means":
        """Return the means of a window with at least one sample."""
        number = window.number
        return cls(
            window.waits / number,
            window.there,
            {role: total / number for role, total in window.used.items()},
            {role: total / number for role, total in window.groups.items()},
        )

    def is_full(self, role: str) -> bool:
        """Return whether the processes of a role have no room for more work."""
        return self.there[role] > 0 and self.used[role] >= GROW * self.there[role]


@dataclass(frozen=True)
class State:
    """Result of the decisions so far, for the next one."""

    wanted: Mapping[str, int]
    """Processes wanted, by role."""
    means: tuple[Means, ...] = ()
    """Means of the newest windows since the last change, at most SHRINK_WINDOWS."""
    window: Window = Window()
    last: Sample | None = None
    """Newest sample that counts; None after a sample that does not."""
    pending: str = ""
    """Role that has grown and whose new processes are not there yet; empty: none."""
    changed_at: float = -math.inf
    quiet_until: float = -math.inf
    """Time before which samples show the run as it was before the last change."""
    latency: float = 0.0
    """Seconds from the issue of a group until it is settled, in the newest window."""
    because: str = ""
    """Reason for the newest change, or for none."""


@dataclass(frozen=True)
class Change:
    """New number of processes of a role."""

    role: str
    number: int
    because: str


def look(state: State, sample: Sample, bounds: Mapping[str, Bounds], window_seconds: float) -> State:
    """Return the state after one more sample; `wanted` may have changed.

    Args:
        state: state after the samples before.
        sample: the newest sample.
        bounds: limits of each role that may change; the use of the others is looked at too.
        window_seconds: seconds of a window.
    """
    state = _arrived(state, sample)
    if not sample.counts:
        return replace(state, last=None)
    if state.pending or sample.at < state.quiet_until or state.last is None:
        return replace(state, last=sample)
    state = replace(state, window=state.window.plus(state.last, sample), last=sample)
    if state.window.seconds < window_seconds:
        return state
    window, newest = state.window, Means.of(state.window)
    most = LONGEST_LATENCY_WINDOWS * window_seconds
    # Little's law: groups in flight = rate · time of each
    latency = window.in_flight / window.number * window.seconds / window.settled if window.settled else most
    means = (*state.means, newest)[-SHRINK_WINDOWS:]
    state = replace(state, means=means, window=Window(), latency=min(latency, most))
    change, why_not = wanted(state.means, state.wanted, bounds)
    if change is None:
        return replace(state, because=why_not)
    grows = change.number > state.wanted[change.role]
    return replace(
        state,
        wanted={**state.wanted, change.role: change.number},
        means=(),
        pending=change.role if grows else "",
        changed_at=sample.at,
        quiet_until=sample.at + state.latency,
        because=change.because,
    )


def _arrived(state: State, sample: Sample) -> State:
    """Start the wait for a group's way through the run once the processes that were asked for are there."""
    if not state.pending:
        return state
    is_there = sample.roles[state.pending].there >= state.wanted[state.pending]
    if not is_there and sample.at - state.changed_at < START_PATIENCE_SECONDS:
        return state
    return replace(state, pending="", quiet_until=sample.at + state.latency)


def wanted(means: tuple[Means, ...], now: Mapping[str, int], bounds: Mapping[str, Bounds]) -> tuple[Change | None, str]:
    """Return the change that the newest windows ask for, and in words why there is none.

    Args:
        means: means of the windows since the last change, the newest last.
        now: processes wanted so far, by role.
        bounds: limits of each role that may change.
    """
    for role, bound in bounds.items():
        # the configuration has changed, or the run was started with other numbers
        if now[role] != (number := min(max(now[role], bound.least), bound.most)):
            return Change(role, number, f"scale.{role} allows {bound.least} to {bound.most}"), ""
    if limit := _limit(means):
        change, why_not = _growth(limit, means[-1], now, bounds)
        # nothing is given back while another role is the limit and grows: the use of all follows
        if change is not None or means[-1].there[limit] < now.get(limit, 0):
            return change, why_not
    else:
        why_not = ""
    return _return(means, now, bounds), why_not


def _limit(means: tuple[Means, ...]) -> str:
    """Return the role for which the trainer waits; empty: none."""
    newest = means[-GROW_WINDOWS:]
    if len(newest) < GROW_WINDOWS or any(one.waits < TRAINER_WAITS for one in newest):
        return ""
    full = [role for role in ROLES if all(one.is_full(role) for one in newest)]
    # full rollout actors only wait for full engines
    if "inference" in full and "rollout" in full:
        full.remove("rollout")
    return max(full, key=lambda role: means[-1].groups[role], default="")


def _growth(
    role: str, newest: Means, now: Mapping[str, int], bounds: Mapping[str, Bounds]
) -> tuple[Change | None, str]:
    there = newest.there[role]
    because = (
        f"the trainer waits {newest.waits:.0%} of the time, and {newest.used[role]:.1f} of {there} {role} are busy"
    )
    if role not in bounds:
        return None, f"{because}; scale.{role} is not set"
    if there < now[role]:
        return None, f"{because}; {now[role] - there} more are wanted and not there"
    if now[role] >= bounds[role].most:
        return None, f"{because}; scale.{role} allows no more than {bounds[role].most}"
    return Change(role, min(bounds[role].most, there + max(1, there // STEP)), because), ""


def _return(means: tuple[Means, ...], now: Mapping[str, int], bounds: Mapping[str, Bounds]) -> Change | None:
    """Return the largest return of a role; None: none fits."""
    if len(means) < SHRINK_WINDOWS:
        return None
    found = []
    for role, bound in bounds.items():
        most_used = max(one.used[role] for one in means)
        # of processes that are missing the use says nothing, unless those that are there have room
        if most_used > SHRINK * min(one.there[role] for one in means):
            continue
        # rounded: 0.6 · 5 processes take a use of 3
        fewest = max(bound.least, math.ceil(round(most_used / SHRINK, 6)), now[role] - max(1, now[role] // STEP))
        if fewest < now[role]:
            because = f"for {SHRINK_WINDOWS} windows at most {most_used:.1f} of {now[role]} {role} were busy"
            found.append(Change(role, fewest, because))
    return max(found, key=lambda change: now[change.role] - change.number, default=None)
