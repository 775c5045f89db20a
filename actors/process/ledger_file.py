"""Check whether a file may be used as a run's ledger, without changing the file or its neighbours.

SQLite and the packer's lock also write to neighbours of the file (`FILE.lock`, `FILE-wal`, `FILE-shm`, `FILE-journal`,
`FILE.backup`). So all of these are checked before any is opened for writing.
"""

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

COLUMNS = {
    "meta": {"key", "value"},
    "groups": {"ordinal", "environment", "example", "example_key", "seed", "state", "attempt", "outcome", "holder"},
    "payloads": {"ordinal", "digest", "frames"},
    "steps": {"step", "record"},
    "pools": {"key", "pool"},
    "unswept": {"ordinal"},
    "places": {"ordinal", "file", "start", "lengths"},
}
"""Tables of a ledger, with columns present in every version of the table."""
DATABASE_START = b"SQLite format 3\0"
# 0x377f0682 or …83, big-endian; the last bit is the byte order of the checksums
WAL_STARTS = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83", b"\0\0\0\0")
"""First bytes of SQLite's write-ahead log; zeros are possible after a power loss."""
SUFFIXES = (".lock", "-wal", "-shm", "-journal", ".backup", ".backup.older")
"""Suffixes of the files next to a ledger."""
REMEDY = "set another ledger.path, or move it away"
"""Advice at the end of each error."""


def problem_of(path: Path) -> str:
    """Return the reason why a file can't be the ledger; empty if it is a ledger, or if there is no file yet."""
    try:
        path = path.resolve()
        return _problem_of_file(path) or _problem_of_neighbours(path)
    except OSError as error:
        return f"ledger.path: {error.filename or path} can't be read: {error.strerror}"


def foreign_tables(database: sqlite3.Connection) -> list[str]:
    """Return the tables of a database that don't belong to a ledger.

    Raises:
        sqlite3.DatabaseError: the database can't be read.
    """
    query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name"
    foreign = []
    for (name,) in database.execute(query).fetchall():
        known = COLUMNS.get(name)
        present = {column for (_, column, *_) in database.execute(f"PRAGMA table_info({name})")} if known else set()
        # SQLite's own tables are in every database; other programs may have tables of the same names as ours
        if not name.startswith("sqlite_") and (known is None or not known <= present):
            foreign.append(name)
    return foreign


def says_foreign(path: Path | str, tables: Iterable[str]) -> str:
    """Return the error text for a database with tables of something else."""
    return f"ledger.path: {path} is a database of something else (it has the tables {', '.join(tables)}); {REMEDY}"


def is_ledger(path: Path) -> bool:
    """Return whether the file exists, is not empty, and is a ledger."""
    return path.is_file() and path.stat().st_size > 0 and not problem_of(path)


def _problem_of_file(path: Path) -> str:
    if not path.exists():
        return ""
    if not path.is_file():
        return f"ledger.path: {path} is no file; {REMEDY}"
    if not path.stat().st_size:
        return ""
    if _start_of(path) != DATABASE_START:
        return (
            f"ledger.path: {path} can't be used: it is no SQLite file. If it was a ledger and is damaged, bring back a "
            f"backup of it, or start a new run in another output_dir; if it is another file of yours, {REMEDY}"
        )
    # with its log the database must be read as SQLite does; without, "immutable" reads the bytes as they are, and
    # makes no -shm file next to the database
    log = path.with_name(f"{path.name}-wal")
    mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True)) as database:
            tables = foreign_tables(database)
    except sqlite3.DatabaseError:
        return ""  # locked or damaged: the packer reports that when it opens the ledger
    return says_foreign(path, tables) if tables else ""


def _start_of(path: Path) -> bytes:
    """Return the first bytes of a file, as many as DATABASE_START has."""
    with path.open("rb") as file:
        return file.read(len(DATABASE_START))


def _problem_of_neighbours(path: Path) -> str:
    # each neighbour must be absent, or be what SQLite or the packer would have left: anything else is a user's file
    lock = path.with_name(f"{path.name}.lock")
    if lock.exists() and (not lock.is_file() or lock.stat().st_size):
        return f"ledger.path: {lock} is not the lock of a ledger, which is an empty file; {REMEDY}"
    there = path.exists() and path.stat().st_size > 0
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(f"{path.name}{suffix}")
        if beside.exists() and (not beside.is_file() or (beside.stat().st_size and not there)):
            return f"ledger.path: {beside} belongs to a database that is not there; bring that back, or {REMEDY}"
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        with log.open("rb") as file:
            if file.read(4) not in WAL_STARTS:
                return f"ledger.path: {log} is not SQLite's log of a ledger; {REMEDY}"
    for suffix in (".backup", ".backup.older"):
        backup = path.with_name(f"{path.name}{suffix}")
        if backup.exists() and not (backup.is_file() and _start_of(backup) == DATABASE_START):
            return f"ledger.path: {backup} is no backup of a ledger, and would be replaced by one; {REMEDY}"
    staging = path.with_name(f".{path.name}.backup")
    # a backup under way may have been killed before its first page was written
    unfinished = (b"", bytes(len(DATABASE_START)), DATABASE_START)
    if staging.exists() and not (staging.is_file() and _start_of(staging) in unfinished):
        return f"ledger.path: {staging} is no backup of a ledger, and would be replaced by one; {REMEDY}"
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists() and not path.exists():
        return f"ledger.path: {journal} belongs to a database that is not there; {REMEDY}"
    return ""
