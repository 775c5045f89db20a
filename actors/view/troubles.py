"""What is wrong with a run now, and what was wrong and has been dealt with: pure functions of the packer's progress."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

MAX_FAILURE_CHARACTERS = 100
MISSED = {
    "rollout": "no rollout actor is there: nothing is sampled",
    "reward": "no reward actor is there: nothing is scored",
    "inference": "no inference actor is there: nothing can be sampled",
}


def troubles(progress: Mapping[str, Any], silent_seconds: float) -> list[str]:
    """What somebody should look at; empty for a run that is well.

    Args:
        progress: the newest that is known.
        silent_seconds: since the packer said it.
    """
    found = [f"the run has failed: {progress['failure']}"] if progress.get("failure") else []
    lease = progress.get("lease", 3.0)
    if silent_seconds > lease:
        found.append(f"the packer has not been heard for {seconds_in_words(silent_seconds)}")
    if progress.get("phase") in ("starting", "running", "finishing"):
        found += [MISSED.get(kind, f"{kind} is not there: no step is trained") for kind in progress.get("missing", ())]
        found += list(_actors(progress, lease))
    return found + [f"can't be written: {problem}" for problem in progress.get("unwritten", ())]


def _actors(progress: Mapping[str, Any], lease: float) -> Iterator[str]:
    for actor in progress.get("actors", ()):
        if actor["age"] > lease:
            yield (
                f"{actor['name']} has not been heard for {seconds_in_words(actor['age'])} (bus.lease {lease:g} s): "
                "dead, frozen or cut off"
            )
        elif actor.get("error"):
            yield f"{actor['name']}: {actor['error']}"
        elif actor.get("engine") == "quarantined":
            yield f"{actor['name']} is quarantined: it could not take new weights, and gets no work"


def dealt_with(progress: Mapping[str, Any]) -> list[str]:
    """What went wrong and cost time only; nothing in a run where all was well."""
    found = []
    if restarts := progress.get("restarts"):
        found.append("restarted " + ", ".join(f"{name} ×{count}" for name, count in restarts.items()))
    if failed := progress.get("failed_attempts"):
        found.append(f"failed attempts {failed}")
    if reissued := progress.get("reissued"):
        found.append(f"issued again {reissued}")
    if dropped := progress.get("dropped"):
        found.append(f"dropped {sum(dropped.values())} ({', '.join(f'{n} {reason}' for reason, n in dropped.items())})")
    if failure := progress.get("last_failure"):
        found.append(f"last failure: {textwrap.shorten(failure, MAX_FAILURE_CHARACTERS, placeholder='…')}")
    return found


def seconds_in_words(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h`, `4 days`."""
    for unit, length, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
