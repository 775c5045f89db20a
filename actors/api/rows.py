"""Data sets of a Python program as JSON Lines files of a run."""

import json
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from schemas.errors import ConfigError


def write_rows(rows: Any, folder: Path, name: str) -> tuple[Path, int]:
    """Write a data set to `folder/NAME-DIGEST.jsonl`; return the file and the number of rows.

    The same rows have the same file name, so that a continued run finds the data that it was started with.

    Args:
        rows: a `datasets.Dataset`, or a list of dictionaries. A column `prompt` has a text or a list of messages.
        folder: folder of the file; created if it does not exist.
        name: start of the file's name, and the argument's name in errors.

    Raises:
        ConfigError: the data has no rows or an unknown length, or a value that JSON does not have.
    """
    if isinstance(rows, Mapping):
        splits = ", ".join(map(str, rows))
        raise ConfigError(f"{name}: is a map of splits ({splits}); pass one of them, such as dataset['train']")
    if not (isinstance(rows, Iterable) and isinstance(rows, Sized)):
        kind = type(rows).__name__
        raise ConfigError(f"{name}: {kind} has no length; pass a list or a Dataset, e.g. Dataset.from_list(list(rows))")
    if not len(rows):
        raise ConfigError(f"{name}: has no rows")
    folder.mkdir(parents=True, exist_ok=True)
    digest, partial = blake3(), folder / f"{name}.partial"
    with partial.open("wb") as file:
        for number, row in enumerate(rows):
            line = _line(row, name, number)
            digest.update(line)
            file.write(line)
    path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
    partial.replace(path)
    return path, len(rows)


def _line(row: Any, name: str, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}: row {number} is {type(row).__name__}, not a dictionary of columns")
    if "prompt" not in row:
        raise ConfigError(f"{name}: row {number} has no column 'prompt'; it has {', '.join(map(str, row))}")
    try:
        return (json.dumps(dict(row), default=_plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        words = f"{name}: row {number} has a value that JSON does not have: {error}"
        raise ConfigError(f"{words}; remove or convert its column") from None


def _plain(value: Any) -> Any:
    """Return a value of NumPy as a plain one.

    Raises:
        TypeError: the value has no form in JSON.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__}")
