"""Backups of the ledger, written in the background after each durable checkpoint, installed by `actors restore`.

A backup is a complete ledger, compacted up to the newest step that is both in a checkpoint and recorded. It holds all
later rows with their payloads: enough to continue from a checkpoint of this or a later step. Rows and payloads of
earlier steps are left out, so a backup does not lead back to an older checkpoint.

A separate connection reads the ledger in one snapshot. The snapshot takes no write lock and delays no round, but the
WAL can't shrink until the snapshot ends, so time and size of a backup are limited.
"""

import contextlib
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import structlog

from actors.ledger import payload_files
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.store import SCHEMA, LedgerReader, backup_paths
from bus import threads

log = structlog.get_logger("ledger")

MAX_BYTES, MAX_SECONDS = 4 << 30, 120.0
"""Limits of a backup in bytes and seconds; beyond either the backup is abandoned."""
SPARE_BYTES = 64 << 20
"""Bytes left free on the disk besides the size of a backup, for the ledger's commits."""
BATCH_BYTES = 16 << 20
"""Bytes copied between two fsyncs; a commit synced at the same time waits for no more than these."""
REST_FACTOR = 10.0
"""Pause after a backup, as a multiple of its duration, unless the backup's checkpoint would be pruned by then."""
STOP_SECONDS = 5.0
"""Seconds that `Backups.close` waits for the thread."""
TERMS_AHEAD = 1000
"""Number added to the term of a restored ledger. Packers started after the backup counted the term up, and the
term of the replaced ledger can be read only from an undamaged file."""


class BackupError(Exception):
    """A backup was abandoned; the message says why."""


class Backups:
    """Thread for backups, the two newest kept next to the ledger. A failed backup is a warning and never fails the run.

    Args:
        path: of the ledger.
        keep_last: number of newest checkpoints kept by the trainer; a backup is of no use without the checkpoint.
    """

    def __init__(self, path: Path, keep_last: int) -> None:
        self._path, self._keep_last = path, keep_last
        self._wanted, self._asked_for = threading.Event(), 0
        self._num_asked = self._num_backed_up = 0
        """Number of durable checkpoints so far, and the number when the newest backup was started."""
        self._told_outdated = False
        self._stopping = False
        self._failing = ""
        self._thread = threads.make("backup", self._loop)

    def follow(self, durable_step: int) -> None:
        """Ask for a backup if the durable step has changed. Call after the commit of the change, from one thread."""
        if durable_step == self._asked_for:
            return
        self._asked_for = durable_step
        if durable_step and not self._stopping:
            self._num_asked += 1
            # behind keep_last newer checkpoints the backup's own checkpoint is pruned, and the backup is of no use; the
            # newest checkpoint is just being backed up
            is_outdated = self._num_asked - self._num_backed_up >= max(2, self._keep_last)
            if is_outdated and not self._told_outdated:
                log.warning(
                    "the newest backup of the ledger is older than the newest checkpoints that are kept; until the "
                    "next one a damaged ledger could not be restored (trainer.checkpoint.keep_last)",
                    path=str(self._path),
                    keep_last=self._keep_last,
                )
            self._told_outdated = is_outdated
            self._wanted.set()
            if not self._thread.ident:
                self._thread.start()

    def close(self) -> None:
        """Stop the thread within 5 s and abandon an unfinished backup."""
        self._stopping = True
        self._wanted.set()
        if self._thread.ident:
            self._thread.join(STOP_SECONDS)

    def _loop(self) -> None:
        while not self._stopping:
            threads.mark("packer.backup")
            if not self._wanted.wait(1.0) or self._stopping:
                continue
            self._wanted.clear()
            started, begun = time.monotonic(), self._num_asked
            try:
                step, num_bytes = back_up(self._path, lambda: self._stopping)
            except Exception as error:  # a run must not end because a backup failed
                if not self._stopping and str(error) != self._failing:
                    self._failing = str(error)
                    known = isinstance(error, (BackupError, OSError, sqlite3.Error))
                    log.warning(
                        "no backup of the ledger; the run goes on without a newer one",
                        path=str(self._path),
                        detail=error,
                        exc_info=None if known else error,
                    )
            else:
                self._failing, self._num_backed_up = "", begun
                log.info("ledger backed up", step=step, bytes=num_bytes, seconds=round(time.monotonic() - started, 3))
            rested_at = time.monotonic() + REST_FACTOR * (time.monotonic() - started)
            # The checkpoint of this backup is pruned when keep_last newer ones exist, so the next backup must be
            # complete by then. As many checkpoints may arrive while it is written as arrived during this one.
            due = begun + max(1, self._keep_last - 1 - (self._num_asked - begun))
            while not self._stopping and time.monotonic() < rested_at and self._num_asked < due:
                time.sleep(min(0.2, max(0.0, rested_at - time.monotonic())))


