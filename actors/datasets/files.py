"""Files of a data set: which files a path and the name of a split mean."""

import glob
import json
import re
from pathlib import Path
from typing import Any

from schemas.config.data import DATA_SUFFIX
from schemas.errors import ConfigError

SPLIT_WORDS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
"""Words that begin the name of a file with a split of its own."""
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes: in the folder of a data set, and in the folder of several splits."""


def is_on_hub(path: str) -> bool:
    """Return whether a loaded configuration's path names a data set on the hub; all other paths are absolute."""
    return not Path(path).is_absolute()


def find_files(path: str, split: str, key: str) -> list[Path]:
    """Return the files with the rows of a split, in the order of their rows.

    Args:
        path: file, folder, or pattern of files.
        split: name of the split.
        key: configuration key of the path, for errors.

    Raises:
        ConfigError: there are no such files, or they have no such split.
    """
    folder, where = Path(path), f"environments[].{key}"
    if folder.is_dir():
        return _in_folder(folder, split, where)
    found = [folder] if folder.is_file() else [Path(name) for name in sorted(glob.glob(path, recursive=True))]  # noqa: PTH207 - of an absolute pattern
    if not found:
        raise ConfigError(f"{where}: there is no file {path}")
    if split != "train":
        raise ConfigError(
            f"{where}: {path} has no split {split!r}; files have the split train alone: name other files in eval_path, "
            "or take rows as in train[:100]"
        )
    return _known(found, where)


def _in_folder(folder: Path, split: str, where: str) -> list[Path]:
    if (folder / SAVED_SPLITS).is_file():
        splits = _json(folder / SAVED_SPLITS, where).get("splits", [])
        if split not in splits:
            raise ConfigError(f"{where}: {folder} has no split {split!r}; it has {', '.join(map(str, splits))}")
        folder = folder / split
    if (folder / SAVED).is_file():
        found = [folder / str(file["filename"]) for file in _json(folder / SAVED, where).get("_data_files", [])]
        if missing := [str(file) for file in found if not file.is_file()]:
            raise ConfigError(f"{where}: {folder / SAVED} names {', '.join(missing)}, which is not there")
    else:
        files = sorted(file for file in folder.rglob("*") if file.is_file() and DATA_SUFFIX.search(file.name))
        found = [file for file in files if split in _words_of(file, folder)]
        # files whose names speak of no split are rows for training, as on the hub
        if not found and split == "train":
            found = [file for file in files if not _words_of(file, folder).intersection(SPLIT_WORDS)]
        if not found:
            names = ", ".join(str(file.relative_to(folder)) for file in files[:5]) or "no data files"
            raise ConfigError(f"{where}: {folder} has no files of the split {split!r}; it has {names}")
    return _known(found, where)


def _words_of(file: Path, folder: Path) -> set[str]:
    """Return the words of a file's name that may be a split: first words of its name and of the folders above."""
    return {re.split(r"[-._]", part)[0] for part in file.relative_to(folder).parts}


def _known(files: list[Path], where: str) -> list[Path]:
    """Return the files, if all are data files of one format.

    Raises:
        ConfigError: a file has another suffix.
    """
    for file in files:
        if not DATA_SUFFIX.search(file.name):
            raise ConfigError(
                f"{where}: {file} is no data file; the name must end in .parquet, .arrow, .csv, .json or .jsonl (the "
                "last three also with .gz, .bz2, .xz or .zst)"
            )
    return files


def _json(file: Path, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {file} can't be read: {error}") from None
