"""Changes of the figures in the middle of a simulation: rewards that get slow, environments that get fast."""

import re
from dataclasses import dataclass

from actors.simulate.failures import UNITS
from actors.simulate.models import parse_setting
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """Another value of a figure from a time on."""

    seconds: float
    """Time from the start of the simulation."""
    name: str
    """Name of the figure, as `--set` takes it."""
    value: float


def parse_change(text: str) -> Change:
    """Return the change described by a word of `--change`, such as `600s:reward_seconds=8`.

    Raises:
        ConfigError: the word has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?):(.+)", text)
    if not found:
        raise ConfigError(f"--change {text}: write TIME:NAME=VALUE, as in 600s:reward_seconds=8")
    amount, unit, setting = found.groups()
    return Change(float(amount) * UNITS[unit or "s"], *parse_setting(setting))