def back_up(path: Path, cancelled: Callable[[], bool] = lambda: False) -> tuple[int, int]:
    """Write a backup of the ledger and keep the one before.

    Args:
        path: of the ledger.
        cancelled: asked between batches of 16 MiB; True abandons the backup.

    Returns:
        The step from which the backup continues, and its size in bytes.

    Raises:
        BackupError: the backup would be too large, takes too long, would fill the disk, or was cancelled.
        OSError, sqlite3.Error: the ledger can't be read or the backup can't be written.
    """
    newest, older = backup_paths(path)
    staging = newest.with_name(f".{newest.name}")
    staging.unlink(missing_ok=True)
    try:
        step = _copy(path, staging, cancelled)
        payload_files.sync(staging)
        # a crash between the two renames leaves the older backup, whole
        if newest.exists():
            newest.replace(older)
        staging.replace(newest)
        # a new name survives a power loss only if the folder is flushed
        payload_files.sync(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    return step, newest.stat().st_size


def _copy(path: Path, staging: Path, cancelled: Callable[[], bool]) -> int:
    deadline = time.monotonic() + MAX_SECONDS
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
    with contextlib.closing(connection) as database:
        database.execute("ATTACH ? AS backup", (f"{staging.absolute().as_uri()}?mode=rwc",))
        # no journal: the file is staged, synced at its end, and removed after any error
        for setting in ("page_size=8192", "journal_mode=OFF", "synchronous=OFF"):
            database.execute(f"PRAGMA backup.{setting}")
        database.executescript(SCHEMA.replace("IF NOT EXISTS ", "IF NOT EXISTS backup."))
        database.execute("BEGIN")  # one read transaction: a snapshot of the ledger
        for table in ("meta", "groups", "steps", "pools"):
            database.execute(f"INSERT INTO backup.{table} SELECT * FROM main.{table}")  # noqa: S608  names of ours
        ledger = LedgerReader(database, path)
        step = _compact(database, ledger)
        sizes = _sizes(database, path.parent)
        batch: list[int] = []
        num_bytes = 0
        for ordinal, size in sizes:
            batch.append(ordinal)
            num_bytes += size
            if num_bytes >= BATCH_BYTES:
                _copy_payloads(ledger, batch)
                payload_files.sync(staging)
                batch, num_bytes = [], 0
                if cancelled() or time.monotonic() > deadline:
                    raise BackupError(f"it was not written within {MAX_SECONDS:g} s")
        _copy_payloads(ledger, batch)
        database.execute("COMMIT")
    return step


def _compact(database: sqlite3.Connection, ledger: LedgerReader) -> int:
    """Compact the copied rows of all steps that are in a checkpoint and recorded; return the last of these steps."""
    compacted = CompactedHistory.of(ledger.value("folded"))
    (durable,) = database.execute("SELECT MAX(step) FROM main.groups WHERE state = 'durable'").fetchone()
    last = min(durable or compacted.step, ledger.value("recorded_step") or 0)
    steps = [step for step in ledger.steps() if step.step <= last]
    gone = [(ordinal,) for step in steps for ordinal in compacted.take(step)]
    database.executemany("DELETE FROM backup.groups WHERE ordinal = ?", gone)
    database.executemany("DELETE FROM backup.steps WHERE step = ?", [(step.step,) for step in steps])
    database.execute("INSERT OR REPLACE INTO backup.meta VALUES ('folded', ?)", (json.dumps(compacted.record()),))
    return compacted.step


def _sizes(database: sqlite3.Connection, folder: Path) -> list[tuple[int, int]]:
    """Return (ordinal, bytes) of each payload to copy.

    Raises:
        BackupError: the payloads are too large for a backup or for the disk.
    """
    # CROSS JOIN makes SQLite start from the few copied rows, not from all payloads
    query = """
        SELECT ordinal, LENGTH(frames), lengths FROM backup.groups CROSS JOIN main.payloads USING (ordinal)
        LEFT JOIN main.places USING (ordinal)
    """
    sizes = [
        (ordinal, size or sum(json.loads(lengths))) for ordinal, size, lengths in database.execute(query).fetchall()
    ]
    needed = sum(size for _, size in sizes)
    if needed > MAX_BYTES:
        raise BackupError(
            f"the groups that no checkpoint has are {needed / 1e9:.1f} GB, more than {MAX_BYTES / 1e9:.1f}"
        )
    free = shutil.disk_usage(folder).free
    if free < 2 * needed + SPARE_BYTES:
        raise BackupError(
            f"{folder} has {free / 1e9:.2f} GB free; a backup of {needed / 1e9:.2f} GB would leave too little"
        )
    return sizes


def _copy_payloads(ledger: LedgerReader, ordinals: list[int]) -> None:
    """Copy payloads, also those in files: a backup is a single file."""
    keys = [(ordinal,) for ordinal in ordinals]
    ledger.database.executemany("INSERT INTO backup.payloads SELECT * FROM main.payloads WHERE ordinal = ?", keys)
    for ordinal in ordinals:
        if ledger.database.execute("SELECT 1 FROM main.places WHERE ordinal = ?", (ordinal,)).fetchone():
            frames = msgpack.packb(ledger.payloads([ordinal])[0])
            ledger.database.execute("UPDATE backup.payloads SET frames = ? WHERE ordinal = ?", (frames, ordinal))


def chains_of(backup: Path) -> tuple[str, dict[int, str]]:
    """Return the run of a backup, and the chain of witnesses at each step from which it can continue.

    Raises:
        sqlite3.Error: the backup is missing or damaged.
    """
    database = sqlite3.connect(f"{backup.absolute().as_uri()}?mode=ro", uri=True)
    with contextlib.closing(database):
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found.replace("\n", " "))
        ledger = LedgerReader(database, backup)
        compacted = CompactedHistory.of(ledger.value("folded"))
        return str(ledger.value("run")), {compacted.step: compacted.chain} | {s.step: s.chain for s in ledger.steps()}


