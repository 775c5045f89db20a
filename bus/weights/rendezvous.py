"""Weights by broadcast: trainer and engines meet through a TCPStore, and the buckets of a version go to all at once.

    packer    names an update: id, group, policy, members by boot id (P24)
    trainer   rank 0 of the group; broadcasts the buckets of the version that it holds a copy of
    engine    enters only updates that name it; checks each bucket before it is applied; says `got` in the store

gloo on CPUs, NCCL on GPUs. A group is kept for as long as its members stay and nothing fails. Every wait is a poll, so
that a newer update, or the end, is heard at once; a collective that is given up ends by its own timeout, in gloo's
threads, on memory that nobody else uses. What comes over the wire is checked against the manifest, which came over the
authenticated control plane; the store and the wire themselves are neither authenticated nor encrypted.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import structlog

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.buckets import Bucket, Header, Parcel, pack, unpack
from schemas.messages import Manifest, Policy, WeightUpdate

log = structlog.get_logger("bus.weights")

POLL_SECONDS = 0.0005
AHEAD = 2
"""Buckets that an engine receives at once: one is on the wire while the one before is checked and applied."""
STORE_TIMEOUT = timedelta(seconds=30)


class Group:
    """One rank's end of a group, made by meeting all others.

    Args:
        address: of the trainer's store; a client of its own waits there, since who waits in one blocks all else in it.
        key: names this group in the store; never used for two.
        host: this machine's address that the others reach.
        check: called while waiting; raises to give up.
        timeout: seconds for the meeting and for each broadcast.
    """

    def __init__(
        self, address: str, key: str, rank: int, size: int, host: str, check: Callable[[], object], timeout: float
    ) -> None:
        self.key, self._timeout = key, timeout
        self._group = _waiting(lambda: _meet(address, key, rank, size, host, timeout), check, timeout)

    def broadcast(self, flat: Any, check: Callable[[], object]) -> "Broadcast":
        """Begin to send (rank 0) or receive a uint8 tensor, in place."""
        return Broadcast(self._group, flat, check, self._timeout)


class Broadcast:
    """A broadcast under way."""

    def __init__(self, group: Any, flat: Any, check: Callable[[], object], timeout: float) -> None:
        self._group, self._work, self._flat, self._check = group, group.broadcast(flat, 0), flat, check
        self._deadline, self._timeout = time.monotonic() + timeout, timeout

    def wait(self) -> Any:
        """The tensor, when all of it is there.

        Raises:
            UpdateAbandonedError: a peer is gone, or too late.
        """
        try:
            while not self._work.is_completed():
                self._check()
                if time.monotonic() > self._deadline:
                    raise UpdateAbandonedError(f"a bucket was not through within weights.timeout {self._timeout:g} s")
                time.sleep(POLL_SECONDS)
            self._work.wait()
        except RuntimeError as error:
            raise UpdateAbandonedError(f"a member of the update is gone: {error}") from error
        except BaseException:
            _given_up(self._work, self._flat, self._group)
            raise
        return self._flat


class RendezvousPublisher:
    """The trainer's end: holds a copy of the newest versions and broadcasts the one that an update names.

    Args:
        host: this machine's address that engines reach; the store binds there, on a free port.
        bucket_bytes: of one broadcast.
        keep: newest versions held.
        timeout: weights.timeout.
    """

    def __init__(self, host: str, bucket_bytes: int, keep: int, timeout: float) -> None:
        self._host, self._bucket_bytes, self._keep, self._timeout = host, bucket_bytes, keep, timeout
        self._address = ""
        self._server: Any = None
        self._parcels: dict[Policy, tuple[Manifest, Parcel]] = {}
        self._group: Group | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Of the store, where trainer and engines meet."""
        self._open()
        return self._address

    def publish(self, policy: Policy, weights: Weights) -> Manifest:
        """Copy a version into buckets; engines may ask for it from now on."""
        self._open()
        parcel = pack(weights, self._bucket_bytes)
        manifest = Manifest(
            policy=policy,
            channel="rendezvous",
            content=weights.content,
            uri=self._address,
            digest=parcel.header.digest,
            num_bytes=parcel.header.num_bytes,
        )
        self._server.set(_header_key(policy), parcel.header.encode())
        with self._lock:
            self._parcels[policy] = (manifest, parcel)
        return manifest

    def published(self) -> list[Manifest]:
        """The versions held, oldest first."""
        with self._lock:
            return [manifest for manifest, _ in self._parcels.values()]

    def prune(self, keep_version: int) -> None:
        """Let go of all but the newest `keep`, and of none from `keep_version` on."""
        with self._lock:
            for policy in list(self._parcels)[: -self._keep]:
                if policy.version < keep_version:
                    del self._parcels[policy]
                    self._server.delete_key(_header_key(policy))

    def close(self) -> None:
        """Let all versions go."""
        with self._lock:
            self._parcels.clear()

    def send(self, update: WeightUpdate, check: Callable[[], object]) -> None:
        """Broadcast the version that an update names; returns when every member has checked all of it.

        Raises:
            UpdateAbandonedError: `check` has raised it, a member is gone or too late, or the version is not held any
                more; the next update needs another group.
        """
        with self._lock:
            held = self._parcels.get(update.policy)
        if held is None:
            raise UpdateAbandonedError(f"{update.policy} is not held any more")
        parcel = held[1]
        try:
            self._broadcast(update, parcel, check)
            self._wait_for_all(update, len(parcel.bytes_of), check)
        except UpdateAbandonedError as error:
            raise UpdateAbandonedError(str(error), error.missed or self._behind(update)) from error

    def _broadcast(self, update: WeightUpdate, parcel: Parcel, check: Callable[[], object]) -> None:
        try:
            group = self._group_of(update, check)
            for flat in parcel.bytes_of:
                group.broadcast(flat, check).wait()
        except BaseException:
            self._group = None  # later than this it is whole, and the next update may name it again
            raise

    def _open(self) -> None:
        """Open the store, with the first version: torch is slow to import, and the first beat should not wait."""
        if self._server is not None:
            return
        import torch

        distributed: Any = torch.distributed
        listener = _listen(self._host)  # by itself the store would listen on all interfaces
        port = listener.getsockname()[1]
        self._server = distributed.TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        self._address = f"tcp://{self._host}:{port}"

    def _group_of(self, update: WeightUpdate, check: Callable[[], object]) -> Group:
        key = _group_key(update)
        if self._group is None or self._group.key != key:
            self._group = Group(self._address, key, 0, update.num_ranks, self._host, check, self._timeout)
        return self._group

    def _wait_for_all(self, update: WeightUpdate, num_buckets: int, check: Callable[[], object]) -> None:
        deadline = time.monotonic() + self._timeout
        while any(count < num_buckets for count in self._counts(update).values()):
            check()
            if time.monotonic() > deadline:
                raise UpdateAbandonedError(f"a member was not done within weights.timeout {self._timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _behind(self, update: WeightUpdate) -> list[str]:
        """Who has checked fewer buckets than another member: the one that the others waited for."""
        counts = self._counts(update)
        return [boot_id for boot_id, count in counts.items() if count < max(counts.values())]

    def _counts(self, update: WeightUpdate) -> dict[str, int]:
        """Buckets that each member has checked."""
        keys = {member.boot_id: _got_key(update, member.boot_id) for member in update.members}
        return {
            boot_id: int(self._server.get(key)) if self._server.check([key]) else 0 for boot_id, key in keys.items()
        }


class RendezvousReceiver:
    """An engine's end: enters the updates that name it.

    Args:
        boot_id: of the inference actor that owns the engine.
        host: this machine's address that the others reach.
        timeout: weights.timeout.
        local_rank: of this process among the engine's (tensor parallel workers each receive all).
    """

    def __init__(self, boot_id: str, host: str, timeout: float, local_rank: int = 0) -> None:
        self._boot_id, self._host, self._timeout, self._local_rank = boot_id, host, timeout, local_rank
        self._stores: dict[str, Any] = {}
        self._group: Group | None = None

    def header(self, manifest: Manifest) -> Header:
        """What the version consists of, checked against the manifest.

        Raises:
            ValueError: it is not what the trainer published.
            UpdateAbandonedError: the trainer's store does not answer, or holds the version no more.
        """
        try:
            store = self._store(manifest.uri)
            if not store.check([_header_key(manifest.policy)]):
                raise UpdateAbandonedError(f"the trainer at {manifest.uri} holds {manifest.policy} no more")
            return Header.decode(store.get(_header_key(manifest.policy)), manifest.digest)
        except RuntimeError as error:
            self._stores.pop(manifest.uri, None)
            raise UpdateAbandonedError(f"the trainer's store at {manifest.uri} does not answer: {error}") from error

    def buckets(
        self, manifest: Manifest, update: WeightUpdate, check: Callable[[], object]
    ) -> "Iterator[tuple[Bucket, dict[str, Any]]]":
        """Each bucket with its tensors, checked; the next ones are under way while the caller applies this one.

        Raises:
            ValueError: a bucket is not what the trainer published.
            UpdateAbandonedError: a peer is gone, or `check` has raised it; this end needs another group then.
        """
        import torch

        header = self.header(manifest)
        try:
            group = self._group_of(manifest, update, check)
            sizes = [bucket.num_bytes for bucket in header.buckets]
            coming = [group.broadcast(torch.empty(size, dtype=torch.uint8), check) for size in sizes[:AHEAD]]
            for i, bucket in enumerate(header.buckets):
                tensors = unpack(bucket, coming.pop(0).wait())
                for size in sizes[i + AHEAD : i + AHEAD + 1]:
                    coming.append(group.broadcast(torch.empty(size, dtype=torch.uint8), check))
                self._say_got(manifest, update, i + 1)
                yield bucket, tensors
        except BaseException:  # a caller that stops early among them
            self._group = None
            raise

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """The whole version in a staging buffer: nothing is applied before all of it has been checked."""
        assert update is not None
        tensors: dict[str, Any] = {}
        for _, part in self.buckets(manifest, update, check):
            tensors |= part
        header = self.header(manifest)
        return Weights(header.content, tensors, header.files)

    def _group_of(self, manifest: Manifest, update: WeightUpdate, check: Callable[[], object]) -> Group:
        key = _group_key(update)
        if self._group is None or self._group.key != key:
            rank = update.first_rank(self._boot_id) + self._local_rank
            size = update.num_ranks
            self._group = Group(manifest.uri, key, rank, size, self._host, check, self._timeout)
        return self._group

    def _say_got(self, manifest: Manifest, update: WeightUpdate, num_buckets: int) -> None:
        if self._local_rank == 0:
            self._store(manifest.uri).set(_got_key(update, self._boot_id), str(num_buckets))

    def _store(self, address: str) -> Any:
        if address not in self._stores:
            self._stores = {address: _client(address, STORE_TIMEOUT)}
        return self._stores[address]


def _client(address: str, timeout: timedelta) -> Any:
    import torch

    distributed: Any = torch.distributed
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _meet(address: str, key: str, rank: int, size: int, host: str, timeout: float) -> Any:
    import torch

    distributed: Any = torch.distributed
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(distributed.PrefixStore(key, _client(address, options._timeout)), rank, size, options)


def _waiting(make: Callable[[], Any], check: Callable[[], object], timeout: float) -> Any:
    """What `make` returns, from a thread of its own, so that who waits for the others hears that it shall not."""
    made: list[Any] = []
    failed: list[RuntimeError] = []

    def run() -> None:
        try:
            made.append(make())
        except RuntimeError as error:  # what torch raises
            failed.append(error)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        check()
        thread.join(0.01)
    if not made:
        reason = failed[0] if failed else f"not all members were there within weights.timeout {timeout:g} s"
        raise UpdateAbandonedError(f"the members of an update did not meet: {reason}")
    return made[0]


_under_way: list[tuple[Any, ...]] = []


def _given_up(work: Any, *used: Any) -> None:
    """Keep what a given-up broadcast still uses until gloo has ended it: freeing it earlier would wait for that."""
    _under_way[:] = [entry for entry in _under_way if not entry[0].is_completed()]
    _under_way.append((work, *used))


def _listen(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def _header_key(policy: Policy) -> str:
    return f"header/{policy}"


def _group_key(update: WeightUpdate) -> str:
    return f"group/{update.group}"


def _got_key(update: WeightUpdate, boot_id: str) -> str:
    return f"got/{update.update}/{boot_id}"
