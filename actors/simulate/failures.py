"""Failures of a simulation: deaths of processes at given times, or at random with a mean time between two."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.errors import ConfigError

ROLES = ("packer", "rollout", "reward", "trainer", "inference")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Death:
    """Death of a process."""

    role: str
    number: int
    """Number of the process among those of its role."""
    seconds: float
    """Time from the start of the simulation."""


def parse_death(text: str) -> Death:
    """Return the death described by a word of `--kill`, such as `inference-0@120s`.

    Raises:
        ConfigError: the word has another form.
    """
    found = re.fullmatch(rf"({'|'.join(ROLES)})-(\d+)@(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found:
        raise ConfigError(f"--kill {text}: write ROLE-NUMBER@SECONDS, as in inference-0@120; roles: {', '.join(ROLES)}")
    role, number, amount, unit = found.groups()
    return Death(role, int(number), float(amount) * UNITS[unit or "s"])


def parse_rate(text: str) -> tuple[str, float]:
    """Return role and mean seconds between two deaths of a process, from a word of `--mtbf`, such as `inference=6h`.

    Raises:
        ConfigError: the word has another form.
    """
    found = re.fullmatch(rf"({'|'.join(ROLES)})=(\d+(?:\.\d+)?)([smhd])", text)
    if not found or float(found.group(2)) <= 0:
        raise ConfigError(f"--mtbf {text}: write ROLE=TIME, as in inference=6h; roles: {', '.join(ROLES)}")
    return found.group(1), float(found.group(2)) * UNITS[found.group(3)]


def deaths_of(role: str, number: int, mean_seconds: float, seed: int) -> Iterator[Death]:
    """Yield the deaths of a process without an end, as a Poisson process (times between two are exponential)."""
    rng, at = random.Random(f"{seed} {role} {number}"), 0.0
    while True:
        at += rng.expovariate(1.0 / mean_seconds)
        yield Death(role, number, at)
