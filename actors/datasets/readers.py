"""Readers of data files: a row by its number, without reading the rows before it."""

import bisect
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from actors.datasets.texts import pyarrow
from actors.process.tasks import task
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_BYTES = 4 << 20
"""Bytes of the largest row group, decoded, that is read whole for a row. A file with larger groups is converted."""
CACHED_BYTES = 64 << 20
"""Bytes of decoded row groups that a reader keeps."""
MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti")
"""Features of the library `datasets` that hold no text."""
TOLD_BYTES = 1 << 20
"""Bytes of a file between two notes of the progress of its reading."""


class Reader(Protocol):
    """Rows of one file by number."""

    path: Path
    """File that the rows come from, for errors."""
    num_rows: int

    def row(self, index: int) -> Any:
        """Return row `index`, from 0.

        Raises:
            ConfigError: the row can't be parsed.
        """
        ...

    def media_columns(self) -> dict[str, set[str]]:
        """Return the columns that hold images, audio or other files, with their kinds (`MEDIA`)."""
        ...


class LinesReader:
    """Rows of a file with a JSON object per line.

    Args:
        path: file with the rows.
        starts: position in bytes of each row, and of the end.
        origin: file that the rows were converted from, for errors; None: `path` itself.
    """

    def __init__(self, path: Path, starts: Path, origin: Path | None = None) -> None:
        self.path = origin or path
        # mapped: eight bytes a row, shared by all processes
        self._starts = np.load(starts, mmap_mode="r")
        # kept open: a file that is replaced under the same name does not change the rows
        self._file = path.open("rb")
        self.num_rows = len(self._starts) - 1

    def row(self, index: int) -> Any:
        """Return row `index`.

        Raises:
            ConfigError: the line is not JSON.
        """
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        try:
            return json.loads(line_at(self._file, start, end))
        except ValueError as error:
            raise ConfigError(f"{self.path}, row {index + 1}: not JSON: {error}") from None

    def media_columns(self) -> dict[str, set[str]]:
        """Return no column, since JSON holds text."""
        return {}


def line_at(file: IO[bytes], start: int, end: int) -> bytes:
    """Return the line that begins at a position in bytes, without its end; blank lines may stand behind it.

    Args:
        file: the open file, whose position stays where it is.
        start: position of the line.
        end: position of the next line that is not blank, or the end of the file.
    """
    # pread has no shared file position
    line, _, _ = os.pread(file.fileno(), end - start, start).partition(b"\n")
    return line


def line_starts(path: Path) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the position in bytes of each line that is not blank, and of the end of the file."""
    position, starts = 0, []
    with path.open("rb") as file, task(f"index {path.name}", path.stat().st_size, "bytes") as reading:
        for line in file:
            if not line.isspace():
                starts.append(position)
            position += len(line)
            if position - reading.done >= TOLD_BYTES:  # a call for each line would take as long as its reading
                reading.reach(position)
    return np.array([*starts, position], np.uint64)


class ArrowReader:
    """Rows of an Arrow file, mapped into memory: a stream, as `datasets` writes, or a file with a footer.

    Args:
        path: the file.
        origin: file that the rows were converted from, for errors; None: `path` itself.
    """

    def __init__(self, path: Path, origin: Path | None = None) -> None:
        pa = pyarrow(path)
        self.path = origin or path
        try:
            source = pa.memory_map(str(path))
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                footer = pa.ipc.open_file(source)
                self._schema, batches = footer.schema, map(footer.get_batch, range(footer.num_record_batches))
            else:
                stream = pa.ipc.open_stream(source)
                self._schema, batches = stream.schema, iter(stream)
            self._batches = list(batches)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{self.path} is no Arrow file: {error}") from None
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self.num_rows = self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Any:
        """Return row `index`."""
        number = bisect.bisect_right(self._ends, index)
        batch = self._batches[number]
        return batch.slice(index - (self._ends[number] - batch.num_rows), 1).to_pylist()[0]

    def media_columns(self) -> dict[str, set[str]]:
        """Return the columns that hold images, audio or other files, with their kinds (`MEDIA`)."""
        return media_columns(self._schema)


class ParquetReader:
    """Rows of a parquet file with small row groups: a group is decoded for a row, and kept for the next rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_parquet(path)
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._sizes = [group.num_rows for group in groups]
        self._ends = list(accumulate(self._sizes))
        self.num_rows: int = metadata.num_rows
        self.group_bytes = max((group.total_byte_size for group in groups), default=0)
        """Bytes of the largest row group, decoded."""
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()

    def row(self, index: int) -> Any:
        """Return row `index`."""
        number = bisect.bisect_right(self._ends, index)
        return self._group(number).slice(index - (self._ends[number] - self._sizes[number]), 1).to_pylist()[0]

    def media_columns(self) -> dict[str, set[str]]:
        """Return the columns that hold images, audio or other files, with their kinds (`MEDIA`)."""
        return media_columns(self._file.schema_arrow)

    def batches(self) -> Iterator["pa.RecordBatch"]:
        """Yield all rows in small batches, with few of them in memory at a time."""
        metadata = self._file.metadata
        num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        batch_size = max(1, min(1024, GROUP_BYTES * self.num_rows // max(num_bytes, 1)))
        # in one thread: columns decoded side by side need more memory, and no less CPU time
        yield from self._file.iter_batches(batch_size=batch_size, use_threads=False)

    @cached_property
    def schema(self) -> "pa.Schema":
        """Columns and their types."""
        return self._file.schema_arrow

    def _group(self, number: int) -> "pa.Table":
        if number not in self._kept:
            self._kept[number] = self._file.read_row_group(number)
            while len(self._kept) > max(1, CACHED_BYTES // max(self.group_bytes, 1)):
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


def open_parquet(path: Path) -> Any:
    """Open a parquet file; pages are read as they are needed.

    Raises:
        ConfigError: the file is no parquet file.
    """
    pa = pyarrow(path)
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is no parquet file: {error}") from None


def write_arrow(reader: ParquetReader, target: Path) -> None:
    """Write the rows of a parquet file as an Arrow file."""
    pa = pyarrow(target)
    with (
        pa.OSFile(str(target), "wb") as sink,
        pa.ipc.new_file(sink, reader.schema) as writer,
        task(f"convert {reader.path.name}", reader.num_rows, "rows") as converting,
    ):
        for batch in reader.batches():
            writer.write_batch(batch)
            converting.advance(batch.num_rows)


def media_columns(schema: "pa.Schema") -> dict[str, set[str]]:
    """Return the columns that hold images, audio or other files, as the library `datasets` notes them in a schema."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features") or {}
    return {name: kinds for name, feature in features.items() if (kinds := set(_media_in(feature)))}


def _media_in(feature: Any) -> Iterator[str]:
    """Yield the kinds of media of a feature and of its parts."""
    if isinstance(feature, dict):
        if feature.get("_type") in MEDIA:
            yield feature["_type"]
        for part in feature.values():
            yield from _media_in(part)
    elif isinstance(feature, Sequence) and not isinstance(feature, str):
        for part in feature:
            yield from _media_in(part)
