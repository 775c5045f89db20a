"""Groups of processes that broadcast: how they meet, send, and leave one another, without ever waiting for good.

Every wait looks at a check, so that a newer update, or the end, is heard at once. A collective that is given up ends by
its own timeout, in gloo's threads, on memory that nobody else uses. A store is where the members of a group meet;
neither it nor the wire is authenticated or encrypted.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bus.weights import UpdateAbandonedError

CHECK_SECONDS = 0.02
STORE_TIMEOUT = timedelta(seconds=30)
GLOO_TIMEOUTS = 2
"""Of gloo's own timeout, in ours: a broadcast is begun while the one before it is still waited for."""


class Wait:
    """What all waits of one update look at: whether it is still worth it, and how long nothing has come.

    Args:
        check: raises UpdateAbandonedError to give up.
        timeout: weights.timeout: seconds, from now on, from the meeting, and from each bucket.
    """

    def __init__(self, check: Callable[[], object], timeout: float) -> None:
        self.timeout = timeout
        self._check, self._deadline = check, time.monotonic() + timeout

    def renew(self) -> None:
        """Something has come."""
        self._deadline = time.monotonic() + self.timeout

    def look(self, what: str) -> None:
        """Go on waiting, or raise UpdateAbandonedError; `what` has not happened then."""
        self._check()
        if time.monotonic() > self._deadline:
            raise UpdateAbandonedError(f"{what} within weights.timeout {self.timeout:g} s")


class Group:
    """One rank's end of a group, made by meeting all others.

    Args:
        name: of the group, and of the trainer that it belongs to; never used for two.
        find: a client of the group's store. It is this group's own: who waits in one blocks all else in it.
        host: this machine's address that the others reach.
        wait: of the update for which they meet; what is given up later ends in gloo by itself, after twice its time.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Any],
        rank: int,
        size: int,
        host: str,
        wait: Wait,
    ) -> None:
        self.name = name
        self.store, self._group = in_time(
            lambda: _meet(find(), rank, size, host, GLOO_TIMEOUTS * wait.timeout),
            wait,
            "the members of an update did not meet",
        )
        self._under_way: list[Any] = []

    def broadcast(self, flat: Any, wait: Wait) -> "Broadcast":
        """Begin to send (rank 0) or receive a uint8 tensor, in place.

        Raises:
            UpdateAbandonedError: the group is broken.
        """
        try:
            work = self._group.broadcast(flat, 0)
        except RuntimeError as error:
            raise UpdateAbandonedError(f"a member of the update is gone: {error}") from error
        self._under_way = [*(work for work in self._under_way if not work.is_completed()), work]
        return Broadcast(work, flat, wait)

    def leave(self) -> None:
        """Let go of it. Gloo waits for all that is under way when a group is freed: a thread does that, not we."""
        threading.Thread(target=_outlive, args=(self._group, self._under_way), name="weights-left", daemon=True).start()
        self._group, self._under_way = None, []


class Broadcast:
    """A broadcast under way."""

    def __init__(self, work: Any, flat: Any, wait: Wait) -> None:
        self._work, self._flat, self._wait = work, flat, wait

    def wait(self) -> Any:
        """The tensor, when all of it is there.

        Raises:
            UpdateAbandonedError: a peer is gone, or too late.
        """
        while not self._work.is_completed():
            self._wait.look("a bucket was not through")
            with contextlib.suppress(RuntimeError):  # not yet; or it has failed, which is raised below
                self._work.wait(timedelta(seconds=CHECK_SECONDS))
        try:
            self._work.wait()
        except RuntimeError as error:
            raise UpdateAbandonedError(f"a member of the update is gone: {error}") from error
        self._wait.renew()
        return self._flat


class Store:
    """A TCPStore that this process serves, on a free port.

    By itself it would listen on all interfaces, so it gets a socket that is bound to `host`.
    """

    def __init__(self, host: str) -> None:
        import torch

        distributed: Any = torch.distributed
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(kind)
        listener.bind(address)
        listener.listen(1024)
        port = listener.getsockname()[1]
        self.server: Any = distributed.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def client_of(address: str, timeout: float) -> Any:
    """A client of the store at this address; `timeout` seconds for each of its calls."""
    import torch

    distributed: Any = torch.distributed
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return distributed.TCPStore(
        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def _meet(store: Any, rank: int, size: int, host: str, timeout: float) -> tuple[Any, Any]:
    import torch

    distributed: Any = torch.distributed
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return store, gloo(store, rank, size, options)


def in_time(make: Callable[[], Any], wait: Wait, what: str) -> Any:
    """What `make` returns, from a thread of its own: a store whose process is frozen answers never, and hears nothing.

    Args:
        what: went wrong if it does not return in time.

    Raises:
        UpdateAbandonedError: it did not, or could not.
    """
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except (RuntimeError, ValueError, TypeError) as error:  # the last two: somebody has written nonsense
            failed.append(error)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        wait.look(f"{what}: not")
        thread.join(CHECK_SECONDS)
    if failed:
        raise UpdateAbandonedError(f"{what}: {failed[0]}") from failed[0]
    wait.renew()
    return made[0]


def _outlive(group: Any, works: list[Any]) -> None:
    """Hold a group until nothing is under way in it."""
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)
