"""Catalogue of a run's groups: an SQLite file of the viewer's own, in which lists and searches are fast.

Sources are samples.jsonl with the file before it, and the ledger: its rows, and the payloads of groups that have no
line. Nothing of the run is written or locked. `update` does one piece of work: at most CHUNK_BYTES of lines, PAYLOADS
payloads, or LEDGER_ROWS rows. The newest lines come first, so the first page of a run with a million trajectories is
there before the last line is read.

A line is named by file, start and length, and is read again when it is shown: the catalogue has numbers and the index
of a search, no texts except the start of each prompt. Of each file the lines between two places, `low` and `high`, are
in the catalogue:

    0 ......... low ==================== high ...... end of the file
    older lines,    lines in the catalogue     lines of the last second
    still to come

A packer that starts again may cut lines off and write others. The check sum of the newest line tells; then the newest
lines leave the catalogue, until a line is what the file has at its place.

The search index has the trigrams of each group's texts in small letters, in a table per file: a table is dropped with
its file. A group that has all trigrams of a text is a candidate; `listing` reads its line for the answer.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from actors.ledger import LedgerReader
from actors.ledger.stored_groups import stored_group
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES, record_of
from actors.view.groups import characters_of, of_line, of_payload, texts_of
from actors.view.plain import cut, storable
from schemas.errors import ConfigError, DecodeError, ProtocolError

Work = Literal["lines", "rows", "payloads"]
"""Kind of a piece of work."""
FORMAT = 1
"""Number of the file's format: another one makes a new file."""
FIRST_BYTES, CHUNK_BYTES = 128 << 10, 8 << 20
"""Bytes of lines of the first piece of work on a file, and of the largest; a longer line is read whole. Pieces double
so that the first page is there at once, and merges of the search index are few."""
PAYLOADS, LEDGER_ROWS = 256, 10_000
"""Payloads, and rows of the ledger, of a piece of work."""
PAYLOAD_BYTES = 16 << 20
"""Bytes of payloads after which a piece of work ends."""
SEARCHED_CHARACTERS = 4 << 20
"""Characters of a group's texts that the search index has."""
HEAD_CHARACTERS = 200
"""Characters of a prompt in a list."""
ROWS_SECONDS = 1.0
"""Shortest time between two looks at the rows of the ledger."""
LOCK_SECONDS = 10.0
"""Longest wait for another viewer of the same run that writes to the same file."""
OF_PAYLOADS = 0
"""Number of the table of texts of groups that only the ledger has; files are numbered from 1."""
SPARE_TEXTS = 1000
"""Texts of groups that are gone, above which the table of payloads is made again; as many as those that are there."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY, inode TEXT NOT NULL, low INTEGER, high INTEGER);
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY, environment TEXT NOT NULL, step INTEGER, state TEXT, reason TEXT, attempt INTEGER,
    failures INTEGER, oldest INTEGER, source TEXT NOT NULL DEFAULT '', file INTEGER, start INTEGER, length INTEGER,
    digest INTEGER, head TEXT
);
CREATE INDEX IF NOT EXISTS by_place ON groups (file, start) WHERE file IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_source ON groups (source, ordinal) WHERE source <> 'line';
CREATE TABLE IF NOT EXISTS trajectories (
    ordinal INTEGER, completion INTEGER, reward REAL, advantage REAL, characters INTEGER, stop TEXT, turns INTEGER,
    PRIMARY KEY (ordinal, completion)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stops (stop TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS environments (environment TEXT PRIMARY KEY) WITHOUT ROWID;
"""
# source of a group's numbers: '' none yet, 'line' of samples.jsonl, 'payload' of the ledger, 'gone' without either
TAKEN = "source = 'line'"
HAS_PAYLOAD = ("settled", "composed", "trained", "durable")
"""States of groups whose payload may be in the ledger."""


