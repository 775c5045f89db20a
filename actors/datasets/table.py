"""A data set in files or on the hub: rows by number, with renamed columns, filtered and cut to a limit."""

import contextlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from actors.datasets.base import Example, why_not_sendable
from actors.datasets.downloads import download, downloads_folder
from actors.datasets.files import find_files, is_on_hub
from actors.datasets.hub import fetch, find_commit
from actors.datasets.images import ImageSource
from actors.datasets.prepared import FileIdentity, Prepared, digest_of
from actors.datasets.readers import ArrowReader, ParquetReader, Reader
from actors.datasets.rows import PromptKeys, image_urls, to_example, without_nulls
from actors.datasets.texts import rows_of_text
from actors.process.tasks import task
from schemas.config.data import DATA_SUFFIX, DatasetConfig, Split
from schemas.config.splits import SplitPart, parse_split
from schemas.errors import ConfigError

NUM_PREVIEWED = 100
"""Rows of a data set that `actors check` reads."""


class TableIdentity(TypedDict, total=False):
    """Identity of a data set's rows."""

    rows: int
    files: list[FileIdentity]
    """Files of the training rows; empty for a data set on the hub."""
    commits: dict[str, str]
    """Commits of data sets on the hub, by `name@revision`."""
    selection: str
    """Digest of the numbers of the rows that the filter keeps; empty without a filter."""


class Source:
    """Files of one split of a data set, not yet opened.

    Args:
        config: configuration of the data set.
        split: `train` or `eval`.
        prepared: folder with digests, commits and conversions.
    """

    def __init__(self, config: DatasetConfig, split: Split, prepared: Prepared) -> None:
        self.config, self._prepared = config, prepared
        self.key, self.path, self._rows = config.sources[split]
        if not is_on_hub(self.path) and config.revision and split == "train":
            raise ConfigError(f"environments[].revision: {self.path} is not on the hub, so there are no revisions")
        if not is_on_hub(self.path) and config.config and split == "train":
            raise ConfigError(f"environments[].config: {self.path} is not on the hub, so there are no configurations")

    @cached_property
    def parts(self) -> list[tuple[SplitPart, list[Path]]]:
        """Parts of the split, each with its files."""
        return [(part, self._files(part.name)) for part in parse_split(self._rows)]

    @property
    def pin(self) -> str:
        """Name of the data set's commit in the run: name and revision. Empty for local files."""
        return f"{self.path}@{self.config.revision or 'main'}" if is_on_hub(self.path) else ""

    @cached_property
    def commit(self) -> str:
        """Commit of a data set on the hub, looked up once for a run; empty for local files."""
        if not self.pin:
            return ""
        revision, key = self.config.revision, self.key
        return str(self._prepared.noted("commits.json", self.pin, lambda: find_commit(self.path, revision, key)))

    def identity(self) -> TableIdentity:
        """Return the identity of the files, without the number of rows.

        Raises:
            ConfigError: a file can't be read.
        """
        if self.pin:
            return TableIdentity(files=[], commits={self.pin: self.commit})
        files = dict.fromkeys(itertools.chain.from_iterable(files for _, files in self.parts))
        with _named(self.key):
            return TableIdentity(files=[self._prepared.identity(file) for file in files], commits={})

    def _files(self, split: str) -> list[Path]:
        if not self.pin:
            return find_files(self.path, split, self.key)
        config, commit = self.config.config, self.commit

        def download() -> list[dict[str, Any]]:
            files = fetch(self.path, config, split, commit, self.key)
            return [{"path": str(file), "bytes": file.stat().st_size} for file in files]

        def is_there(files: list[dict[str, Any]]) -> bool:
            return all(
                Path(one["path"]).is_file() and Path(one["path"]).stat().st_size == one["bytes"] for one in files
            )

        name = f"{self.path} {config or ''} {split} {commit}"
        return [Path(one["path"]) for one in self._prepared.noted("downloads.json", name, download, is_there)]


