"""Rows of text files: JSON Lines, JSON and CSV, also compressed, one row after the other."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from schemas.config.data import DATA_SUFFIX
from schemas.errors import ConfigError

CHUNK = 1 << 20
"""Characters of a JSON file that are read at a time."""
BROKEN = (OSError, EOFError, lzma.LZMAError, ValueError)
"""Errors of a compressed file that is cut off or damaged."""


def pyarrow(path: Path) -> Any:
    """Return the module pyarrow.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install grpo-actors[data] ({error})") from None
    return pyarrow


def rows_of_text(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place (`line 3`, `row 3`) and value of each row of a text file.

    Values of CSV files are text. A JSON file has a list of objects, or an object per line.

    Raises:
        ConfigError: a row can't be parsed, or the file can't be decompressed. The message has the path and the place.
    """
    match = DATA_SUFFIX.search(path.name)
    assert match is not None
    try:
        with open_text(path) as stream:
            if match[2] == "csv":
                yield from _rows_of_csv(stream)
            elif match[2] == "json" and _starts_with_list(path):
                yield from _rows_of_list(stream)
            else:
                yield from _rows_of_lines(stream)
    except _RowError as error:
        raise ConfigError(f"{path}, {error}") from None
    except BROKEN as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} can't be read: {words}") from None


def is_compressed(path: Path) -> bool:
    """Return whether a data file is compressed as a whole."""
    match = DATA_SUFFIX.search(path.name)
    return match is not None and match[3] is not None


def is_lines(path: Path) -> bool:
    """Return whether a data file has a row per line and is not compressed, so that rows can be read where they are."""
    match = DATA_SUFFIX.search(path.name)
    return match is not None and match[2] in ("jsonl", "ndjson") and match[3] is None


def open_text(path: Path) -> BinaryIO:
    """Return the decompressed bytes of a file as a stream."""
    suffix = path.suffix
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    if suffix == ".bz2":
        return cast("BinaryIO", bz2.open(path, "rb"))
    if suffix == ".xz":
        return cast("BinaryIO", lzma.open(path, "rb"))
    if suffix == ".zst":
        pa = pyarrow(path)
        # the buffer gives lines, which Arrow's stream lacks
        return cast("BinaryIO", io.BufferedReader(pa.input_stream(str(path), compression="zstd"), CHUNK))
    return path.open("rb")


class _RowError(ValueError):
    """Row that can't be parsed: its place, and the reason."""


def _rows_of_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise _RowError(f"line {number}: not JSON: {error}") from None


def _starts_with_list(path: Path) -> bool:
    with open_text(path) as stream:
        return stream.read(CHUNK).lstrip(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _rows_of_list(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the items of a list in JSON, without holding more of the text than an item and a chunk."""
    text, decoder, number = io.TextIOWrapper(stream, encoding="utf-8-sig"), json.JSONDecoder(), 0
    left = text.read(CHUNK).lstrip()[1:]
    while True:
        # the separator between two items, or the end of the list
        left = left.lstrip()
        if number and left.startswith(","):
            left = left[1:].lstrip()
        if left.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(left)
        except ValueError as error:
            # doubled, since a long item is parsed again from its start
            more = text.read(max(CHUNK, len(left)))
            if not more:
                raise _RowError(f"row {number + 1}: not JSON: {error}") from None
            left += more
        else:
            number, left = number + 1, left[end:] or text.read(CHUNK)
            yield f"row {number}", value


def _rows_of_csv(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    # Python's limit of 131 072 characters for a field is smaller than some prompts
    csv.field_size_limit(sys.maxsize)
    rows = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    try:
        names = next(rows, None)
        if not names:
            raise _RowError("line 1: the first line must have the names of the columns")
        if len(set(names)) < len(names):
            raise _RowError(f"line 1: two columns have the same name: {', '.join(names)}")
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) != len(names):
                raise _RowError(f"row {number}: has {len(row)} fields, and the first line names {len(names)} columns")
            yield f"row {number}", dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise _RowError(f"line {rows.line_num}: not CSV: {error}") from None
