"""What is simulated: a configuration, numbers of processes, times, deaths."""

from dataclasses import dataclass

from actors.simulate.changes import Change
from actors.simulate.failures import Death
from actors.simulate.models import Times
from schemas.config import RunConfig


@dataclass(frozen=True)
class Size:
    """Number of processes by role."""

    rollouts: int
    rewards: int
    trainers: int
    engines: int

    @classmethod
    def of(cls, config: RunConfig) -> "Size":
        """Return the processes that a run starts with."""
        numbers = config.processes
        return cls(numbers["rollout"], max(1, numbers["reward"]), config.trainer.num_ranks, numbers["inference"])


@dataclass(frozen=True)
class Plan:
    """A run to simulate: its configuration, its processes, their times and their deaths."""

    config: RunConfig
    size: Size
    times: Times
    steps: int
    """Steps until the end; at most `trainer.max_steps` of the configuration."""
    seed: int = 0
    deaths: tuple[Death, ...] = ()
    mean_seconds_between_deaths: tuple[tuple[str, float], ...] = ()
    """Mean seconds between two deaths of a process, by role."""
    changes: tuple[Change, ...] = ()
    """Other values of figures from a time on."""
