"""The ledger on disk: SQLite in WAL mode, written by the packer alone (P2, P18).

`:memory:` is the double for tests. `sync: process` writes without fsync: the operating system has every committed page,
so kill -9 loses nothing and only a power loss may. `sync: node` adds the fsync.
"""

import fcntl
import json
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgpack
import structlog

from actors.algorithms.pools import NORMAL
from actors.ledger.folded import Folded
from actors.ledger.rows import Attempt, Changes, ExampleRef, Group, GroupState, Step
from schemas.errors import ConfigError, ProtocolError, RunFailedError
from schemas.messages import DroppedOrdinal, Policy

log = structlog.get_logger("ledger")

COMMIT_RETRY_SECONDS = 1.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY, environment TEXT NOT NULL, example INTEGER NOT NULL, example_key TEXT NOT NULL, seed
    INTEGER NOT NULL, num_completions INTEGER NOT NULL, min_version INTEGER NOT NULL, lineage INTEGER, version INTEGER,
    state TEXT NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL, failures INTEGER NOT NULL,
    deaths INTEGER NOT NULL, holder TEXT, oldest_version INTEGER, arrival INTEGER, step INTEGER, reason TEXT,
    origin INTEGER, resamples INTEGER NOT NULL DEFAULT 0, position INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS payloads (ordinal INTEGER PRIMARY KEY, digest TEXT NOT NULL, frames BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pools (key TEXT PRIMARY KEY, pool TEXT NOT NULL) WITHOUT ROWID;
"""
LATER_COLUMNS = ("resamples", "position")
"""Of groups, which ledgers of before do not have."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "wekafs"}
    | {"fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"}
)


