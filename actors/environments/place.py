"""Where the workers of a pool run: on this machine (`local`), or with environment hosts (`remote`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

OnFrame = Callable[[bytes, bytes], None]
"""Called with a worker's identity and a frame of the worker."""


@dataclass(frozen=True)
class End:
    """End of a worker process."""

    words: str
    event: str = ""
    """Event to count; empty: none."""
    is_bystander: bool = False
    """True if neither the worker nor the user's code is to blame: the connection, or the host, has ended."""


class Process(Protocol):
    """A worker process, of this machine or of another one."""

    async def run(self) -> End:
        """Start the process, and wait for its end. Everything below the process has then ended too."""
        ...

    async def send(self, data: bytes) -> None:
        """Send a frame; one for a worker that is gone is dropped."""
        ...

    def kill(self) -> None:
        """Let the process end, with everything below it."""
        ...

    def kill_now(self) -> None:
        """Kill the process without waiting, if it has not ended."""
        ...


class Place(Protocol):
    """Processes of workers, as an asynchronous context."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def process(self, name: str, identity: bytes) -> Process:
        """Return a process that has not been started.

        Args:
            name: name of the worker, which its successors have too.
            identity: identity of this process on the socket.
        """
        ...

    async def look(self) -> None:
        """Note the processes below each worker. Called once a second."""
        ...
