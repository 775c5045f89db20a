"""Groups of processes that broadcast tensors. Members meet, send and leave, and never wait without a limit.

Tensors of the host travel by gloo, tensors of GPUs by NCCL. Every wait calls a check again and again, so that a newer
update or the end of the actor stops the wait at once. An abandoned collective ends by its own timeout in gloo's
threads, and by an abort with NCCL; until then its memory must not be used for anything else. The members of a group
meet in a TCPStore. Neither the store nor the wire is authenticated or encrypted: the receiver checks the bytes
(`bus.weights.memory`).
"""

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from bus import threads, torch_groups
from bus.weights import UpdateAbandonedError
from bus.weights.inside.grpo_actors_handles import beside
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

CHECK_SECONDS = 0.02
"""Seconds between two checks while waiting."""
POLL_SECONDS = 0.001
"""Seconds between two looks at a broadcast between GPUs."""
STORE_TIMEOUT = timedelta(seconds=30)
OWN_TIMEOUTS = 2
"""Timeout of gloo and NCCL themselves as a multiple of `weights.timeout`: a broadcast starts while the previous one is
still awaited."""


class Wait:
    """The limits of all waits of an update: a check to give up, and a timeout, renewed by each piece of progress.

    Args:
        check: raises UpdateAbandonedError to give up.
        timeout: `weights.timeout`, seconds without progress: from now, from the meeting, from each bucket.
        on_news: called at each progress.
    """

    def __init__(
        self, check: Callable[[], object], timeout: float, on_news: Callable[[], object] = lambda: None
    ) -> None:
        self.timeout = timeout
        self._on_news = on_news
        self._check, self._deadline = check, time.monotonic() + timeout

    def renew(self) -> None:
        """Note progress: the timeout starts again."""
        self._deadline = time.monotonic() + self.timeout
        self._on_news()

    def look(self, what: str) -> None:
        """Call the check, and compare the deadline.

        Args:
            what: start of the error text, for example "the members of an update did not meet".

        Raises:
            UpdateAbandonedError: the check says so, or the timeout is over.
        """
        self._check()
        if time.monotonic() > self._deadline:
            raise UpdateAbandonedError(f"{what} within weights.timeout {self.timeout:g} s")