class Table:
    """Rows of one split of a data set; no examples if the split is not configured.

    Args:
        config: configuration of the data set.
        split: `train` or `eval`.
        prepared: folder with digests, commits and conversions.

    Raises:
        ConfigError: the data set can't be read, has no rows, or has columns with audio or other files; or an image
            can't be downloaded.
    """

    def __init__(self, config: DatasetConfig, split: Split, prepared: Prepared) -> None:
        self._config, self._prompt_keys = config, _prompt_keys(config, split, prepared)
        self._spans: list[tuple[Reader, range]] = []
        self._selection: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.num_examples: int | None = 0
        if split not in config.sources:
            return
        self.source = Source(config, split, prepared)
        self._open(prepared)
        self._ends = np.cumsum([len(rows) for _, rows in self._spans])
        num_rows = int(self._ends[-1])
        if config.filter:
            self._selection = self._filtered(prepared, config.filter, num_rows)
            num_rows = len(self._selection)
        if not num_rows:
            reason = f"the filter {config.filter} keeps none" if config.filter else "there are none"
            raise ConfigError(f"environments[].{self.source.key}: {self.source.path} has no rows: {reason}")
        self.num_examples = min(num_rows, config.limit or num_rows) if split == "train" else num_rows
        if (images := self._prompt_keys.images) and images.downloads is not None:
            content = [self.identity(), self._spanned(), config.columns, config.images.column]
            download(images, content, self._urls(self.num_examples))

    def example(self, index: int) -> Example:
        """Return example `index`.

        Raises:
            ConfigError: the row has no prompt, or can't be parsed.
        """
        with _named(self.source.key):
            row, where = self._row(index)
            return to_example(row, self._prompt_keys, where)

    def identity(self) -> TableIdentity:
        """Return the identity of all rows."""
        selection = "" if self._selection is None else digest_of(np.ascontiguousarray(self._selection).tobytes())
        return TableIdentity({**self.source.identity(), "rows": self.num_examples or 0, "selection": selection})

    def _row(self, index: int) -> tuple[Any, str]:
        """Return the row of example `index`, and its place for errors."""
        reader, number = self._place(index if self._selection is None else int(self._selection[index]))
        where = f"{reader.path}, row {number + 1}"
        return _renamed(reader.row(number), self._config, where), where

    def _urls(self, num_examples: int) -> Iterator[tuple[str, str]]:
        """Yield place and URL of each image that is at one."""
        for index in range(num_examples):
            with _named(self.source.key):
                row, where = self._row(index)
            where = f"environments[].{self.source.key}: {where}"
            yield from ((where, url) for url in image_urls(row, self._prompt_keys))

    def _spanned(self) -> list[list[Any]]:
        """Return the rows before the filter as plain values: file, first row and end of each span."""
        return [[str(reader.path), rows.start, rows.stop] for reader, rows in self._spans]

    def _open(self, prepared: Prepared) -> None:
        readers: dict[Path, Reader] = {}
        for part, files in self.source.parts:
            for file in files:
                if file not in readers:
                    with _named(self.source.key):
                        readers[file] = prepared.reader(file)
                        _refuse_media(readers[file], self._config)
            # the part's rows are counted over its files together
            chosen, first = part.rows(sum(readers[file].num_rows for file in files)), 0
            for file in files:
                num_rows = readers[file].num_rows
                rows = range(max(chosen.start - first, 0), min(chosen.stop - first, num_rows))
                self._spans += [(readers[file], rows)] if rows else []
                first += num_rows
        if not self._spans:
            raise ConfigError(f"environments[].{self.source.key}: {self.source.path} has no rows")

    def _place(self, index: int) -> tuple[Reader, int]:
        """Return the reader of a row before the filter, and the row's number in the file."""
        span = int(np.searchsorted(self._ends, index, side="right"))
        reader, rows = self._spans[span]
        return reader, rows[index - int(self._ends[span]) + len(rows)]

    def _filtered(self, prepared: Prepared, path: str, num_rows: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return the numbers of the rows that the filter keeps. They are kept with the run."""
        # all that the result depends on: with another filter of the same name the rows are judged again
        content = [self.source.identity(), self._spanned(), self._config.columns, path, _code_digest(path)]
        name = f"{digest_of(json.dumps(content).encode())}.rows.npy"

        def judge(target: Path) -> None:
            found = np.fromiter(self._kept(path, num_rows), np.int64)
            with target.open("wb") as file:
                np.save(file, found)

        return np.load(prepared.made(name, judge), mmap_mode="r")  # type: ignore[no-any-return]

    def _kept(self, path: str, num_rows: int) -> Iterator[int]:
        # imported here: with a result of an earlier start no user code is loaded
        from actors.process.user_code import load_function

        function = load_function(path, "environments[].filter")
        with task(f"filter rows by {path}", num_rows, "rows") as filtering:
            for index in range(num_rows):
                reader, number = self._place(index)
                with _named(self.source.key):
                    row = _renamed(reader.row(number), self._config, f"{reader.path}, row {number + 1}")
                if _keeps(function, row, f"environments[].filter: {path}, on row {number + 1} of {reader.path}"):
                    yield index
                filtering.advance()


class Preview:
    """First rows of a data set in local files, for checks before a start; nothing is written.

    Args:
        config: configuration of the data set.
        split: `train` or `eval`, which must be configured.

    Raises:
        ConfigError: the files can't be read, or one of the rows is faulty.
    """

    def __init__(self, config: DatasetConfig, split: Split) -> None:
        source = Source(config, split, Prepared(Path()))
        self.key, self.path = source.key, Path(source.path)
        self._examples: list[Example] = []
        self.columns: set[str] = set()
        """Columns present in every row that was read, without the prompt."""
        self.num_unsendable, self.first_unsendable = 0, ""
        """Number of rows that can't be sent with a group, and the reason for the first."""
        self.num_with_images = 0
        """Number of rows whose prompt has images."""
        self.image_bytes = 0
        """Bytes of the images of all these rows."""
        files = itertools.chain.from_iterable(files for _, files in source.parts)
        rows = itertools.chain.from_iterable(_first_rows(file, config) for file in files)
        keys = _prompt_keys(config, split, None)
        with _named(source.key):
            for place, row in itertools.islice(rows, NUM_PREVIEWED):
                example = to_example(_renamed(row, config, place), keys, place)
                columns = set(example.columns)
                self.columns = self.columns & columns if self._examples else columns
                self.num_with_images += bool(example.images)
                self.image_bytes += sum(len(image.data) for image in example.images)
                if why := why_not_sendable(example):
                    self.first_unsendable = self.first_unsendable or f"{place}, {why}"
                    self.num_unsendable += 1
                self._examples.append(example)
            self.num_read = len(self._examples)
            if not self.num_read:
                raise ConfigError(f"{source.path} has no rows")
            # the number of all rows is not known before the files are indexed: at least one more
            self.num_examples: int | None = self.num_read + (next(rows, None) is not None)

    def example(self, index: int) -> Example:
        """Return example `index` of the rows that were read."""
        return self._examples[index]


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Name the configuration key in errors about files."""
    try:
        yield
    except ConfigError as error:
        named = (text if text.startswith("output_dir") else f"environments[].{key}: {text}" for text in error.problems)
        raise ConfigError(*named) from error.__cause__


def _first_rows(file: Path, config: DatasetConfig) -> Iterator[tuple[str, Any]]:
    """Yield place and value of the rows of a file, without an index."""
    match = DATA_SUFFIX.search(file.name)
    assert match is not None
    if match[1] is None:
        yield from ((f"{file}, {place}", row) for place, row in rows_of_text(file))
        return
    if match[1] == "arrow":
        reader = ArrowReader(file)
        rows: Iterator[Any] = map(reader.row, range(reader.num_rows))
        _refuse_media(reader, config)
    else:
        parquet = ParquetReader(file)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in parquet.batches())
        _refuse_media(parquet, config)
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))


def _renamed(row: Any, config: DatasetConfig, where: str) -> Any:
    """Return a row with the columns of the configuration, in the order of the file.

    Raises:
        ConfigError: the row lacks a column that is named.
    """
    if not isinstance(row, dict):
        return row
    for name, given in config.columns.items():
        if given is not None and given not in row:
            raise ConfigError(f"{where}: no column {given!r} (columns.{name}); its columns are {', '.join(row)}")
    found = {}
    for name, value in row.items():
        names = [new for new, given in config.columns.items() if given == name]
        # a column stays, unless it is renamed, left out, or another one takes its name
        for new in names or ([] if name in config.columns else [name]):
            found[new] = without_nulls(value) if new == "prompt" else value
    return found


def _keeps(function: Callable[..., Any], row: Any, where: str) -> bool:
    """Return the judgement of a filter.

    Raises:
        ConfigError: the function fails, or returns anything but True or False.
    """
    try:
        keeps = function(row)
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if not isinstance(keeps, bool | np.bool_):
        raise ConfigError(f"{where}: must return True or False, returned {keeps!r:.80}")
    return bool(keeps)


def _code_digest(path: str) -> str:
    """Return the digest of the file that a function is defined in; empty if there is no such file."""
    place, _, _ = path.rpartition(":")
    if not place.endswith(".py"):
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):  # loading the function tells
            return ""
        place = (spec and spec.origin) or ""
    file = Path(place)
    return digest_of(file.read_bytes()) if file.is_file() else ""


def _refuse_media(reader: Reader, config: DatasetConfig) -> None:
    """Refuse columns with audio or other files, and with images that no prompt has, unless they are left out.

    Raises:
        ConfigError: there is such a column.
    """
    # by their new names: images may be in the prompt's messages, or in the column of images
    of_prompts = {"prompt", config.images.column}
    names = {given: new for new, given in config.columns.items() if given is not None}
    refused = [
        name
        for name, kinds in reader.media_columns().items()
        if config.columns.get(name, name) is not None
        and not (kinds == {"Image"} and names.get(name, name) in of_prompts)
    ]
    if refused:
        advice = ", ".join(f"{name}: null" for name in refused)
        raise ConfigError(
            f"{reader.path} has images, audio or files in column {', '.join(refused)}; name a column with the images "
            f"of prompts in images.column, and leave the others out with columns: {{{advice}}}"
        )


def _prompt_keys(config: DatasetConfig, split: Split, prepared: Prepared | None) -> PromptKeys:
    _, place = config.local_places.get(split, ("", ""))
    folder = Path(place) if place else None
    if folder is not None and not folder.is_dir():
        folder = folder.parent
    return PromptKeys(
        "prompt",
        "columns.prompt",
        config.system_prompt,
        config.chat,
        cut_answer=config.cut_answer,
        images=ImageSource(config.images, folder, downloads=downloads_folder(prepared, config.images)),
    )