def put_in_place(backup: Path, path: Path, incarnation: int) -> Path:
    """Install a copy of the backup as the ledger; keep the present ledger under a new path, the result.

    No process may hold the ledger. A crash in the middle leaves no ledger at all, or both files; the same call then
    completes the work.

    Args:
        backup: file to copy.
        path: of the ledger.
        incarnation: newest incarnation that has written checkpoints. New gangs get higher numbers, since the numbers
            used after the backup name weights and checkpoints of a dead history.
    """
    staging = path.with_name(f".{path.name}.restored")
    shutil.copyfile(backup, staging)
    with contextlib.closing(sqlite3.connect(staging, isolation_level=None)) as database:
        ledger = LedgerReader(database, staging)
        gang = {"incarnation": 0, "checkpoint": 0, "members": []} | (ledger.value("gang") or {})
        gang["incarnation"] = max(gang["incarnation"], incarnation)
        term = max(ledger.value("term") or 0, _term_of(path)) + TERMS_AHEAD
        values = [("gang", json.dumps(gang)), ("term", json.dumps(term))]
        database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)
    # on the disk before the present ledger makes room: a power loss must not leave an empty file in its place
    payload_files.sync(staging)
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-wal", "-shm", ""):  # SQLite would replay a WAL left behind into the new file
        left = path.with_name(path.name + suffix)
        if left.exists():
            left.replace(aside.with_name(aside.name + suffix))
    # its payload files go with it: the backup has all payloads in itself, and a packer removes files without a payload
    files = payload_files.folder_of(path)
    if files.exists():
        files.replace(payload_files.folder_of(aside))
    staging.replace(path)
    payload_files.sync(path.parent)
    return aside


def _term_of(path: Path) -> int:
    """Return the term of the ledger to be replaced; 0 if unreadable, since any part may be damaged."""
    has_log = path.with_name(f"{path.name}-wal").exists()
    how = "mode=ro" if has_log else "mode=ro&immutable=1"  # immutable: SQLite creates no WAL next to the file
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as database:
            return int(LedgerReader(database, path).value("term") or 0)
    except (sqlite3.Error, ValueError, TypeError):
        return 0
