"""Weights by broadcast: trainer and engines meet through a TCPStore, and the buckets of a version go to all at once.

    packer    names an update: id, group, policy, members by boot id (P24)
    trainer   rank 0 of the group; broadcasts the buckets of the version that it holds a copy of
    engine    enters only updates that name it; checks each bucket before it is applied; says `got` in the store

A group (`groups.py`, gloo) is kept for as long as its members stay and nothing fails. What comes over the wire is
checked against the manifest, which came over the authenticated control plane.

    the trainer's store        header/POLICY → header, for each version held;  group/NAME → address of the group's store
    the newest group's store   got/BOOT → "UPDATE BUCKETS";  what gloo tells its ranks.  It ends with its group
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import structlog

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.buckets import HASHERS, Bucket, Header, Parcel, pack, unpack, verify
from bus.weights.groups import Broadcast, Group, Store, client_of, in_time
from schemas.messages import Manifest, Policy, WeightUpdate

log = structlog.get_logger("bus.weights")

POLL_SECONDS = 0.002
AHEAD = 2
"""Buckets on the wire at once."""


class RendezvousPublisher:
    """The trainer's end: holds a copy of the newest versions and broadcasts the one that an update names.

    Args:
        host: this machine's address that engines reach; the stores bind there, each on a free port.
        bucket_bytes: of one broadcast.
        keep: newest versions held.
        timeout: weights.timeout.
    """

    def __init__(self, host: str, bucket_bytes: int, keep: int, timeout: float) -> None:
        self._host, self._bucket_bytes, self._keep, self._timeout = host.strip("[]"), bucket_bytes, keep, timeout
        self._store: Store | None = None
        self._parcels: dict[Policy, tuple[Manifest, Parcel]] = {}
        self._sending: Policy | None = None
        self._lock = threading.Lock()
        """Training publishes and prunes while a thread sends."""
        self._group_store: Store | None = None
        self._group_name = ""
        """The newest group, for as long as there is no other; `_group` is None once it has been given up."""
        self._group: Group | None = None

    @property
    def address(self) -> str:
        """Of the store, where trainer and engines meet."""
        return self._open().address

    def publish(self, policy: Policy, weights: Weights) -> Manifest:
        """Copy a version into buckets; engines may ask for it from now on."""
        store = self._open()
        parcel = pack(weights, self._bucket_bytes)
        manifest = Manifest(
            policy=policy,
            channel="rendezvous",
            content=weights.content,
            uri=store.address,
            digest=parcel.header.digest,
            num_bytes=parcel.header.num_bytes,
        )
        store.server.set(_header_key(policy), parcel.header.encode())
        with self._lock:
            self._parcels[policy] = (manifest, parcel)
        return manifest

    def published(self) -> list[Manifest]:
        """The versions held, oldest first."""
        with self._lock:
            return [manifest for manifest, _ in self._parcels.values()]

    def prune(self, keep_version: int) -> None:
        """Let go of all but the newest `keep`, of none from `keep_version` on, and not of one that is being sent."""
        store = self._open()
        with self._lock:
            for policy in list(self._parcels)[: -self._keep]:
                if policy.version < keep_version and policy != self._sending:
                    del self._parcels[policy]
                    store.server.delete_key(_header_key(policy))

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
        parcel = self._hold(update.policy)
        try:
            self._broadcast(update, parcel, check)
            self._wait_for_all(update, len(parcel.bytes_of), check)
        except UpdateAbandonedError as error:
            raise UpdateAbandonedError(str(error), error.missed or self._behind(update)) from error
        finally:
            self._sending = None

    def _hold(self, policy: Policy) -> Parcel:
        with self._lock:
            held = self._parcels.get(policy)
            if held is None:
                raise UpdateAbandonedError(f"{policy} is not held any more")
            self._sending = policy
        return held[1]

    def _broadcast(self, update: WeightUpdate, parcel: Parcel, check: Callable[[], object]) -> None:
        under_way: deque[Broadcast] = deque()
        try:
            group = self._group_of(update, check)
            for flat in parcel.bytes_of:
                under_way.append(group.broadcast(flat, check))
                if len(under_way) == AHEAD:
                    under_way.popleft().wait()
            for broadcast in under_way:
                broadcast.wait()
        except BaseException:
            self._leave()  # later than this it is whole, and the next update may name it again
            raise

    def _open(self) -> "Store":
        """Open the store, with the first version: torch is slow to import, and the first beat should not wait."""
        if self._store is None:
            self._store = Store(self._host)
        return self._store

    def _group_of(self, update: WeightUpdate, check: Callable[[], object]) -> Group:
        """The group of the update: the one that there is, or a new one in a store of its own.

        Raises:
            UpdateAbandonedError: it has been given up here, or its members did not meet.
        """
        if self._group_name == update.group:
            if self._group is None:
                raise UpdateAbandonedError(f"group {update.group} has been given up")
            return self._group
        self._leave()
        address = self._announce(update.group)
        self._group = Group(
            update.group,
            lambda: client_of(address, self._timeout),
            0,
            update.num_ranks,
            self._host,
            check,
            self._timeout,
        )
        return self._group

    def _announce(self, group: str) -> str:
        """Open a store for a new group; who still waits in the one before is thrown out with it."""
        server = self._open().server
        server.delete_key(_group_key(self._group_name))
        self._group_store, self._group_name = Store(self._host), group
        server.set(_group_key(group), self._group_store.address)
        return self._group_store.address

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None

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
        """Buckets that each member has checked; −1 for one that has not come."""
        return {member.boot_id: _count(self._said(member.boot_id), update) for member in update.members}

    def _said(self, boot_id: str) -> bytes:
        if self._group_store is None or not self._group_store.server.check([_got_key(boot_id)]):
            return b""
        return bytes(self._group_store.server.get(_got_key(boot_id)))


class RendezvousReceiver:
    """An engine's end: enters the updates that name it.

    Args:
        boot_id: of the inference actor that owns the engine.
        host: this machine's address that the others reach.
        timeout: weights.timeout.
        local_rank: of this process among the engine's (tensor parallel workers each receive all).
    """

    def __init__(self, boot_id: str, host: str, timeout: float, local_rank: int = 0) -> None:
        self._boot_id, self._host, self._timeout, self._local_rank = boot_id, host.strip("[]"), timeout, local_rank
        self._clients: dict[str, Any] = {}
        self._group: Group | None = None
        self._hashers = ThreadPoolExecutor(HASHERS, "hasher")

    def header(self, manifest: Manifest, check: Callable[[], object]) -> Header:
        """What the version consists of, checked against the manifest.

        Raises:
            ValueError: it is not what the trainer published.
            UpdateAbandonedError: the trainer's store does not answer, or holds the version no more.
        """
        what = f"the trainer's store at {manifest.uri} does not answer"
        try:
            data = in_time(lambda: self._read_header(manifest), check, self._timeout, what)
        except BaseException:
            self._clients = {}  # a thread may still wait in it
            raise
        if data is None:
            raise UpdateAbandonedError(f"the trainer at {manifest.uri} holds {manifest.policy} no more")
        return Header.decode(data, manifest.digest)

    def buckets(
        self, manifest: Manifest, update: WeightUpdate, check: Callable[[], object]
    ) -> "Iterator[tuple[Bucket, dict[str, Any]]]":
        """Each bucket with its tensors, checked; the next ones are under way while the caller applies this one.

        Raises:
            ValueError: a bucket is not what the trainer published.
            UpdateAbandonedError: a peer is gone, or `check` has raised it; this end needs another group then.
        """
        return self._receive(self.header(manifest, check), manifest, update, check)

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """The whole version in a staging buffer: nothing is applied before all of it has been checked."""
        assert update is not None
        header = self.header(manifest, check)
        tensors: dict[str, Any] = {}
        for _, part in self._receive(header, manifest, update, check):
            tensors |= part
        return Weights(header.content, tensors, header.files)

    def _receive(
        self, header: Header, manifest: Manifest, update: WeightUpdate, check: Callable[[], object]
    ) -> "Iterator[tuple[Bucket, dict[str, Any]]]":
        try:
            group = self._group_of(manifest, update, check)
            for i, (bucket, flat) in enumerate(self._verified(header, group, check)):
                self._say_got(group, update, i + 1)
                yield bucket, unpack(bucket, flat)
        except BaseException:  # a caller that stops early among them
            self._leave()
            raise

    def _verified(self, header: Header, group: Group, check: Callable[[], object]) -> "Iterator[tuple[Bucket, Any]]":
        """Buckets in order: some are on the wire, some are being digested, which takes longer than a fast wire."""
        import torch

        begun = ((b, group.broadcast(torch.empty(b.num_bytes, dtype=torch.uint8), check)) for b in header.buckets)
        coming = deque(islice(begun, AHEAD))
        digesting: deque[tuple[Bucket, Any, Future[None]]] = deque()
        while coming or digesting:
            if coming and len(digesting) < HASHERS:
                bucket, broadcast = coming.popleft()
                flat = broadcast.wait()
                coming.extend(islice(begun, 1))
                digesting.append((bucket, flat, self._hashers.submit(verify, bucket, flat)))
            else:
                bucket, flat, verified = digesting.popleft()
                verified.result()
                yield bucket, flat

    def _group_of(self, manifest: Manifest, update: WeightUpdate, check: Callable[[], object]) -> Group:
        name = f"{manifest.uri} {update.group}"  # a trainer that has started anew has met nobody
        if self._group is None or self._group.name != name:
            self._leave()
            rank = update.first_rank(self._boot_id) + self._local_rank
            self._group = Group(
                name,
                lambda: self._come(manifest, update),
                rank,
                update.num_ranks,
                self._host,
                check,
                self._timeout,
            )
        return self._group

    def _come(self, manifest: Manifest, update: WeightUpdate) -> Any:
        """Find the group's store, and say there that this member has come."""
        found = client_of(manifest.uri, self._timeout).get(_group_key(update.group))
        store = client_of(found.decode(), self._timeout)
        if self._local_rank == 0:
            store.set(_got_key(self._boot_id), f"{update.update} 0")
        return store

    def _say_got(self, group: Group, update: WeightUpdate, num_buckets: int) -> None:
        if self._local_rank == 0:
            try:
                group.store.set(_got_key(self._boot_id), f"{update.update} {num_buckets}")
            except RuntimeError as error:
                raise UpdateAbandonedError(f"the trainer is gone: {error}") from error

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _read_header(self, manifest: Manifest) -> bytes | None:
        if manifest.uri not in self._clients:
            self._clients = {manifest.uri: client_of(manifest.uri, self._timeout)}
        store, key = self._clients[manifest.uri], _header_key(manifest.policy)
        return bytes(store.get(key)) if store.check([key]) else None


def _count(said: bytes, update: WeightUpdate) -> int:
    """Buckets of this update that a member says it has checked; anybody may have written it."""
    words = re.fullmatch(rb"(\S+) (\d{1,9})", said)
    return int(words[2]) if words and words[1] == update.update.encode() else -1


def _header_key(policy: Policy) -> str:
    return f"header/{policy}"


def _group_key(group: str) -> str:
    return f"group/{group}"


def _got_key(boot_id: str) -> str:
    return f"got/{boot_id}"