class ProcessGroup:
    """A rank's end of a process group. The constructor waits until all members have met.

    Args:
        name: name of the group and of its trainer; never used twice.
        find: returns a new client of the group's store. No other group may use this client: a blocking call blocks
            every other call of the same client.
        rank: rank of this process; 0 is the trainer.
        size: number of ranks.
        host: address of this machine that the other members reach; with NCCL unused, which finds its own.
        device: device of the tensors. A group of one, which sends nothing, meets nobody.
        wait: limits of the update. Gloo and NCCL give up by themselves after OWN_TIMEOUTS × the timeout.

    Raises:
        UpdateAbandonedError: the members did not meet.
        ConfigError: `host` is no address of this machine.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Any],
        rank: int,
        size: int,
        host: str,
        wait: Wait,
        device: "torch.device",
    ) -> None:
        self.name, self._on_gpu = name, device.type == "cuda"
        timeout = timedelta(seconds=OWN_TIMEOUTS * wait.timeout)

        def meet() -> tuple[Any, Any]:
            store = find()
            if size == 1:
                return store, None
            make = partial(_nccl, device) if self._on_gpu else partial(_gloo, host)
            return store, make(store, rank, size, timeout)

        self.store, self._process_group = in_time(meet, wait, "the members of an update did not meet")
        self._under_way: list[Any] = []

    def broadcast(self, flat: Any, wait: Wait) -> "Broadcast":
        """Start to send (rank 0) or to receive (other ranks) a uint8 tensor in place. Does not wait.

        Args:
            flat: tensor [num_bytes] of dtype uint8 on the group's device, unused until the broadcast has ended.
            wait: limits for `Broadcast.wait`.

        Raises:
            UpdateAbandonedError: the group is broken.
        """
        try:
            # beside the work of the model: else a broadcast would begin when the step under way has ended
            with beside(flat.device) if self._on_gpu else contextlib.nullcontext():
                work = self._process_group.broadcast(flat, 0)
        except RuntimeError as error:
            raise UpdateAbandonedError(f"a member of the update is gone: {error}") from error
        # completed work is let go at once: it holds its tensor
        self._under_way = [*(work for work in self._under_way if not work.is_completed()), work]
        return Broadcast(work, flat, wait, may_wait=not self._on_gpu)

    def leave(self) -> None:
        """Leave the group without waiting. Broadcasts under way end in the background."""
        # freeing a gloo group waits for all its collectives, so a thread holds the last references
        if self._process_group is not None:
            threads.start_helper("weights-left", _outlive, self._process_group, self._under_way, self._on_gpu)
        self._process_group, self._under_way = None, []


class Broadcast:
    """A broadcast under way.

    Args:
        work: torch's work.
        flat: tensor of the bucket.
        wait: limits of `wait`.
        may_wait: True if a wait with a timeout harms nothing. NCCL aborts the whole group when it is over.
    """

    def __init__(self, work: Any, flat: Any, wait: Wait, may_wait: bool) -> None:
        self._work, self._flat, self._wait, self._may_wait = work, flat, wait, may_wait

    def wait(self) -> Any:
        """Wait until the whole tensor has been sent or received, and return it.

        Raises:
            UpdateAbandonedError: a member is gone, or too late, or the update is given up.
        """
        while not self._work.is_completed():
            self._wait.look("a bucket was not transferred")
            if not self._may_wait:
                time.sleep(POLL_SECONDS)
                continue
            # gloo raises RuntimeError at this short timeout, and after a failure; a failure is raised again below
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(seconds=CHECK_SECONDS))
        try:
            self._work.wait()  # completed: returns or raises at once
        except RuntimeError as error:
            raise UpdateAbandonedError(f"a member of the update is gone: {error}") from error
        self._wait.renew()
        return self._flat


class Store:
    """A TCPStore served by this process, on a free port.

    Args:
        host: address for clients.
        listen: address to listen on: one interface, or a wildcard for all. Empty: `host`.

    Raises:
        ConfigError: this machine does not have the address to listen on.
    """

    def __init__(self, host: str, listen: str = "") -> None:
        import torch

        distributed: Any = torch.distributed
        # a TCPStore by itself listens on all interfaces, so it gets a socket that is bound to `host` already
        listen = listen or host
        kind, _, _, _, address = socket.getaddrinfo(listen, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(kind)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"bus.host: {listen} can't be bound for weights: {error.strerror}") from error
        listener.listen(1024)  # many engines connect in the same moment
        port = listener.getsockname()[1]
        self.server: Any = distributed.TCPStore(
            # this process is a client too, which must not depend on names, or on a way back through a NAT
            {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, address[0]),  # noqa: S104
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),  # the store owns and closes the descriptor from here on
        )
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def client_of(address: str, timeout: float) -> Any:
    """Return a client of a store.

    Args:
        address: `tcp://HOST:PORT` of the store.
        timeout: seconds for connecting and for each call.
    """
    import torch

    distributed: Any = torch.distributed
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return distributed.TCPStore(
        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def in_time(make: Callable[[], Any], wait: Wait, what: str) -> Any:
    """Call `make` in a thread of its own, and return its result.

    A call to the store of a frozen process never returns, and can't be interrupted. So the thread is left behind if the
    wait is given up.

    Args:
        make: the call.
        wait: limits of the wait; a result counts as progress.
        what: start of the error text.

    Raises:
        UpdateAbandonedError: `make` raised an error, or did not return in time, or the wait was given up.
        ConfigError: `make` raised it; another try would fail too.
    """
    made: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            threads.mark("weights.meeting")
            made.append(make())
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            failed.append(error)

    thread = threads.start_helper("rendezvous", run)
    while thread.is_alive():
        wait.look(f"{what}: no answer")
        thread.join(CHECK_SECONDS)
    if failed and isinstance(failed[0], ConfigError):
        raise failed[0]
    if failed:
        raise UpdateAbandonedError(f"{what}: {failed[0]}") from failed[0]
    wait.renew()
    return made[0]


def _gloo(host: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of gloo, connected over an address of this machine.

    Raises:
        ConfigError: this machine does not have the address.
    """
    import torch

    distributed: Any = torch.distributed
    try:
        device = distributed.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise ConfigError(
            f"bus.host, bus.advertise_host: {host} is no address of this machine ({error}); behind NAT use "
            "weights.channel: filesystem"
        ) from error
    return torch_groups.gloo(store, rank, size, device, timeout)


def _nccl(device: "torch.device", store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of NCCL, connected.

    Raises:
        ConfigError: this torch has no NCCL.
    """
    import torch

    if not torch.distributed.is_nccl_available():
        raise ConfigError("weights.channel: device needs NCCL between GPUs, and this torch has none; use rendezvous")
    return torch_groups.nccl(store, rank, size, device, timeout)


def _outlive(process_group: Any, works: list[Any], on_gpu: bool) -> None:
    """Hold a group until all its collectives have completed; NCCL's are ended."""
    threads.mark("weights.left")
    if on_gpu:
        process_group.abort()
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)
