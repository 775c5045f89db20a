"""Folder of a run with all that is made once from its data: digests, indices, conversions, commits of the hub.

Names of files contain the digest of the content that they were made from, so a file here is never out of date. Packer
and rollout actors of a machine share the folder: the first process makes a file, the others wait for it.
"""

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypedDict

import blake3
import numpy as np
import structlog

from actors.datasets.readers import (
    GROUP_BYTES,
    ArrowReader,
    LinesReader,
    ParquetReader,
    Reader,
    line_starts,
    write_arrow,
)
from actors.datasets.texts import BROKEN, is_compressed, is_lines, open_text, rows_of_text
from actors.process.tasks import task
from schemas.config.data import DATA_SUFFIX
from schemas.errors import ConfigError

log = structlog.get_logger("data")

LOCK_SECONDS = 1800.0
"""Time limit for another process to make a file; as long as actors wait for the packer by default."""
CHUNK = 8 << 20
"""Bytes that are read at a time for a digest or a conversion."""


class FileIdentity(TypedDict):
    """Identity of a data file's content."""

    path: str
    bytes: int
    digest: str
    """Digest (BLAKE3, 32 hex digits) of all bytes."""


class Prepared:
    """Folder of made files.

    Args:
        folder: folder below the run's output_dir; made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def identity(self, path: Path) -> FileIdentity:
        """Return the identity of a file. The digest is computed again only if size, times or inode have changed.

        Raises:
            ConfigError: the file can't be read.
        """
        try:
            found = path.stat()
            state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
            known = self._read("digests.json").get(str(path))
            if known and known["state"] == state:
                return FileIdentity(path=str(path), bytes=found.st_size, digest=known["digest"])
            started, digest = time.monotonic(), _digest(path)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from None
        if (seconds := time.monotonic() - started) > 1:
            log.info("digest of data computed", path=str(path), bytes=found.st_size, seconds=round(seconds, 1))
        with self.locked("digests.json"):
            self._write("digests.json", self._read("digests.json") | {str(path): {"state": state, "digest": digest}})
        return FileIdentity(path=str(path), bytes=found.st_size, digest=digest)

    def reader(self, path: Path) -> Reader:
        """Return a reader of a file's rows by number. The file is indexed or converted if that has not been done.

        Raises:
            ConfigError: the file can't be read, or a row can't be parsed.
        """
        match = DATA_SUFFIX.search(path.name)
        assert match is not None
        if match[1] == "arrow":
            return ArrowReader(path)
        if match[1] == "parquet":
            parquet = ParquetReader(path)
            # decoding a large group for each row would take longer than sampling
            if parquet.group_bytes <= GROUP_BYTES:
                return parquet
            digest = self.identity(path)["digest"]
            return ArrowReader(self.made(f"{digest}.arrow", lambda target: write_arrow(parquet, target)), path)
        digest = self.identity(path)["digest"]
        lines = path if is_lines(path) else self.made(f"{digest}.jsonl", lambda target: _write_lines(path, target))
        starts = self.made(f"{digest}.starts.npy", lambda target: _save(line_starts(lines), target))
        return LinesReader(lines, starts, path)

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a file of this folder; if it is not there, make it.

        Args:
            name: name of the file.
            make: function that writes the file at a path.

        Raises:
            ConfigError: the disk is full, or another process has not finished the file in time.
        """
        path = self.folder / name
        if path.exists():
            return path
        with self.locked(name):
            # made meanwhile by another process
            if not path.exists():
                started, staging = time.monotonic(), path.with_name(f".{name}.tmp")
                try:
                    make(staging)
                    staging.replace(path)
                except OSError as error:
                    raise ConfigError(
                        f"output_dir: {path} can't be written: {error.strerror}; data files are indexed and converted "
                        "there"
                    ) from None
                finally:
                    # a name that is gone if all went well
                    staging.unlink(missing_ok=True)
                seconds = round(time.monotonic() - started, 1)
                log.info("data prepared", file=str(path), bytes=path.stat().st_size, seconds=seconds)
        return path

    def noted(self, name: str, key: str, find: Callable[[], Any], is_good: Callable[[Any], bool] = bool) -> Any:
        """Return a value that is looked up once for the run.

        Args:
            name: name of the file with the values.
            key: key of the value.
            find: function that looks the value up.
            is_good: function of a value found earlier; False if the value must be looked up again.
        """
        known = self._read(name)
        if key not in known or not is_good(known[key]):
            with self.locked(name):
                known = self._read(name)
                # found meanwhile by another process
                if key not in known or not is_good(known[key]):
                    known[key] = find()
                    self._write(name, known)
        return known[key]

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Add values to a file of values; values that are there already stay."""
        if values.keys() - self._read(name).keys():
            with self.locked(name):
                self._write(name, values | self._read(name))

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Hold the folder's lock. The lock ends with the process.

        Args:
            what: name of the file that is made, for errors.

        Raises:
            ConfigError: the folder can't be written to, or another process holds the lock too long.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("wb")
        except OSError as error:
            raise ConfigError(f"output_dir: {self.folder} can't be written to: {error.strerror}") from None
        with lock:
            with task(f"wait for another process that makes {what}"):
                while not _has_locked(lock):
                    if time.monotonic() > deadline:
                        raise ConfigError(
                            f"output_dir: {self.folder}: another process has been making {what} for "
                            f"{LOCK_SECONDS:g} seconds; look at its log, or prepare the data with one actor first"
                        )
                    time.sleep(0.05)
            yield

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def _write(self, name: str, values: dict[str, Any]) -> None:
        # under the lock, so that the name of the staging file is free
        staging = self.folder / f".{name}.tmp"
        staging.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        staging.replace(self.folder / name)


def _has_locked(file: IO[bytes]) -> bool:
    """Lock a file, unless another process holds the lock; return whether this process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def digest_of(content: bytes) -> str:
    """Return the digest of bytes, 32 hex digits."""
    return blake3.blake3(content).hexdigest(16)


def _digest(path: Path) -> str:
    found = blake3.blake3(max_threads=blake3.blake3.AUTO)
    with path.open("rb", buffering=0) as file, task(f"digest {path.name}", path.stat().st_size, "bytes") as reading:
        buffer = bytearray(CHUNK)
        while size := file.readinto(buffer):
            found.update(memoryview(buffer)[:size])
            reading.advance(size)
    return found.hexdigest(16)


def _save(array: "np.ndarray[Any, Any]", target: Path) -> None:
    with target.open("wb") as file:
        np.save(file, array)


def _write_lines(path: Path, target: Path) -> None:
    """Write the rows of a text file as JSON Lines. Compressed lines are copied as they are."""
    with (
        target.open("wb") as written,
        task(f"convert {path.name}", unit="bytes", measure=lambda: target.stat().st_size),
    ):
        if is_compressed(path) and is_lines(path.with_suffix("")):
            try:
                with open_text(path) as stream:
                    while chunk := stream.read(CHUNK):
                        written.write(chunk)
            except BROKEN as error:
                raise ConfigError(f"{path} can't be decompressed: {error}") from None
        else:
            for _, row in rows_of_text(path):
                written.write(
                    json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
                )
