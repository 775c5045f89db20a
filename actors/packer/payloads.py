"""Scored groups in memory: a cache of the ledger's payloads, by ordinal."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.ledger import LedgerReader, Machine, Store
from actors.ledger.stored_groups import stored_group
from bus import codec
from schemas.messages import ScoredGroup


class Payloads:
    """Groups of the steps to come, and of evaluations under way.

    Args:
        store: ledger with the payloads of all groups that are not trained yet.
        memory_bytes: bytes of groups to keep (`packer.memory_bytes`); further ones are read from the ledger when they
            are needed.
    """

    def __init__(self, store: Store, memory_bytes: int) -> None:
        self._store, self._memory_bytes = store, memory_bytes
        self._by_ordinal: dict[int, tuple[ScoredGroup, int]] = {}
        """Groups, and their bytes on the wire."""
        self.num_bytes = 0
        """Bytes of all groups in memory."""

    def __len__(self) -> int:
        return len(self._by_ordinal)

    def add(self, group: ScoredGroup, num_bytes: int) -> None:
        """Keep a group whose payload the next commit stores."""
        self._drop(group.ordinal)
        self._by_ordinal[group.ordinal] = group, num_bytes
        self.num_bytes += num_bytes

    def load(self, ordinal: int) -> ScoredGroup:
        """Return a settled group, from the ledger if it is not in memory.

        Raises:
            ProtocolError: the ledger's payload is of another kind.
        """
        if ordinal not in self._by_ordinal:
            frames = self._store.payloads([ordinal])[0]
            self.add(stored_group(frames), codec.num_bytes(frames))
        return self._by_ordinal[ordinal][0]

    def num_bytes_of(self, ordinals: Sequence[int]) -> int:
        """Return the bytes of settled groups on the wire."""
        kept = [self._by_ordinal[ordinal][1] for ordinal in ordinals if ordinal in self._by_ordinal]
        return sum(kept) + self._store.payload_bytes(o for o in ordinals if o not in self._by_ordinal)

    def loader(self, ordinals: Sequence[int]) -> Callable[[], list[ScoredGroup]]:
        """Return a function for another thread that returns settled groups, read from the ledger's file as needed.

        The function raises sqlite3.Error, ConfigError or ProtocolError if the ledger's file can't be read.
        """
        kept = {ordinal: self._by_ordinal[ordinal][0] for ordinal in ordinals if ordinal in self._by_ordinal}
        # a connection of SQLite belongs to its thread, and a ledger in memory to its connection
        if self._store.path == ":memory:":
            kept = {ordinal: self.load(ordinal) for ordinal in ordinals}
        path, absent = Path(self._store.path), [ordinal for ordinal in ordinals if ordinal not in kept]

        def groups() -> list[ScoredGroup]:
            if absent:
                reader = LedgerReader.of(path)
                with contextlib.closing(reader.database):
                    found = [stored_group(reader.payloads([ordinal])[0]) for ordinal in absent]
                kept.update(zip(absent, found, strict=True))
            return [kept[ordinal] for ordinal in ordinals]

        return groups

    def forget(self, machine: Machine, at_least: int) -> None:
        """Drop groups that are not needed any more, or not soon. Call after a commit: what is dropped is in the ledger.

        Trained groups and those of evaluations go once there are more than `at_least` groups. If there are more bytes
        than `memory_bytes`, the groups of the latest steps go too.
        """
        # a scan in every round would cost more than the memory is worth
        if len(self._by_ordinal) <= at_least and self.num_bytes <= self._memory_bytes:
            return
        for ordinal in list(self._by_ordinal):
            row = machine.groups.rows.get(ordinal)
            # ordinals below 0 are those of evaluations
            if ordinal < 0 or row is None or (row.step or machine.trained_step + 1) <= machine.trained_step:
                self._drop(ordinal)
        for ordinal in sorted(self._by_ordinal, reverse=True):
            if self.num_bytes <= self._memory_bytes:
                break
            self._drop(ordinal)

    def _drop(self, ordinal: int) -> None:
        _, num_bytes = self._by_ordinal.pop(ordinal, (None, 0))
        self.num_bytes -= num_bytes
