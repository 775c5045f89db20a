"""Ledger on disk: SQLite in WAL mode, written by the packer alone (P2: exclusive lock; P18: commit before sending).

Path `:memory:` is the in-memory double for tests. `sync: process` flushes only at WAL checkpoints
(`synchronous=NORMAL`): kill -9 loses nothing; a crash of the operating system may lose the newest commits but never
damages the file. `sync: node` adds an fsync to each commit.

Compaction deletes payloads in slices, one with each commit, so a compaction of gigabytes delays no round. The table
`unswept` holds the ordinals with payloads still to delete, so a restart continues the work.
"""

import contextlib
import fcntl
import hashlib
import json
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgpack
import structlog

from actors.algorithms.difficulty_pools import NORMAL
from actors.ledger import payload_files
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.payload_files import PayloadFiles, Place
from actors.ledger.rows import AttemptOutcome, Changes, ExampleRef, Group, GroupState, Step
from actors.process.ledger_file import foreign_tables, problem_of, says_foreign
from schemas.errors import ConfigError, ProtocolError, RunFailedError
from schemas.messages import DroppedOrdinal, PolicyVersion

log = structlog.get_logger("ledger")

COMMIT_RETRY_SECONDS = 1.0
"""Seconds between two tries of a commit."""
TELL_SECONDS = 10.0
"""Seconds between two log lines about a failing commit."""
SLICE_BYTES, SLICE_ROWS = 16 << 20, 256
"""Greatest number of payload bytes and rows deleted with a commit. There is a commit at least per arriving group, so
deleting keeps up."""
WAL_BYTES = 64 << 20
"""Bytes to which the WAL file is cut back after a checkpoint; a commit of large groups may need more for a while."""
WHOLE_CHECK_BYTES = 256 << 20
"""Bytes of the largest file that is checked whole at the start. Larger files: only the tables read at the start."""
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
CREATE TABLE IF NOT EXISTS places (
    ordinal INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, lengths TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pools (key TEXT PRIMARY KEY, pool TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unswept (ordinal INTEGER PRIMARY KEY);
"""
SMALL_TABLES = ("meta", "groups", "steps", "pools", "unswept", "places")
"""All tables except the payloads."""
IN_A_FILE = b""
"""`frames` of a payload in a file; the table `places` then has its place."""
Payload = tuple[str, Sequence[bytes | memoryview]]
"""Digest and frames of a settled group."""
LATER_COLUMNS = ("resamples", "position")
"""Columns of `groups` that older ledgers lack; added at the start."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "virtiofs"}
    | {"fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs"}
    | {"fuse.rclone", "fuse.s3fs", "fuse.sshfs", "rclone", "wekafs"}
)
"""Types of file systems in /proc/mounts. `mount -t rclone` shows as `fuse.rclone`, as `rclone` on older kernels."""


class LedgerReader:
    """Reader of a ledger file; a packer may write to the file at the same time."""

    def __init__(self, database: sqlite3.Connection, path: Path | str) -> None:
        self.database, self.path = database, path
        """Connection to the file, and the file's path."""

    @classmethod
    def of(cls, path: Path) -> "LedgerReader":
        """Open a ledger file read-only.

        Raises:
            ConfigError: there is no ledger at the path, or the file can't be read.
        """
        try:
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            # connect alone reads nothing; the query fails if the file is no ledger
            database.execute("SELECT 1 FROM meta").fetchone()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"ledger.path: {path} can't be read: {error}") from error
        return cls(database, path)

    def value(self, key: str) -> Any:
        """Return a stored value; None if the key is absent."""
        row = self.database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def values(self) -> dict[str, Any]:
        """Return all stored values by key."""
        return {key: json.loads(value) for key, value in self.database.execute("SELECT key, value FROM meta")}

    def groups(self) -> list[Group]:
        """Return all rows, by ascending ordinal."""
        return [_group_of(row) for row in self.database.execute("SELECT * FROM groups ORDER BY ordinal")]

    def group(self, ordinal: int) -> Group | None:
        """Return a row; None if there is none, or if it is compacted."""
        row = self.database.execute("SELECT * FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        return None if row is None else _group_of(row)

    def groups_from(self, origin: int) -> list[int]:
        """Return the ordinals of the groups that were issued in place of a group, ascending."""
        query = "SELECT ordinal FROM groups WHERE origin = ? ORDER BY ordinal"
        return [ordinal for (ordinal,) in self.database.execute(query, (origin,))]

    def steps(self) -> list[Step]:
        """Return all composed steps in order, without compacted ones."""
        return [_step_of(text) for (text,) in self.database.execute("SELECT record FROM steps ORDER BY step")]

    def step(self, number: int) -> Step | None:
        """Return a composed step; None if there is none, or if it is compacted."""
        row = self.database.execute("SELECT record FROM steps WHERE step = ?", (number,)).fetchone()
        return None if row is None else _step_of(row[0])

    def payload_bytes(self, ordinals: Iterable[int]) -> int:
        """Return the bytes of the stored payloads of groups; a missing payload counts nothing."""
        total = 0
        for ordinal in ordinals:
            row = self.database.execute("SELECT LENGTH(frames) FROM payloads WHERE ordinal = ?", (ordinal,)).fetchone()
            place = self.database.execute("SELECT lengths FROM places WHERE ordinal = ?", (ordinal,)).fetchone()
            total += (row[0] if row else 0) + (sum(json.loads(place[0])) if place else 0)
        return total

    def digests(self) -> dict[int, str]:
        """Return the payload digests by ordinal, without payloads to be deleted."""
        query = "SELECT ordinal, digest FROM payloads WHERE ordinal NOT IN (SELECT ordinal FROM unswept)"
        return dict(self.database.execute(query))

    def settled_digests(self) -> dict[int, str]:
        """Return the payload digests of settled groups not yet in a step, by ordinal."""
        # CROSS JOIN: few rows are settled, so SQLite must start from `groups`
        query = "SELECT ordinal, digest FROM groups CROSS JOIN payloads USING (ordinal) WHERE state = 'settled'"
        return dict(self.database.execute(query))

    def payloads(self, ordinals: Iterable[int]) -> list[list[bytes]]:
        """Return the stored frames of groups, in the given order.

        Raises:
            ProtocolError: a payload is missing.
            sqlite3.DatabaseError: a payload differs from its digest.
        """
        found = []
        for ordinal in ordinals:
            query = "SELECT digest, frames FROM payloads WHERE ordinal = ?"
            row = self.database.execute(query, (ordinal,)).fetchone()
            if row is None:
                raise ProtocolError(f"the ledger {self.path} has no payload of ordinal {ordinal}")
            digest, packed = row
            frames = self._in_file(ordinal) if packed == IN_A_FILE else _unpacked(packed)
            if frames is None or digest_of(frames) != digest:
                raise sqlite3.DatabaseError(f"the payload of ordinal {ordinal} is not what was written")
            found.append(frames)
        return found

    def _in_file(self, ordinal: int) -> list[bytes] | None:
        """Return the frames of a payload in a file; None if the file is gone or unreadable."""
        row = self.database.execute("SELECT file, start, lengths FROM places WHERE ordinal = ?", (ordinal,)).fetchone()
        try:
            return payload_files.read(
                payload_files.folder_of(Path(self.path)), Place(row[0], row[1], tuple(json.loads(row[2])))
            )
        except (OSError, TypeError, ValueError):
            return None

    def pools(self) -> dict[str, str]:
        """Return the difficulty pool of each example set aside, by key."""
        return dict(self.database.execute("SELECT key, pool FROM pools"))

    def counts(self) -> dict[tuple[str, str, str | None], int]:
        """Return the number of ordinals by (purpose, state, reason), rows and compacted ordinals together."""
        query = """
            SELECT CASE WHEN ordinal < 0 THEN 'eval' ELSE 'train' END, state, reason, COUNT(*)
            FROM groups GROUP BY 1, 2, 3
        """
        counts = Counter(CompactedHistory.of(self.value("folded")).counts())
        counts.update(
            {(purpose, state, reason): count for purpose, state, reason, count in self.database.execute(query)}
        )
        return dict(counts)

    def trained_twice(self) -> int:
        """Return the number of ordinals in several composed steps; 0 if all is well.

        Counted from the step records, since a row names only one step.
        """
        compacted = CompactedHistory.of(self.value("folded"))
        times = Counter(ordinal for step in self.steps() for ordinal in step.ordinals)
        return compacted.trained_twice + sum(
            count > 1 or ordinal in compacted.finished for ordinal, count in times.items()
        )

    def close(self) -> None:
        """Close the file."""
        self.database.close()


def _group_of(row: Sequence[Any]) -> Group:
    """Return the group of a row with the columns in the order of SCHEMA."""
    # from `failures` on the columns are the last fields of Group
    ordinal, label, index, key, seed, size, min_version, lineage, version, state, attempt, outcome, *rest = row
    policy = None if lineage is None else PolicyVersion(lineage=lineage, version=version)
    asked = (ordinal, ExampleRef(label, index, key), seed, size, min_version, policy)
    return Group(*asked, GroupState(state), attempt, AttemptOutcome(outcome), *rest)


def _step_of(text: str) -> Step:
    """Return the step of a record."""
    record = json.loads(text)
    dropped = tuple(DroppedOrdinal(**d) for d in record["dropped"])
    ordinals, digests = tuple(record["ordinals"]), tuple(record["digests"])
    return Step(record["step"], ordinals, dropped, digests, record["chain"])


class Store(LedgerReader):
    """Ledger file held exclusively, for reading and writing.

    Args:
        path: of the file, or ":memory:".
        sync: "process" or "node" (`ledger.sync`).
        patience: seconds to wait for the lock of an exiting packer.
        timeout: seconds for which a failing write is tried again (`ledger.commit_timeout`).
        output_dir: of the run, for the message about a damaged file.

    Raises:
        ConfigError: another packer holds the file, or the file is on a network file system, damaged, or no ledger.
        RunFailedError: the file can't be written within `timeout` (a full disk).
    """

    def __init__(
        self,
        path: Path | str,
        sync: Literal["process", "node"] = "process",
        patience: float = 0.0,
        timeout: float = 0.0,
        output_dir: Path | str = "OUTPUT_DIR",
    ) -> None:
        self._timeout, self._output_dir = timeout, output_dir
        self._lock_file = None
        self.files: PayloadFiles | None = None
        """Writer of the files of large payloads; None for a ledger in memory."""
        self._newest_file = 0
        """Number of the newest payload file with a committed payload."""
        self.on_wait: Callable[[str], None] = lambda problem: None
        """Callback after each failed try to write, with a message."""
        self.unswept = 0
        """Number of compacted ordinals with payloads still to be deleted."""
        if path != ":memory:":
            path = Path(path).resolve()  # else the lock of a linked file would lie next to the link, and lock nothing
            if problem := problem_of(path):
                raise ConfigError(problem)
            self._lock_file = take_lock(path, patience)
        # isolation_level None: no transaction but those of `commit`; by default Python begins some by itself
        super().__init__(sqlite3.connect(str(path), isolation_level=None, check_same_thread=False, timeout=5.0), path)
        try:
            self._patiently(lambda: self._open(sync))
        except sqlite3.DatabaseError as error:
            self.close()
            raise ConfigError(f"ledger.path: {path} can't be used: {error}. {self._way_out()}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, sync: str) -> None:
        if tables := foreign_tables(self.database):  # `problem_of` does not see tables that are only in the WAL
            raise ConfigError(says_foreign(self.path, tables))
        # a payload of some kilobytes then fits into one page; a small commit costs hardly more. Set first: SQLite
        # ignores a new page size in WAL mode
        self.database.execute("PRAGMA page_size=8192")
        # WAL: backups and `actors replay` read a snapshot while the packer writes, and neither waits
        self.database.execute("PRAGMA journal_mode=WAL")
        self.database.execute(f"PRAGMA synchronous={'FULL' if sync == 'node' else 'NORMAL'}")
        self.database.execute("PRAGMA secure_delete=OFF")  # else SQLite writes zeros over each deleted page
        self.database.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        self.database.executescript(SCHEMA)
        there = {name for (_, name, *_) in self.database.execute("PRAGMA table_info(groups)")}
        for column in (column for column in LATER_COLUMNS if column not in there):
            self.database.execute(f"ALTER TABLE groups ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
        pages, page_bytes = (
            self.database.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size")
        )
        # a large file is checked as far as the start reads it; payloads are compared with their digests when read
        whole = pages * page_bytes <= WHOLE_CHECK_BYTES
        for argument in ("1",) if whole else SMALL_TABLES:
            (found,) = self.database.execute(f"PRAGMA quick_check({argument})").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found.replace("\n", " "))
        (self.unswept,) = self.database.execute("SELECT COUNT(*) FROM unswept").fetchone()
        self.run = self.value("run")
        if self.run is None:
            self.run = uuid.uuid4().hex[:16]
        # committed before any message carries the new term, so that no two starts share a term (P2)
        self.term = (self.value("term") or 0) + 1
        self.commit(Changes(values={"run": self.run, "term": self.term}), {})
        if self.path != ":memory:":
            folder = payload_files.folder_of(Path(self.path))
            self.files = PayloadFiles(folder, self._files_in_use())

    def _way_out(self) -> str:
        """Return advice about a damaged file, for the end of a message."""
        restore = f"stop all actors of the run, then run `actors restore {self._output_dir}`"
        if any(backup.is_file() for backup in backup_paths(Path(self.path))):
            backup = next(backup for backup in backup_paths(Path(self.path)) if backup.is_file())
            return f"If the file is damaged, {restore}: it continues from the checkpoint that {backup} was made with"
        return (
            "There is no backup next to it yet. If the file is damaged, start a new run: another output_dir, with "
            "model.path at this run's newest checkpoint"
        )

    def commit(
        self, changes: Changes, payloads: Mapping[int, Payload], places: Mapping[int, Place] | None = None
    ) -> None:
        """Write a round in a single transaction.

        Args:
            changes: rows, steps and values.
            payloads: (digest, frames) of the groups settled in the round, by ordinal.
            places: places of those payloads that `files` has written, by ordinal.

        Raises:
            sqlite3.Error: nothing of the round has been written.
        """
        places = places or {}
        # IMMEDIATE takes the write lock: the lock of another program shows here and not halfway through the round
        self.database.execute("BEGIN IMMEDIATE")
        try:
            gone = [(ordinal,) for ordinal in changes.gone_groups]
            self.database.executemany("DELETE FROM groups WHERE ordinal = ?", gone)
            # payloads of compacted groups are deleted later, slice by slice
            self.database.executemany("INSERT INTO unswept VALUES (?)", gone)
            self.database.executemany("DELETE FROM steps WHERE step = ?", [(step,) for step in changes.gone_steps])
            self.database.executemany(
                "INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                [_group_row(group) for group in changes.groups.values()],
            )
            self.database.executemany(
                "INSERT OR REPLACE INTO payloads VALUES (?,?,?)",
                [
                    (ordinal, digest, IN_A_FILE if ordinal in places else msgpack.packb(frames))
                    for ordinal, (digest, frames) in payloads.items()
                ],
            )
            self.database.executemany(
                "INSERT OR REPLACE INTO places VALUES (?,?,?,?)",
                [(ordinal, at.file, at.start, json.dumps(at.lengths)) for ordinal, at in places.items()],
            )
            # after the payloads: an evaluation's last payload may be written and compacted in the same round
            swept = self._sweep() if self.unswept or gone else 0
            self.database.executemany(
                "INSERT INTO steps VALUES (?,?)", [(s.step, _step_record(s)) for s in changes.steps]
            )
            self.database.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?,?)",
                [(key, json.dumps(value)) for key, value in changes.values.items()],
            )
            normal = [(key,) for key, pool in changes.pools.items() if pool == NORMAL]
            self.database.executemany("DELETE FROM pools WHERE key = ?", normal)
            aside = [(key, pool) for key, pool in changes.pools.items() if pool != NORMAL]
            self.database.executemany("INSERT OR REPLACE INTO pools VALUES (?,?)", aside)
            self.database.execute("COMMIT")
        except BaseException:
            self.database.rollback()
            raise
        self.unswept += len(gone) - swept
        self._newest_file = max([self._newest_file, *(place.file for place in places.values())])
        if swept and self.files is not None:
            self.files.remove_unused(self._files_in_use(), self._newest_file)

    def _files_in_use(self) -> set[int]:
        return {file for (file,) in self.database.execute("SELECT DISTINCT file FROM places")}

    def _sweep(self) -> int:
        """Delete the payloads of the next compacted ordinals, up to one slice; return the number of ordinals."""
        query = """
            SELECT ordinal, COALESCE(LENGTH(frames), 0) FROM unswept LEFT JOIN payloads USING (ordinal)
            ORDER BY ordinal LIMIT ?
        """
        taken: list[tuple[int]] = []
        num_bytes = 0
        for ordinal, size in self.database.execute(query, (SLICE_ROWS,)):
            num_bytes += size
            if taken and num_bytes > SLICE_BYTES:  # `taken`: a payload above the limit still goes, alone
                break
            taken.append((ordinal,))
        self.database.executemany("DELETE FROM payloads WHERE ordinal = ?", taken)
        self.database.executemany("DELETE FROM places WHERE ordinal = ?", taken)
        self.database.executemany("DELETE FROM unswept WHERE ordinal = ?", taken)
        return len(taken)

    def commit_patiently(
        self, changes: Changes, payloads: Mapping[int, Payload], places: Mapping[int, Place] | None = None
    ) -> None:
        """Commit one round, with retries while the disk is full or another program locks the file.

        Raises:
            RunFailedError: the timeout has passed, or the file is damaged; nothing of the round is written or sent.
        """
        with self._undamaged():
            self._patiently(lambda: self.commit(changes, payloads, places))

    def payloads(self, ordinals: Iterable[int]) -> list[list[bytes]]:
        """Return the stored frames of groups, in the given order.

        Raises:
            ProtocolError: a payload is missing.
            RunFailedError: a payload differs from its digest, or the file is damaged.
        """
        with self._undamaged():
            return super().payloads(ordinals)

    @contextlib.contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Turn SQLite's error about a damaged file into a failure of the run.

        Raises:
            RunFailedError: the file is damaged; the message gives advice.
        """
        try:
            yield
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # subclasses are errors of a statement, not of the file
                raise
            raise RunFailedError(f"the ledger {self.path} is damaged: {error}. {self._way_out()}") from error

    def _patiently(self, write: Callable[[], None]) -> None:
        deadline, tell_at = time.monotonic() + self._timeout, 0.0
        while True:
            try:
                write()
                if tell_at:
                    log.info("ledger written again", path=str(self.path))
                return
            except sqlite3.OperationalError as error:  # full disk or lock; damage is a plain DatabaseError
                if time.monotonic() >= deadline:
                    raise RunFailedError(
                        f"the ledger {self.path} can't be written, tried for {self._timeout:g} s "
                        f"(ledger.commit_timeout): {error}. Free space, or stop the program that locks the file, and "
                        "start the same command again: nothing is lost"
                    ) from error
                if time.monotonic() >= tell_at:
                    tell_at = time.monotonic() + TELL_SECONDS
                    log.error("ledger not written; trying again", path=str(self.path), detail=str(error))
                self.on_wait(f"{self.path}: {error}; the run stands still meanwhile (ledger.commit_timeout)")
                time.sleep(COMMIT_RETRY_SECONDS)

    def close(self) -> None:
        """Close the file and release the lock."""
        super().close()
        if self.files is not None:
            self.files.close()
        if self._lock_file is not None:
            self._lock_file.close()


def take_lock(path: Path, patience: float = 0.0) -> IO[str]:
    """Lock the ledger at this path; return the lock file, which holds the lock while open.

    Args:
        path: of the ledger; the folder is created.
        patience: seconds to wait for another holder.

    Raises:
        ConfigError: another process holds the lock, the path is on a network file system, or the folder can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_file_system(path, mounts())
        # a lock of our own: SQLite's is free between two transactions
        lock = path.with_name(path.name + ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"ledger.path: {path} can't be made: {error.strerror}; set another place") from error
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


