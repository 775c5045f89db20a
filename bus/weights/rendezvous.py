"""Weights by broadcast: trainer and engines meet through a TCPStore, and each bucket goes to all engines at once.

    packer    names an update: id, group, policy, members by boot id (P24: only named members enter an update)
    trainer   rank 0 of the group; broadcasts its copy of the version's buckets, and lends it to members without a rank
    engine    receives or copies the buckets, checks each, and writes the number of checked buckets into the store
              (`got`)

A member without a rank is in the same place as the trainer's copy (`bus.weights.memory`): on the same device of the
same machine. Two processes on one GPU can't be in one group of NCCL.

A group (`bus.weights.process_groups`) lasts until its members change or a transfer fails. Received bytes are checked by
the manifest's digest and key, which came over the control plane.

    the trainer's store        version/POLICY → codes and header of each version held; group/NAME → address of its store
    the newest group's store   got/BOOT_ID → "UPDATE NUM_BUCKETS", lent/UPDATE/BOOT_ID → handle of the buckets, and the
                               group's own keys; closed with the group
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.buckets import Header, PackedWeights, codes_from, unpack
from bus.weights.memory import HostMemory, Memory
from bus.weights.process_groups import Broadcast, ProcessGroup, Store, Wait, client_of, in_time
from schemas.messages import Manifest, PolicyVersion, WeightUpdate

ABSENT = "-"
"""Answer of a store that lacks a key; no value equals it."""
POLL_SECONDS = 0.002
"""Seconds between two looks at the members' counts in the store."""
AHEAD = 2
"""Buckets on the wire at once."""


