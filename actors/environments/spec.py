"""What the workers of a pool run, and their limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.config.services import BusConfig

Json = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds of each call, and bounds of a worker process."""

    load: float = 120.0
    reset: float = 60.0
    step: float = 60.0
    score: float = 60.0
    run: float = 3600.0
    """A whole episode of an environment that drives."""
    reward: float = 300.0
    """A call of a reward function."""
    silence: float = 30.0
    """Without a beat: the process is stopped, or an async function blocks its event loop."""
    processes: int = 64
    """Processes of a worker, itself included."""

    def of(self, kind: str) -> float:
        """Return the seconds for a call of this kind."""
        return float(getattr(self, kind.removesuffix("_group"), self.reset))


Use = Literal["environment", "reward"]
"""What the user's object is used as: an environment, or a reward function."""


@dataclass(frozen=True)
class Hosts:
    """Environment hosts, and how to reach them.

    Args:
        addresses: `tcp://HOST:PORT` each.
        owner: name of the actor; hosts end the workers of a predecessor of this name.
        bus: keys.
    """

    addresses: tuple[str, ...]
    owner: str
    bus: BusConfig


@dataclass(frozen=True)
class EnvironmentSpec:
    """Code that workers run, their number and their limits.

    Args:
        name: for messages, logs and metrics.
        path: `my_env.py:Env` or `package.module:Env`.
        options: keyword arguments of the class or factory.
        python: interpreter; empty for the present one.
        workers: number of processes.
        episodes: most episodes of a worker at the same time.
        directory: working directory; empty for the present one.
        variables: further environment variables.
        use: what the user's object is used as.
        hosts: environment hosts, which hold the workers in turn; None: they run on this machine.
    """

    name: str
    path: str
    options: Json = field(default_factory=dict)
    python: str = ""
    workers: int = 1
    episodes: int = 32
    directory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    use: Use = "environment"
    hosts: Hosts | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Fields of a line in the log."""
        return {self.use: self.name}

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"reward function {self.name}" if self.use == "reward" else f"environment {self.name}"

    def __post_init__(self) -> None:
        """Refuse numbers with which no episode could ever begin."""
        for name in ("workers", "episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.title}: {name} is {getattr(self, name)}, but must be at least 1")