def backup_paths(path: Path) -> tuple[Path, Path]:
    """Return the paths of a ledger's two backups, the newer first."""
    return path.with_name(f"{path.name}.backup"), path.with_name(f"{path.name}.backup.older")


def check_file_system(path: Path, mounts: str) -> None:
    """Refuse a ledger on a network file system.

    Args:
        path: of the ledger.
        mounts: text in the format of /proc/mounts.

    Raises:
        ConfigError: the file system is a network file system, named in the message.
    """
    kind = file_system_of(path.parent, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(f"ledger.path: {path} is on {kind}, where SQLite's WAL does not work; choose a local disk")


def mounts() -> str:
    """Return the text of /proc/mounts, the mounted file systems; empty without this file."""
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8")
    except OSError:
        return ""


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds a folder; empty if unknown.

    The longest mount point above the folder holds it; of several mounts at the same point, the last one does.
    """
    resolved, longest, found = str(folder.resolve()), 0, ""
    for line in mounts.splitlines():
        point, kind = line.split()[1:3]
        point = point.replace("\\040", " ").rstrip("/")  # /proc/mounts writes a space as \040
        if len(point) >= longest and f"{resolved}/".startswith(f"{point}/"):
            longest, found = len(point), kind
    return found


def digest_of(frames: Iterable[bytes | memoryview]) -> str:
    """Return the sha256 (hex) of a payload's frames, concatenated."""
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()


def _unpacked(packed: bytes) -> list[bytes] | None:
    """Return packed frames; None if damage has left no msgpack, or the msgpack of something else."""
    try:
        frames = msgpack.unpackb(packed)
    except ValueError:
        return None
    return frames if isinstance(frames, list) and all(isinstance(frame, bytes) for frame in frames) else None


def _group_row(g: Group) -> tuple[Any, ...]:
    example, policy = g.example, g.policy
    return (
        *(g.ordinal, example.environment, example.index, example.key, g.seed, g.num_completions, g.min_version),
        *((None, None) if policy is None else (policy.lineage, policy.version)),
        *(str(g.state), g.attempt, str(g.outcome), g.failures, g.deaths, g.holder),
        *(g.oldest_version, g.arrival, g.step, g.reason, g.origin, g.resamples, g.position),
    )


def _step_record(step: Step) -> str:
    dropped = [dropped.model_dump() for dropped in step.dropped]
    return json.dumps(step.__dict__ | {"dropped": dropped})  # asdict would copy every digest