def cache_folder() -> Path:
    """Return the folder of all catalogues, of XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-actors" / "view"


def catalogue_path(folder: Path, output: Path) -> Path:
    """Return the path of a run's catalogue."""
    name = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:20]
    return folder / f"{name}.{FORMAT}.sqlite"


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection to a catalogue, for one thread at a time."""
    # isolation_level None: no transaction but those of `writing`
    database = sqlite3.connect(path, isolation_level=None, timeout=LOCK_SECONDS, check_same_thread=False)
    database.row_factory = sqlite3.Row
    return database


class RunFiles(Protocol):
    """Interface of a configuration, as far as the catalogue needs it."""

    @property
    def output(self) -> Path:
        """Folder of the run."""

    @property
    def ledger_path(self) -> Path:
        """File of the ledger."""


@dataclass(frozen=True)
class Line:
    """A line of a samples file: where it is, and what it says."""

    start: int
    raw: bytes
    record: Any
    """Record of the line; None if it is no JSON."""


class Catalogue:
    """Writer of a run's catalogue.

    Args:
        config: places of the run's files, as its configuration has them.
        folder: folder of the catalogues; made if needed.

    Raises:
        ConfigError: the file can't be made or read.
    """

    def __init__(self, config: RunFiles, folder: Path) -> None:
        self._config, self.path = config, catalogue_path(folder, config.output)
        self._next_row: int | None = None
        """Ordinal from which the next rows of the ledger are read; None: from the first."""
        self._lines_are_next = False
        self._rows_due, self._rows_seconds = 0.0, 0.0
        """Time of the next look at the rows, and seconds that this look has taken so far."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = connect(self.path)
            # the file can be made again at any time, so nothing waits for the disk
            self._database.execute("PRAGMA synchronous=OFF")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(SCHEMA)
            # an old SQLite without trigrams is known here
            self._database.execute(_make_texts(OF_PAYLOADS))
        except (OSError, sqlite3.DatabaseError) as error:
            raise ConfigError(
                f"--cache: {self.path} can't be used: {error}; remove it, or name another folder"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def update(self) -> Work | None:
        """Do one piece of work; return its kind, or None if nothing is left to do for now."""
        # rows and lines take turns, so that the newest lines need not wait for a million rows
        if time.monotonic() >= self._rows_due and not self._lines_are_next:
            self._lines_are_next = True
            if self._update_rows():
                return "rows"
        self._lines_are_next = False
        if self._update_files():
            return "lines"
        if self._next_row is not None:
            return "rows"
        return "payloads" if self._update_payloads() else None

    def update_all(self) -> None:
        """Bring the catalogue to the state of the run's files."""
        self._rows_due, self._lines_are_next = 0.0, False
        while self.update():
            pass

    # --- lines of samples -----------------------------------------------------------------------------------------

    def _update_files(self) -> bool:
        """Take in some lines, of the newest file first; return whether any were taken in."""
        paths = {}
        for name in (SAMPLES, OLDER_SAMPLES):
            path = self._config.output / name
            with contextlib.suppress(FileNotFoundError):
                paths[_inode(path.stat())] = path
        with self._writing():
            known = {row["inode"]: row for row in self._database.execute("SELECT * FROM files")}
            for inode in known.keys() - paths.keys():
                self._forget_file(known[inode]["id"])
        return any(self._update_file(inode, path) for inode, path in paths.items())

    def _update_file(self, inode: str, path: Path) -> bool:
        with self._writing(), path.open("rb") as file:
            if _inode(os.fstat(file.fileno())) != inode:  # it has become the older file meanwhile
                return False
            end = file.seek(0, os.SEEK_END)
            number, low, high = known = self._place(file, inode, end)
            size = min(CHUNK_BYTES, max(FIRST_BYTES, high - low))
            lines = list(_lines(file, high, end, high + size))
            if lines:
                high = lines[-1].start + len(lines[-1].raw)
            elif low:
                before, low = low, _line_start(file, max(0, low - size))
                lines = list(_lines(file, low, before, before))
            for line in lines:
                self._take_line(number, line)
            if (number, low, high) != known or lines:
                self._database.execute("UPDATE files SET low = ?, high = ? WHERE id = ?", (low, high, number))
            return bool(lines)

    def _place(self, file: IO[bytes], inode: str, end: int) -> tuple[int, int, int]:
        """Return number, `low` and `high` of a file, after lines that are gone are forgotten."""
        row = self._database.execute("SELECT id, low, high FROM files WHERE inode = ?", (inode,)).fetchone()
        if row is None:
            last = _line_start(file, end)
            added = self._database.execute("INSERT INTO files (inode, low, high) VALUES (?,?,?)", (inode, last, last))
            assert added.lastrowid is not None
            self._database.execute(_make_texts(added.lastrowid))
            return added.lastrowid, last, last
        number, low, high = row
        query = "SELECT ordinal, start, length, digest FROM groups WHERE file = ? ORDER BY start DESC LIMIT 1"
        is_cut = False
        while (group := self._database.execute(query, (number,)).fetchone()) is not None:
            if _is_there(file, group):
                return number, low, int(group["start"] + group["length"]) if is_cut else high
            self._forget_line(group["ordinal"])
            is_cut = True
        if is_cut or high > end:  # no line is left of those that were there
            low = high = _line_start(file, end)
        return number, low, high

    def _take_line(self, number: int, line: Line) -> None:
        """Store the numbers of a line and the trigrams of its texts."""
        try:
            group = of_line(line.record)
        except (KeyError, IndexError, TypeError, AttributeError):  # no JSON, of another program, or of a later build
            return
        ordinal = group["ordinal"]
        place = (number, line.start, len(line.raw), zlib.crc32(line.raw))
        self._database.execute(
            "INSERT INTO groups (ordinal, environment, step, source, file, start, length, digest, head) "
            "VALUES (?,?,?,'line',?,?,?,?,?) ON CONFLICT (ordinal) DO UPDATE SET step = excluded.step, "
            "source = 'line', file = excluded.file, start = excluded.start, length = excluded.length, "
            "digest = excluded.digest, head = excluded.head",
            (ordinal, storable(group["environment"]), group["step"], *place, _head(group)),
        )
        self._take_numbers(group)
        self._take_texts(number, group)

    def _take_numbers(self, group: Mapping[str, Any]) -> None:
        ordinal, completions = group["ordinal"], group["completions"]
        self._database.execute("DELETE FROM trajectories WHERE ordinal = ?", (ordinal,))
        rows = [
            (
                ordinal,
                one["index"],
                one["reward"],
                one["advantage"],
                characters_of(one),
                one["stop"],
                one.get("turns", 1),
            )
            for one in completions
        ]
        self._database.executemany("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?)", rows)
        self._database.executemany("INSERT OR IGNORE INTO stops VALUES (?)", {(one["stop"],) for one in completions})
        self._database.execute("INSERT OR IGNORE INTO environments VALUES (?)", (storable(group["environment"]),))

    def _take_texts(self, number: int, group: Mapping[str, Any]) -> None:
        ordinal = group["ordinal"]
        # a line that was cut off and written again has its trigrams already
        if self._database.execute(f"SELECT 1 FROM texts_{number}_docsize WHERE id = ?", (ordinal,)).fetchone():
            return
        text = storable("\n".join(texts_of(group))[:SEARCHED_CHARACTERS]).lower()
        self._database.execute(f"INSERT INTO texts_{number} (rowid, text) VALUES (?,?)", (ordinal, text))

    def _forget_line(self, ordinal: int) -> None:
        self._database.execute("DELETE FROM trajectories WHERE ordinal = ?", (ordinal,))
        self._database.execute("DELETE FROM groups WHERE ordinal = ? AND state IS NULL", (ordinal,))
        query = "UPDATE groups SET source = '', file = NULL, start = NULL, length = NULL, head = NULL WHERE ordinal = ?"
        self._database.execute(query, (ordinal,))

    def _forget_file(self, number: int) -> None:
        for (ordinal,) in self._database.execute("SELECT ordinal FROM groups WHERE file = ?", (number,)).fetchall():
            self._forget_line(ordinal)
        self._database.execute(f"DROP TABLE IF EXISTS texts_{number}")
        self._database.execute("DELETE FROM files WHERE id = ?", (number,))

    # --- the ledger -----------------------------------------------------------------------------------------------

    def _update_rows(self) -> bool:
        """Take in some rows of the ledger; return whether there are more."""
        started = time.monotonic()
        with _ledger(self._config) as ledger:
            if ledger is None:
                return False
            first = -(1 << 62) if self._next_row is None else self._next_row
            rows = ledger.database.execute(
                "SELECT ordinal, environment, COALESCE(step, version), state, reason, attempt, failures, "
                "oldest_version FROM groups WHERE ordinal >= ? ORDER BY ordinal LIMIT ?",
                (first, LEDGER_ROWS),
            ).fetchall()
        last = rows[-1][0] if len(rows) == LEDGER_ROWS else 1 << 62
        with self._writing():
            self._take_rows(rows)
            self._forget_rows({row[0] for row in rows}, first, last)
        self._next_row = last + 1 if len(rows) == LEDGER_ROWS else None
        self._rows_seconds += time.monotonic() - started
        if self._next_row is None:
            # a tenth of the time at most, however many rows there are
            self._rows_due = time.monotonic() + max(ROWS_SECONDS, 9 * self._rows_seconds)
            self._rows_seconds = 0.0
        return self._next_row is not None

    def _take_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        query = (
            "SELECT ordinal, step, state, reason, attempt, failures, oldest FROM groups WHERE ordinal BETWEEN ? AND ?"
        )
        bounds = (rows[0][0], rows[-1][0]) if rows else (0, -1)
        known = {row[0]: tuple(row)[1:] for row in self._database.execute(query, bounds)}
        # most rows are as they were at the last look, and are not written again
        changed = [row for row in rows if known.get(row[0]) != tuple(row)[2:]]
        self._database.executemany(
            "INSERT INTO groups (ordinal, environment, step, state, reason, attempt, failures, oldest) "
            "VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (ordinal) DO UPDATE SET "
            "step = COALESCE(excluded.step, step), state = excluded.state, reason = excluded.reason, "
            "attempt = excluded.attempt, failures = excluded.failures, oldest = excluded.oldest",
            changed,
        )
        labels = {(row[1],) for row in changed}
        self._database.executemany("INSERT OR IGNORE INTO environments VALUES (?)", labels)

    def _forget_rows(self, there: set[int], first: int, last: int) -> None:
        """Forget the rows between two ordinals that the ledger has no more: they are compacted."""
        query = "SELECT ordinal FROM groups WHERE ordinal BETWEEN ? AND ? AND state IS NOT NULL"
        gone = [(ordinal,) for (ordinal,) in self._database.execute(query, (first, last)) if ordinal not in there]
        self._database.executemany(f"DELETE FROM groups WHERE ordinal = ? AND NOT {TAKEN}", gone)
        rest = "DELETE FROM trajectories WHERE ordinal = ? AND ordinal NOT IN (SELECT ordinal FROM groups)"
        self._database.executemany(rest, gone)
        # of a group with a line the last state is kept, since a compacted step is trained and in a checkpoint
        compacted = "UPDATE groups SET state = NULL WHERE ordinal = ? AND state <> 'dropped'"
        self._database.executemany(compacted, gone)

    def _update_payloads(self) -> bool:
        """Take in some groups that only the ledger has, the newest first; return whether any were taken in."""
        marks = ", ".join("?" * len(HAS_PAYLOAD))
        query = (
            f"SELECT ordinal, step FROM groups WHERE source = '' AND state IN ({marks}) ORDER BY ordinal DESC LIMIT ?"
        )
        wanted = self._database.execute(query, (*HAS_PAYLOAD, PAYLOADS)).fetchall()
        if not wanted:
            return False
        taken = 0
        with _ledger(self._config) as ledger, self._writing():
            self._renew_texts()
            for ordinal, step in wanted:
                group, num_bytes = stored_value(ledger, ordinal, step)
                self._take_payload(ordinal, group)
                taken += num_bytes
                if taken >= PAYLOAD_BYTES:
                    break
        return True

    def _take_payload(self, ordinal: int, group: Mapping[str, Any] | None) -> None:
        source, head = ("gone", None) if group is None else ("payload", _head(group))
        self._database.execute("UPDATE groups SET source = ?, head = ? WHERE ordinal = ?", (source, head, ordinal))
        if group is not None:
            self._take_numbers(group)
            self._take_texts(OF_PAYLOADS, group)

    def _renew_texts(self) -> None:
        """Make the table of payloads again if most of its texts are of groups that are gone."""
        (held,) = self._database.execute(f"SELECT COUNT(*) FROM texts_{OF_PAYLOADS}_docsize").fetchone()
        (live,) = self._database.execute("SELECT COUNT(*) FROM groups WHERE source = 'payload'").fetchone()
        if held > 2 * live + SPARE_TEXTS:
            self._database.execute(f"DROP TABLE texts_{OF_PAYLOADS}")
            self._database.execute(_make_texts(OF_PAYLOADS))
            self._database.execute("UPDATE groups SET source = '' WHERE source = 'payload'")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the file for a piece of work; another viewer of the same run waits meanwhile."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


@contextlib.contextmanager
def _ledger(config: RunFiles) -> Iterator[LedgerReader | None]:
    """Provide the ledger for a block; None if there is none, or if it can't be read now."""
    if not config.ledger_path.is_file():
        yield None
        return
    try:
        ledger = LedgerReader.of(config.ledger_path)
    except ConfigError:  # a packer that starts has an empty file for a moment
        yield None
        return
    try:
        yield ledger
    finally:
        ledger.close()


def stored_value(ledger: LedgerReader | None, ordinal: int, step: int | None) -> tuple[dict[str, Any] | None, int]:
    """Return a group of the ledger with the bytes of its payload; None if the payload is gone or of a later build."""
    try:
        frames = ledger.payloads([ordinal])[0] if ledger else []
        return of_payload(stored_group(frames), step), sum(map(len, frames))
    except (ProtocolError, DecodeError, sqlite3.DatabaseError):
        return None, 0


def _make_texts(number: int) -> str:
    # detail none: a third of the size; `listing` compares the texts themselves
    table = f"texts_{number} USING fts5(text, content='', tokenize='trigram', detail=none)"
    return f"CREATE VIRTUAL TABLE IF NOT EXISTS {table}"


def _head(group: Mapping[str, Any]) -> str:
    """Return the start of a group's prompt: of a conversation the last message, which differs most between groups."""
    text = texts_of({"prompt": group["prompt"], "completions": []})[0]
    if not isinstance(group["prompt"], str) and group["prompt"]:
        text = texts_of({"prompt": group["prompt"][-1:], "completions": []})[0]
    return storable(cut(" ".join(text[: 4 * HEAD_CHARACTERS].split()), HEAD_CHARACTERS))


def _inode(found: os.stat_result) -> str:
    """Return the identity of a file, which it keeps when it is renamed to the older one."""
    return f"{found.st_dev}:{found.st_ino}"


def _is_there(file: IO[bytes], group: sqlite3.Row) -> bool:
    file.seek(group["start"])
    return bool(zlib.crc32(file.read(group["length"])) == group["digest"])


def _line_start(file: IO[bytes], at: int) -> int:
    """Return the start of the line that has the byte before `at`, or `at` if a line ends there."""
    start = at
    while start:
        size = min(64 << 10, start)
        file.seek(start - size)
        newline = file.read(size).rfind(b"\n")
        if newline >= 0:
            return start - size + newline + 1
        start -= size
    return 0


def _lines(file: IO[bytes], start: int, end: int, enough: int) -> Iterator[Line]:
    """Yield the whole lines between two places, up to the first that ends behind `enough`."""
    file.seek(start)
    while start < min(end, enough):
        raw = file.readline()
        if not raw.endswith(b"\n"):  # still being written
            return
        yield Line(start, raw, record_of(raw))
        start += len(raw)


def read_line(path: Path, start: int, length: int, digest: int) -> dict[str, Any] | None:
    """Return the record of a line of a samples file; None if the line is not there any more."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(length)
    except FileNotFoundError:
        return None
    return json.loads(raw) if zlib.crc32(raw) == digest else None