class LedgerReader:
    """What a ledger's file holds. A packer may be writing to it."""

    def __init__(self, database: sqlite3.Connection, path: Path | str) -> None:
        self._db, self.path = database, path

    @classmethod
    def of(cls, path: Path) -> "LedgerReader":
        """Of a file that is not written to.

        Raises:
            ConfigError: there is none.
        """
        try:
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            database.execute("SELECT 1 FROM meta").fetchone()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"ledger.path: {path} can't be read: {error}") from error
        return cls(database, path)

    def value(self, key: str) -> Any:
        """A stored value, None where there is none."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def values(self) -> dict[str, Any]:
        """All stored values."""
        return {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def groups(self) -> list[Group]:
        """All rows."""
        return [_group_of(row) for row in self._db.execute("SELECT * FROM groups ORDER BY ordinal")]

    def steps(self) -> list[Step]:
        """All composed steps in order."""
        return [_step_of(record) for (record,) in self._db.execute("SELECT record FROM steps ORDER BY step")]

    def digests(self) -> dict[int, str]:
        """Payload digests by ordinal."""
        return dict(self._db.execute("SELECT ordinal, digest FROM payloads"))

    def payloads(self, ordinals: Iterable[int]) -> list[list[bytes]]:
        """The stored frames of groups, in the order asked for.

        Raises:
            ProtocolError: one is missing.
        """
        found = []
        for ordinal in ordinals:
            row = self._db.execute("SELECT frames FROM payloads WHERE ordinal = ?", (ordinal,)).fetchone()
            if row is None:
                raise ProtocolError(f"the ledger {self.path} has no payload of ordinal {ordinal}")
            found.append(msgpack.unpackb(row[0]))
        return found

    def pools(self) -> dict[str, str]:
        """Pool by key of the examples that are set aside."""
        return dict(self._db.execute("SELECT key, pool FROM pools"))

    def counts(self) -> dict[tuple[str, str, str | None], int]:
        """Ordinals by (purpose, state, reason): rows counted by the database, and what has been folded."""
        query = """
            SELECT CASE WHEN ordinal < 0 THEN 'eval' ELSE 'train' END, state, reason, COUNT(*)
            FROM groups GROUP BY 1, 2, 3
        """
        counts = Counter(Folded.of(self.value("folded")).counts())
        counts.update({(purpose, state, reason): count for purpose, state, reason, count in self._db.execute(query)})
        return dict(counts)

    def trained_twice(self) -> int:
        """Ordinals that stand in more than one composed step; counted from the step records, not from the rows."""
        folded = Folded.of(self.value("folded"))
        times = Counter(ordinal for step in self.steps() for ordinal in step.ordinals)
        return folded.trained_twice + sum(count > 1 or ordinal in folded.finished for ordinal, count in times.items())

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class Store(LedgerReader):
    """One ledger file, held exclusively.

    Args:
        path: the file, or ":memory:".
        sync: "process" or "node".
        patience: seconds to wait for a packer that is just going.
        timeout: seconds for which what can't be written is tried again.

    Raises:
        ConfigError: another packer holds it, it lies on a network file system, or it is damaged.
        RunFailedError: it can't be written, within `timeout` (a full disk).
    """

    def __init__(
        self,
        path: Path | str,
        sync: Literal["process", "node"] = "process",
        patience: float = 0.0,
        timeout: float = 0.0,
    ) -> None:
        self._timeout = timeout
        self._lock_file = None
        if path != ":memory:":
            self._lock_file = self._take(Path(path), patience)
        super().__init__(sqlite3.connect(str(path), isolation_level=None, check_same_thread=False, timeout=5.0), path)
        try:
            self._patiently(lambda: self._open(sync))
        except sqlite3.DatabaseError as error:
            self.close()
            raise ConfigError(
                f"ledger.path: {path} can't be used: {error}. If the file is damaged, put a backup in its place, or "
                "begin a new run: another output_dir, with model.path at this run's newest checkpoint"
            ) from error

    def _open(self, sync: str) -> None:
        # a payload of some kilobytes lies in one page, not in a chain of them; costs a small commit next to nothing
        self._db.execute("PRAGMA page_size=8192")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if sync == 'node' else 'OFF'}")
        self._db.executescript(SCHEMA)
        there = {name for (_, name, *_) in self._db.execute("PRAGMA table_info(groups)")}
        for column in (column for column in LATER_COLUMNS if column not in there):
            self._db.execute(f"ALTER TABLE groups ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found.replace("\n", " "))
        self.run = self.value("run")
        if self.run is None:
            self.run = uuid.uuid4().hex[:16]
        self.term = (self.value("term") or 0) + 1
        self.commit(Changes(values={"run": self.run, "term": self.term}), {})

    def _take(self, path: Path, patience: float) -> IO[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_file_system(path, mounts())
        lock = path.with_name(path.name + ".lock").open("w")
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError:
                if time.monotonic() >= deadline:
                    lock.close()
                    raise ConfigError(
                        f"ledger.path: another packer holds {path}; a ledger has one packer at a time"
                    ) from None
                time.sleep(0.05)

    def commit(self, changes: Changes, payloads: Mapping[int, tuple[str, list[bytes]]]) -> None:
        """Write one round, whole or not at all. `payloads` are (digest, frames) of the groups settled in it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            gone = [(ordinal,) for ordinal in changes.gone_groups]
            self._db.executemany("DELETE FROM groups WHERE ordinal = ?", gone)
            self._db.executemany("DELETE FROM payloads WHERE ordinal = ?", gone)
            self._db.executemany("DELETE FROM steps WHERE step = ?", [(step,) for step in changes.gone_steps])
            self._db.executemany(
                "INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                [_group_row(group) for group in changes.groups.values()],
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO payloads VALUES (?,?,?)",
                [(ordinal, digest, msgpack.packb(frames)) for ordinal, (digest, frames) in payloads.items()],
            )
            self._db.executemany("INSERT INTO steps VALUES (?,?)", [(s.step, _step_record(s)) for s in changes.steps])
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?,?)",
                [(key, json.dumps(value)) for key, value in changes.values.items()],
            )
            normal = [(key,) for key, pool in changes.pools.items() if pool == NORMAL]
            self._db.executemany("DELETE FROM pools WHERE key = ?", normal)
            aside = [(key, pool) for key, pool in changes.pools.items() if pool != NORMAL]
            self._db.executemany("INSERT OR REPLACE INTO pools VALUES (?,?)", aside)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.rollback()
            raise

    def commit_patiently(self, changes: Changes, payloads: Mapping[int, tuple[str, list[bytes]]]) -> None:
        """Commit, again and again while the disk is full or the file locked by somebody else.

        Raises:
            RunFailedError: not within the timeout; nothing of this round has been written or said.
        """
        self._patiently(lambda: self.commit(changes, payloads))

    def _patiently(self, write: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return write()
            except sqlite3.OperationalError as error:
                if time.monotonic() >= deadline:
                    raise RunFailedError(
                        f"the ledger {self.path} can't be written, tried for {self._timeout:g} s "
                        f"(ledger.commit_timeout): {error}. Free space or let the file go, and start the same command "
                        "again: nothing is lost"
                    ) from error
                log.error("ledger not written; trying again", path=str(self.path), detail=str(error))
                time.sleep(COMMIT_RETRY_SECONDS)

    def close(self) -> None:
        """Close the file and let the lock go."""
        super().close()
        if self._lock_file is not None:
            self._lock_file.close()


def check_file_system(path: Path, mounts: str) -> None:
    """Refuse a ledger on a network file system.

    Raises:
        ConfigError: names the file system.
    """
    kind = file_system_of(path.parent, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(f"ledger.path: {path} is on {kind}, where SQLite's WAL does not work; choose a local disk")


def mounts() -> str:
    """What is mounted on this machine, as /proc/mounts lists it; empty where there is no such file."""
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8")
    except OSError:
        return ""


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of the file system that a folder is on; empty where that is not known.

    Of all mount points above it the longest holds it, and of several mounts at one point the last.
    """
    resolved, longest, found = str(folder.resolve()), 0, ""
    for line in mounts.splitlines():
        point, kind = line.split()[1:3]
        point = point.replace("\\040", " ").rstrip("/")
        if len(point) >= longest and f"{resolved}/".startswith(f"{point}/"):
            longest, found = len(point), kind
    return found


def _group_row(g: Group) -> tuple[Any, ...]:
    example, policy = g.example, g.policy
    return (
        *(g.ordinal, example.environment, example.index, example.key, g.seed, g.num_completions, g.min_version),
        *((None, None) if policy is None else (policy.lineage, policy.version)),
        *(str(g.state), g.attempt, str(g.outcome), g.failures, g.deaths, g.holder),
        *(g.oldest_version, g.arrival, g.step, g.reason, g.origin, g.resamples, g.position),
    )


def _group_of(row: tuple[Any, ...]) -> Group:
    ordinal, environment, index, key, seed, size, min_version, lineage, version, state, attempt, outcome, *rest = row
    example = ExampleRef(environment, index, key)
    policy = None if lineage is None else Policy(lineage=lineage, version=version)
    asked = (ordinal, example, seed, size, min_version, policy)
    return Group(*asked, GroupState(state), attempt, Attempt(outcome), *rest)


def _step_record(step: Step) -> str:
    dropped = [dropped.model_dump() for dropped in step.dropped]
    return json.dumps(step.__dict__ | {"dropped": dropped})  # asdict would copy every digest


def _step_of(text: str) -> Step:
    record = json.loads(text)
    dropped = tuple(DroppedOrdinal(**d) for d in record["dropped"])
    return Step(record["step"], tuple(record["ordinals"]), dropped, tuple(record["digests"]), record["chain"])
