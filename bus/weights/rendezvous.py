"""Weights by broadcast: trainer and engines meet through a TCPStore, and the buckets of a version go to all at once.

    packer    names an update: id, group, policy, members by boot id (P24)
    trainer   rank 0 of the group; broadcasts the buckets of the version that it holds a copy of
    engine    enters only updates that name it; checks each bucket before it is applied; says `got` in the store

A group (`groups.py`, gloo) is kept for as long as its members stay and nothing fails. What comes over the wire is
checked by the manifest's digest and key, which came over the control plane.

    the trainer's store        header/POLICY, codes/POLICY of each version held;  group/NAME → address of its store
    the newest group's store   got/BOOT → "UPDATE BUCKETS";  what gloo tells its ranks.  It ends with its group
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.buckets import Header, Parcel, codes_from, pack, staged, unpack, verify
from bus.weights.groups import Broadcast, Group, Store, Wait, client_of, in_time
from schemas.messages import Manifest, Policy, WeightUpdate

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
        self._spare: Sequence[Any] = ()
        """Buckets of the version pruned last."""
        self._given_up: set[Policy] = set()
        """Sent in vain: gloo may still read their buckets."""
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
        parcel, self._spare = pack(weights, self._bucket_bytes, self._spare), ()
        manifest = Manifest(
            policy=policy,
            channel="rendezvous",
            content=weights.content,
            uri=store.address,
            digest=parcel.header.digest,
            num_bytes=sum(parcel.header.sizes),
            key=parcel.key.hex(),
        )
        store.server.set(_codes_key(policy), b"".join(parcel.codes).hex())
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
                    _, parcel = self._parcels.pop(policy)
                    if policy not in self._given_up:
                        self._spare = parcel.bytes_of
                    self._given_up.discard(policy)
                    store.server.delete_key(_header_key(policy))
                    store.server.delete_key(_codes_key(policy))

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
        wait, parcel = Wait(check, self._timeout), self._hold(update.policy)
        try:
            self._broadcast(update, parcel, wait)
            self._wait_for_all(update, len(parcel.bytes_of), wait)
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

    def _broadcast(self, update: WeightUpdate, parcel: Parcel, wait: Wait) -> None:
        under_way: deque[Broadcast] = deque()
        try:
            group = self._group_of(update, wait)
            for flat in parcel.bytes_of:
                under_way.append(group.broadcast(flat, wait))
                if len(under_way) == AHEAD:
                    under_way.popleft().wait()
            for broadcast in under_way:
                broadcast.wait()
        except BaseException:
            self._given_up.add(update.policy)
            self._leave()  # later than this it is whole, and the next update may name it again
            raise

    def _open(self) -> "Store":
        """Open the store, with the first version: torch is slow to import, and the first beat should not wait."""
        if self._store is None:
            self._store = Store(self._host)
        return self._store

    def _group_of(self, update: WeightUpdate, wait: Wait) -> Group:
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
            update.group, lambda: client_of(address, self._timeout), 0, update.num_ranks, self._host, wait
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

    def _wait_for_all(self, update: WeightUpdate, num_buckets: int, wait: Wait) -> None:
        while any(count < num_buckets for count in self._counts(update).values()):
            wait.look("a member was not done")
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
    """

    def __init__(self, boot_id: str, host: str, timeout: float) -> None:
        self._boot_id, self._host, self._timeout = boot_id, host.strip("[]"), timeout
        self._clients: dict[str, Any] = {}
        self._group: Group | None = None
        self._staging: Sequence[Any] = ()
        """The buckets received last."""

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """The whole version, all of it checked; it lies in memory that the next call overwrites."""
        assert update is not None
        wait, key = Wait(check, self._timeout), bytes.fromhex(manifest.key)
        header, codes = self._header(manifest, wait)
        try:
            group = self._group_of(manifest, update, wait)
            self._staging = staged(header.sizes, self._staging)
            begun = (group.broadcast(flat, wait) for flat in self._staging)
            coming = deque(islice(begun, AHEAD))
            for number, code in enumerate(codes):
                flat = coming.popleft().wait()
                coming.extend(islice(begun, 1))
                verify(key, number, flat, code)
                self._say_got(group, update, number + 1)
        except BaseException:
            self._leave()
            self._staging = ()  # what was given up may still be written to
            raise
        tensors: dict[str, Any] = {}
        for bucket, flat in zip(header.buckets, self._staging, strict=True):
            tensors |= unpack(bucket, flat)
        return Weights(header.content, tensors, header.files)

    def _header(self, manifest: Manifest, wait: Wait) -> tuple[Header, list[bytes]]:
        """What the version consists of, checked against the manifest, and the code of each bucket."""
        what = f"the trainer's store at {manifest.uri} does not answer"
        try:
            found = in_time(lambda: self._read_header(manifest), wait, what)
        except BaseException:
            self._clients = {}  # a thread may still wait in it
            raise
        if found is None:
            raise UpdateAbandonedError(f"the trainer at {manifest.uri} holds {manifest.policy} no more")
        header = Header.decode(found[0], manifest.digest)
        return header, codes_from(found[1], len(header.buckets))

    def _group_of(self, manifest: Manifest, update: WeightUpdate, wait: Wait) -> Group:
        name = f"{manifest.uri} {update.group}"  # a trainer that has started anew has met nobody
        if self._group is None or self._group.name != name:
            self._leave()
            self._group = Group(
                name,
                lambda: self._come(manifest, update),
                update.first_rank(self._boot_id),
                update.num_ranks,
                self._host,
                wait,
            )
        return self._group

    def _come(self, manifest: Manifest, update: WeightUpdate) -> Any:
        """Find the group's store, and say there that this member has come."""
        found = client_of(manifest.uri, self._timeout).get(_group_key(update.group))
        store = client_of(found.decode(), self._timeout)
        store.set(_got_key(self._boot_id), f"{update.update} 0")
        return store

    def _say_got(self, group: Group, update: WeightUpdate, num_buckets: int) -> None:
        try:
            group.store.set(_got_key(self._boot_id), f"{update.update} {num_buckets}")
        except RuntimeError as error:
            raise UpdateAbandonedError(f"the trainer is gone: {error}") from error

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None

    def _read_header(self, manifest: Manifest) -> tuple[bytes, bytes] | None:
        if manifest.uri not in self._clients:
            self._clients = {manifest.uri: client_of(manifest.uri, self._timeout)}
        store, keys = self._clients[manifest.uri], [_header_key(manifest.policy), _codes_key(manifest.policy)]
        if not store.check(keys):
            return None
        header, codes = store.multi_get(keys)
        return bytes(header), bytes(codes)


def _count(said: bytes, update: WeightUpdate) -> int:
    """Buckets of this update that a member says it has checked; anybody may have written it."""
    words = re.fullmatch(rb"(\S+) (\d{1,9})", said)
    return int(words[2]) if words and words[1] == update.update.encode() else -1


def _header_key(policy: Policy) -> str:
    return f"header/{policy}"


def _codes_key(policy: Policy) -> str:
    return f"codes/{policy}"


def _group_key(group: str) -> str:
    return f"group/{group}"


def _got_key(boot_id: str) -> str:
    return f"got/{boot_id}"