class RendezvousPublisher:
    """The trainer's end: holds copies of the newest versions, and broadcasts the version of each update.

    Args:
        host: address of this machine that engines reach.
        bucket_bytes: most bytes of a broadcast; a larger tensor fills a bucket alone.
        keep: number of the newest versions held.
        timeout: `weights.timeout`, seconds without progress until an update is given up.
        listen: address on which the stores listen, each on a free port; may be a wildcard. Empty: `host`.
        memory: memory of the copies.
    """

    def __init__(
        self, host: str, bucket_bytes: int, keep: int, timeout: float, listen: str = "", memory: Memory | None = None
    ) -> None:
        self._memory = memory or HostMemory()
        self._host, self._bucket_bytes, self._keep, self._timeout = host.strip("[]"), bucket_bytes, keep, timeout
        self._listen = listen.strip("[]") or self._host
        self._store: Store | None = None
        self._packed: dict[PolicyVersion, tuple[Manifest, PackedWeights]] = {}
        self._spare: Sequence[Any] = ()
        """Buckets of the version pruned last; the next version reuses their memory."""
        self._given_up: set[PolicyVersion] = set()
        """Versions whose broadcast was given up: gloo may still read their buckets."""
        self._sending: PolicyVersion | None = None
        """Version being broadcast."""
        self._lock = threading.Lock()
        """Guards `_packed` and `_sending`: training publishes and prunes while another thread sends."""
        self._process_group_store: Store | None = None
        self._process_group_name = ""
        """Name of the newest group. `_process_group` is None if this group was given up."""
        self._lent: list[str] = []
        """Keys of the handles of the update under way, in the newest group's store."""
        self._process_group: ProcessGroup | None = None

    @property
    def address(self) -> str:
        """Address of the trainer's store, `tcp://HOST:PORT`."""
        return self._open().address

    @property
    def process_group(self) -> ProcessGroup | None:
        """Newest group; None before the first one, and after it was given up."""
        return self._process_group

    @property
    def num_keys(self) -> tuple[int, int]:
        """Numbers of keys in the trainer's store and in the newest group's store."""
        group_store = self._process_group_store
        return self._open().server.num_keys(), group_store.server.num_keys() if group_store else 0

    def buckets(self, policy: PolicyVersion) -> Sequence[Any]:
        """Return the buckets of a version held: flat byte tensors, which broadcasts read."""
        return self._packed[policy][1].bytes_of

    def publish(self, policy: PolicyVersion, weights: Weights) -> Manifest:
        """Copy a version into buckets and return its manifest. Engines can ask for the version from now on."""
        store = self._open()
        packed, self._spare = self._memory.pack(weights, self._bucket_bytes, self._spare), ()
        manifest = Manifest(
            policy=policy,
            channel=self._memory.channel,
            content=weights.content,
            uri=store.address,
            digest=packed.header.digest,
            num_bytes=sum(packed.header.sizes),
            key=packed.key.hex(),
            place=self._memory.place,
        )
        # one value, codes first: each key that an engine reads costs another round trip
        store.server.set(_version_key(policy), b"".join(packed.codes).hex().encode() + packed.header.encode())
        with self._lock:
            self._packed[policy] = (manifest, packed)
        return manifest

    def published(self) -> list[Manifest]:
        """Return the manifests of the versions held, oldest first."""
        with self._lock:
            return [manifest for manifest, _ in self._packed.values()]

    def prune(self, keep_version: int) -> None:
        """Remove all versions but the newest `keep`. Versions from `keep_version` on, or being sent, stay."""
        store = self._open()
        with self._lock:
            for policy in list(self._packed)[: -self._keep]:
                if policy.version < keep_version and policy != self._sending:
                    _, packed = self._packed.pop(policy)
                    # gloo may still read a given-up version: not to be overwritten. NCCL's broadcasts are aborted, and
                    # memory of a GPU that was lent may never be freed if a borrower has died
                    if policy not in self._given_up or packed.is_on_gpu:
                        self._spare = packed.bytes_of
                    self._given_up.discard(policy)
                    store.server.delete_key(_version_key(policy))

    def close(self) -> None:
        """Remove all versions."""
        with self._lock:
            self._packed.clear()

    def leave(self) -> None:
        """Do nothing: the versions are in this process's memory, and keep no successor from publishing."""

    def send(self, update: WeightUpdate, check: Callable[[], object]) -> None:
        """Broadcast the version of an update. Return when every member has checked all buckets.

        Args:
            update: the version, its group and members.
            check: called again and again while waiting; raises UpdateAbandonedError to give up.

        Raises:
            UpdateAbandonedError: `check` raised it, a member is gone or too late, or the version was removed. After a
                failed broadcast, the next update must name another group.
        """
        wait = Wait(check, self._timeout)
        # under one lock: `prune` must not remove the version between the look and the note that it is being sent
        with self._lock:
            held = self._packed.get(update.policy)
            if held is None:
                raise UpdateAbandonedError(f"the trainer no longer holds {update.policy}")
            self._sending = update.policy
        packed = held[1]
        try:
            self._broadcast(update, packed, wait)
            while any(count < len(packed.bytes_of) for count in self._counts(update).values()):
                wait.look("a member did not finish")
                time.sleep(POLL_SECONDS)
        except UpdateAbandonedError as error:
            missed = error.missed
            if not missed:
                # members with fewer checked buckets than another: the others have waited for these
                counts = self._counts(update)
                missed = [boot_id for boot_id, count in counts.items() if count < max(counts.values())]
            raise UpdateAbandonedError(str(error), missed) from error
        finally:
            for name in self._lent:
                assert self._process_group_store is not None
                self._process_group_store.server.delete_key(name)
            self._lent = []
            self._sending = None  # the version may be pruned from here on

    def _lend(self, update: WeightUpdate, packed: PackedWeights) -> None:
        """Tell each member without a rank how to map the buckets."""
        assert self._process_group_store is not None
        for member in update.members:
            if not member.num_ranks:
                self._lent.append(_lent_key(update, member.boot_id))
                self._process_group_store.server.set(self._lent[-1], self._memory.lend(packed.bytes_of, packed.key))

    def _broadcast(self, update: WeightUpdate, packed: PackedWeights, wait: Wait) -> None:
        under_way: deque[Broadcast] = deque()
        try:
            process_group = self.process_group_of(update, wait)
            self._lend(update, packed)
            # at most AHEAD at once: more would only share the wire
            for flat in packed.bytes_of if update.num_ranks > 1 else ():
                under_way.append(process_group.broadcast(flat, wait))
                if len(under_way) == AHEAD:
                    under_way.popleft().wait()
            for broadcast in under_way:
                broadcast.wait()
        except BaseException:
            # the group is broken by a broadcast under way; a failure after this method, while `send` waits for the
            # members' counts, leaves the group whole, and the next update may name it again
            self._given_up.add(update.policy)
            self._leave()
            raise

    def _open(self) -> "Store":
        """Return the store. The first call opens it, not `__init__`: importing torch delays the first heartbeat."""
        if self._store is None:
            self._store = Store(self._host, self._listen)
        return self._store

    def process_group_of(self, update: WeightUpdate, wait: Wait) -> ProcessGroup:
        """Return the group of an update: the current group if the names agree, else a new group in a new store.

        Raises:
            UpdateAbandonedError: the group has been given up here, or its members did not meet.
        """
        if self._process_group_name == update.process_group:
            if self._process_group is None:
                raise UpdateAbandonedError(f"group {update.process_group} has been given up")
            return self._process_group
        self._leave()
        server = self._open().server
        server.delete_key(_process_group_key(self._process_group_name))
        # a store of its own for each group: closing the old store ends all waits of members in it
        self._process_group_store, self._process_group_name = Store(self._host, self._listen), update.process_group
        address = self._process_group_store.address
        server.set(_process_group_key(update.process_group), address)
        self._process_group = ProcessGroup(
            update.process_group,
            lambda: client_of(address, self._timeout),
            0,
            update.num_ranks,
            self._host,
            wait,
            self._memory.device,
        )
        return self._process_group

    def _leave(self) -> None:
        if self._process_group is not None:
            self._process_group.leave()
        self._process_group = None

    def _counts(self, update: WeightUpdate) -> dict[str, int]:
        """Return each member's number of checked buckets, by boot id; −1: the member has not come."""
        store, counts = self._process_group_store, {member.boot_id: -1 for member in update.members}
        for boot_id in counts:
            key = _got_key(boot_id)
            # asked first: `get` of a missing key would wait for the store's timeout
            if store is not None and store.server.check([key]):
                counts[boot_id] = _count(bytes(store.server.get(key)), update)
        return counts


