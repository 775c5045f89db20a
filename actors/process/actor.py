"""Interface of an actor to the process that runs the actor."""

from typing import Protocol

from actors.process.liveness import Liveness
from actors.process.membership import Membership
from bus.counts import EdgeCounts


class Actor(Protocol):
    """An actor of a run: one per process, or several as threads of a test."""

    @property
    def name(self) -> str:
        """Name in the run."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Place in the run, through which the packer is heard; None: this actor is the packer."""
        ...

    @property
    def liveness(self) -> Liveness:
        """Liveness of the main loop, which calls `turn` once per iteration."""
        ...

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of the actor's sockets."""
        ...

    def run(self, metrics_url: str = "") -> None:
        """Work until the run is done or the actor has drained. Closes everything at the end; called once."""
        ...

    def drain(self) -> None:
        """Finish soon and exit, losing nothing. Thread-safe."""
        ...
