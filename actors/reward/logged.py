"""Values that reward functions log with TRL's `log_extra` and `log_metric`, by group, on their way to the packer."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.messages import RolloutGroup

TEXT_CHARACTERS = 1000
"""Limit of a logged text; a longer one is cut."""
MOST_NAMES = 32
"""Most names that all functions together may log for a group, each for columns and for metrics."""


@dataclass
class Logged:
    """Values that the functions of a group have logged."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    """A value for each completion, by name: a text, a number or None."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Numbers by name, one for each call of `log_metric`."""

    @property
    def means(self) -> dict[str, float]:
        """Mean of each metric."""
        return {name: sum(values) / len(values) for name, values in self.metrics.items()}


@dataclass(frozen=True)
class TrainerState:
    """Part of TRL's `trainer_state` that a sampled group knows."""

    global_step: int
    """Number of steps of the newest weights that sampled the group."""


class RewardLog:
    """Values logged for the groups that are scored at present. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], Logged] = {}

    def open(self, group: RolloutGroup) -> None:
        """Take values for a group from now on."""
        with self._lock:
            self._open[_key(group)] = Logged()

    def take(self, group: RolloutGroup) -> Logged:
        """Return the values of a group, and take no more: those of late calls are dropped."""
        with self._lock:
            return self._open.pop(_key(group), Logged())

    def writers(self, group: RolloutGroup) -> dict[str, Callable[..., None]]:
        """Return the functions `log_extra` and `log_metric` for a group."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            items = [_plain(value) for value in values]
            if len(items) != group.num_completions:
                raise ValueError(
                    f"log_extra({column!r}) has {len(items)} values for {group.num_completions} completions"
                )
            with self._lock:
                if logged := self._open.get(_key(group)):
                    _check_room(logged.columns, column)
                    logged.columns[column] = items

        def log_metric(name: str, value: float) -> None:
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"log_metric({name!r}) got {value}; log finite numbers")
            with self._lock:
                if logged := self._open.get(_key(group)):
                    _check_room(logged.metrics, name)
                    logged.metrics.setdefault(name, []).append(number)

        return {"log_extra": log_extra, "log_metric": log_metric}


def _key(group: RolloutGroup) -> tuple[int, int]:
    return group.ordinal, group.attempt


def _check_room(taken: dict[str, Any], name: str) -> None:
    if name not in taken and len(taken) >= MOST_NAMES:
        raise ValueError(f"{name!r}: at most {MOST_NAMES} names may be logged for a group")


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float) and abs(value) < 2**63):
        return value
    return str(value)[:TEXT_CHARACTERS]