class RendezvousReceiver:
    """An engine's end: enters the updates that name its actor, and receives the buckets.

    Args:
        boot_id: boot id of the engine's inference actor.
        host: address of this machine that the other members reach.
        timeout: `weights.timeout`, seconds without progress until an update is given up.
        memory: memory of what is received.
    """

    def __init__(self, boot_id: str, host: str, timeout: float, memory: Memory | None = None) -> None:
        self._boot_id, self._host, self._timeout = boot_id, host.strip("[]"), timeout
        self._memory = memory or HostMemory()
        self._maps = True
        """False after a failure to map the trainer's memory: the engine then asks for a rank in the group."""
        self._clients: dict[str, Any] = {}
        """Client of the trainer's store, by its address."""
        self._process_group: ProcessGroup | None = None
        self._staging: Sequence[Any] = ()
        self.progress = 0
        """Number of steps done since the start: the header read, the group met, each bucket received."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """Newest group; None before the first one, and after a failure."""
        return self._process_group

    @property
    def place(self) -> str:
        """Place of what is received (`bus.weights.memory`); empty once the trainer's memory could not be mapped."""
        return self._memory.place if self._maps else ""

    @property
    def staging(self) -> Sequence[Any]:
        """Buckets received last; the next version reuses their memory."""
        return self._staging

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """Receive all buckets of a version, check each, and return its weights.

        The next call overwrites the memory of the tensors. Arguments and errors: `bus.weights.WeightReceiver`.
        """
        assert update is not None  # this channel always comes with an update
        theirs, ours = (place.partition(":")[0] for place in (manifest.place, self._memory.place))
        if theirs != ours:
            raise ValueError(
                f"the trainer's weights are on {theirs}, the engine is on {ours}; set weights.channel: rendezvous"
            )

        def note_progress() -> None:
            self.progress += 1

        wait, key = Wait(check, self._timeout, note_progress), bytes.fromhex(manifest.key)
        if self._process_group is None or self._process_group.name != _name_in(manifest, update):
            # after a failure the old connection may lead nowhere, which only a timeout of the kernel would tell
            self._clients = {}
        header, codes = self.header(manifest, wait)
        try:
            process_group = self._process_group_of(manifest, update, wait)
            self._staging = self._memory.staged(header.sizes, self._staging)
            arriving = self._arriving(process_group, update, key, wait)
            for number, (flat, code) in enumerate(zip(arriving, codes, strict=True)):
                self._memory.verify(key, number, flat, code)
                try:
                    process_group.store.set(_got_key(self._boot_id), f"{update.update} {number + 1}")
                except RuntimeError as error:
                    raise UpdateAbandonedError(f"the trainer is gone: {error}") from error
        except BaseException:
            self._leave()
            # a thread that was left behind may still use the client
            self._clients = {}
            # gloo may still write into the memory of a broadcast that was given up
            if self._memory.device.type == "cpu":
                self._staging = ()
            raise
        tensors: dict[str, Any] = {}
        for bucket, flat in zip(header.buckets, self._staging, strict=True):
            tensors |= unpack(bucket, flat)
        return Weights(header.content, tensors, header.files, share=self._memory.share(header, self._staging))

    def _arriving(self, process_group: ProcessGroup, update: WeightUpdate, key: bytes, wait: Wait) -> Iterator[Any]:
        """Yield the buckets as they arrive; the next ones travel while one is checked."""
        if not update.has_rank(self._boot_id):
            lent_key = _lent_key(update, self._boot_id)
            lent = in_time(lambda: process_group.store.get(lent_key), wait, "the trainer lent no weights")
            try:
                self._memory.borrow(bytes(lent), key, self._staging)
            except (FileNotFoundError, ProcessLookupError) as error:
                raise UpdateAbandonedError(f"the trainer has taken its weights back: {error}") from error
            except OSError as error:
                # two processes on one GPU are never in a group of NCCL
                self._maps = self._memory.device.type == "cuda"
                raise OSError(
                    f"the trainer's memory can't be mapped ({error}); do trainer and engine run as one user?"
                ) from error
            wait.renew()
            yield from self._staging
            return
        # a generator: each broadcast starts when it is taken, so that no more than AHEAD share the wire
        begun = (process_group.broadcast(flat, wait) for flat in self._staging)
        coming = deque(islice(begun, AHEAD))
        while coming:
            flat = coming.popleft().wait()
            coming.extend(islice(begun, 1))
            yield flat

    def header(self, manifest: Manifest, wait: Wait) -> tuple[Header, list[bytes]]:
        """Return the version's header, checked against the manifest, and the code of each bucket.

        Raises:
            ValueError: the header differs from the manifest's digest, or the codes are malformed.
            UpdateAbandonedError: the trainer's store does not answer, or no longer holds the version.
        """
        what = f"the trainer's store at {manifest.uri} does not answer"
        try:
            found = in_time(lambda: self.read_header(manifest), wait, what)
        except BaseException:
            # the thread that was left behind may still use the client
            self._clients = {}
            raise
        if found is None:
            raise UpdateAbandonedError(f"the trainer at {manifest.uri} no longer holds {manifest.policy}")
        header = Header.decode(found[0], manifest.digest)
        return header, codes_from(found[1], len(header.buckets))

    def _process_group_of(self, manifest: Manifest, update: WeightUpdate, wait: Wait) -> ProcessGroup:
        name = _name_in(manifest, update)
        if self._process_group is None or self._process_group.name != name:
            self._leave()
            meeting_place = self._clients[manifest.uri]

            def come() -> Any:
                """Return a client of the group's store, after noting there that this member has come."""
                found = meeting_place.get(_process_group_key(update.process_group))
                store = client_of(found.decode(), self._timeout)
                store.set(_got_key(self._boot_id), f"{update.update} 0")
                return store

            self._process_group = ProcessGroup(
                name,
                come,
                *((update.first_rank(self._boot_id), update.num_ranks) if update.has_rank(self._boot_id) else (0, 1)),
                self._host,
                wait,
                self._memory.device,
            )
        return self._process_group

    def _leave(self) -> None:
        if self._process_group is not None:
            self._process_group.leave()
        self._process_group = None

    def read_header(self, manifest: Manifest) -> tuple[bytes, bytes] | None:
        """Return a version's header and codes from the trainer's store, not checked yet; None: not held there.

        Costs one round trip: `get` asks twice, and would wait for a key that is not there.
        """
        if manifest.uri not in self._clients:
            self._clients = {manifest.uri: client_of(manifest.uri, self._timeout)}
        # exchanges nothing: a missing key is set only where the expected value is empty
        found = bytes(self._clients[manifest.uri].compare_set(_version_key(manifest.policy), ABSENT, ABSENT))
        if found == ABSENT.encode():
            return None
        codes, start, rest = found.partition(b"{")  # the first byte of a header
        return start + rest, codes


def _count(said: bytes, update: WeightUpdate) -> int:
    """Return a member's own count of checked buckets in this update; −1: nothing is noted.

    The store is not authenticated, so the word is parsed strictly.
    """
    words = re.fullmatch(rb"(\S+) (\d{1,9})", said)
    return int(words[2]) if words and words[1] == update.update.encode() else -1


def _name_in(manifest: Manifest, update: WeightUpdate) -> str:
    """Return the name of an update's group, with the store's address: a restarted trainer is in no group yet."""
    return f"{manifest.uri} {update.process_group}"


def _version_key(policy: PolicyVersion) -> str:
    return f"version/{policy}"


def _process_group_key(process_group: str) -> str:
    return f"group/{process_group}"


def _lent_key(update: WeightUpdate, boot_id: str) -> str:
    return f"lent/{update.update}/{boot_id}"


def _got_key(boot_id: str) -> str:
    return f"got/{boot_id}"
