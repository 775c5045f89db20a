"""Diagnostics of a run: present problems, and past problems already dealt with. Pure functions of the progress."""

import textwrap
from collections.abc import Mapping
from typing import Any

from actors.process.durations import seconds_in_words

MAX_FAILURE_CHARACTERS = 100
"""Longest text of a failure on a screen."""
FEWEST_STEPS, FEWEST_GROUPS = 3, 20
"""Steps in a row, and groups in these steps, from which equal rewards or zero gradients are no coincidence."""
POISON_SHARE, FEWEST_POISON = 0.05, 3
"""Share and number of poison groups (all three attempts failed) from which the run needs attention."""
LATE_SHARE, FEWEST_LATE_CALLS = 0.1, 3
"""Share and number of late calls of reward functions from which the run needs attention."""
START_SECONDS = 60.0
"""Seconds of a new run in which its actors load their packages: one that is missing then is no trouble yet."""
MISSED = {
    "rollout": "no rollout actor is there: nothing is sampled",
    "reward": "no reward actor is there: nothing is scored",
    "inference": "no inference actor is there: nothing can be sampled",
}


def diagnose(progress: Mapping[str, Any], silent_seconds: float) -> list[str]:
    """Return everything about a run that needs attention, as texts; empty if the run is well.

    Args:
        progress: newest known progress.
        silent_seconds: age of the progress, in seconds since the packer was heard.
    """
    found = [f"the run has failed: {progress['failure']}"] if progress.get("failure") else []
    lease = progress.get("lease", 3.0)
    if silent_seconds > lease:
        found.append(f"the packer has not been heard for {seconds_in_words(silent_seconds)}")
    if progress.get("phase") in ("starting", "running", "finishing"):
        missing = () if is_early(progress) else progress.get("missing", ())
        found += [MISSED.get(kind, f"{kind} is not there: no step is trained") for kind in missing]
        for actor in progress.get("actors", ()):
            if actor["age"] > lease:
                found.append(
                    f"{actor['name']} has not been heard for {seconds_in_words(actor['age'])} (bus.lease {lease:g} s): "
                    "dead, frozen or cut off"
                )
            elif actor.get("error"):
                found.append(f"{actor['name']}: {actor['error']}")
            elif actor.get("engine") == "quarantined":
                found.append(f"{actor['name']} is quarantined: it could not take new weights, and gets no work")
    found += learning(progress)
    return found + [f"can't be written: {problem}" for problem in progress.get("unwritten", ())]


def is_early(progress: Mapping[str, Any]) -> bool:
    """Return whether a new run has only just started, so that actors may still be on their way."""
    return progress.get("phase") == "starting" and progress.get("seconds", START_SECONDS) < START_SECONDS


def learning(progress: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the run learns nothing, or only from part of the data; empty if the run learns."""
    found = []
    equal, flat = progress.get("steps_without_variance", 0), progress.get("steps_without_gradient", 0)
    groups_per_step = progress.get("settings", {}).get("packer.groups_per_step", 1)
    # equal advantages still teach when groups have a single completion, or with a teacher or a reference, so the
    # gradient must be zero too
    taught_nothing = min(equal, flat)
    if taught_nothing >= FEWEST_STEPS and taught_nothing * groups_per_step >= FEWEST_GROUPS:
        found.append(
            f"nothing is learned: no group of the last {taught_nothing} steps had different rewards (`actors samples` "
            "shows completions and rewards)"
        )
    elif flat >= FEWEST_STEPS and flat > equal:
        found.append(f"nothing is learned: the gradient of the last {flat} steps was 0, though rewards differ")
    poison = progress.get("dropped", {}).get("poison", 0)
    if poison >= FEWEST_POISON and poison >= POISON_SHARE * progress.get("num_issued", 0):
        found.append(
            f"data is lost: {_share(poison, progress)}, were dropped as poison after three failed attempts each"
        )
    late, calls = progress.get("late_reward_calls", 0), progress.get("reward_calls", 0)
    if late >= FEWEST_LATE_CALLS and late >= LATE_SHARE * calls:
        timeout = progress.get("settings", {}).get("reward.timeout")
        limit = "" if timeout is None else f" {timeout:g} s"
        found.append(f"reward functions are late: {late} of {calls} calls took longer than reward.timeout{limit}")
    return found


def dealt_with(progress: Mapping[str, Any], longest: int = MAX_FAILURE_CHARACTERS) -> list[str]:
    """Return past problems that only cost time, as texts; empty if there were none."""
    found = []
    if restarts := progress.get("restarts"):
        found.append("restarted " + ", ".join(f"{name} ×{count}" for name, count in restarts.items()))
    if failed := progress.get("failed_attempts"):
        found.append(f"failed attempts {failed}")
    if reissued := progress.get("reissued"):
        found.append(f"issued again {reissued}")
    if dropped := progress.get("dropped"):
        reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items())
        found.append(f"dropped {_share(sum(dropped.values()), progress)} ({reasons})")
    if failure := progress.get("last_failure"):
        found.append(f"last failure: {textwrap.shorten(failure, longest, placeholder='…')}")
    return found


def _share(dropped: int, progress: Mapping[str, Any]) -> str:
    """Return a number of groups with its share of all groups that are no longer in flight."""
    in_flight = sum(progress.get(state, 0) for state in ("issued", "settled", "composed"))
    finished = progress.get("num_issued", 0) - in_flight
    return f"{dropped} of {finished} groups, {dropped / finished:.0%}" if finished >= dropped else str(dropped)
