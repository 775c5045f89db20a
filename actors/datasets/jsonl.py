"""JSON Lines file as a dataset: each row is an example.

The file is read once to index the rows, and with `check` to parse every row. Otherwise a row is parsed when its example
is read, so memory is eight bytes a row. The file stays open: an example costs one system call, and a file that is
replaced under the same name does not change the examples.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from actors.datasets.base import Example, why_not_sendable
from actors.datasets.downloads import download, downloads_folder
from actors.datasets.images import ImageSource
from actors.datasets.prepared import Prepared
from actors.datasets.readers import TOLD_BYTES, line_at
from actors.datasets.rows import PromptKeys, image_urls, to_example
from actors.process.tasks import task
from schemas.config.data import JsonlConfig, Split
from schemas.errors import ConfigError


class Jsonl:
    """Rows of `path` (train) or `eval_path` (eval; no examples if the key is empty).

    Args:
        config: path and columns.
        split: `train` or `eval`.
        check: parse and check every row now.
        prepared: folder of the run, for images that are downloaded; None: they are not looked at.
        of_environment: the rows are of an environment, which may make prompts of its own.

    Raises:
        ConfigError: the file can't be read or has no rows, or (with `check`) a row is not a JSON object with a prompt
            in the prompt column; the message names file and line. Or an image can't be downloaded.
    """

    def __init__(
        self,
        config: JsonlConfig,
        split: Split,
        check: bool = True,
        prepared: Prepared | None = None,
        *,
        of_environment: bool = False,
    ) -> None:
        self._check = check
        self.key = "path" if split == "train" else "eval_path"
        if of_environment:
            self.key = self.key.replace("path", "rows")
        given = config.path if split == "train" else config.eval_path
        self.path = Path(given) if given else None
        images = None
        if self.path and not of_environment:
            downloads = downloads_folder(prepared, config.images)
            images = ImageSource(config.images, self.path.parent, downloads=downloads)
        self._prompt_keys = PromptKeys(
            config.prompt_column,
            "prompt_column",
            config.system_prompt,
            config.chat,
            may_be_empty=of_environment,
            images=images,
        )
        # 8 bytes a row; a list of integers takes 36
        self._offsets = array("Q")
        """Position in bytes of each row, then of the end of the file."""
        self.columns: set[str] = set()
        """Columns present in every row, without the prompt; empty without `check`."""
        self.num_unsendable, self.first_unsendable = 0, ""
        """Number of rows that can't be sent with a group, and the reason for the first; 0 and empty without `check`."""
        self.num_with_images = 0
        """Number of rows whose prompt has images; 0 without `check`."""
        self.image_bytes = 0
        """Bytes of the images of all these rows."""
        if self.path:
            self._read(self.path, prepared)
        self.num_examples: int | None = max(0, len(self._offsets) - 1)

    @property
    def num_read(self) -> int:
        """Number of rows that a check reads: all."""
        return self.num_examples or 0

    def example(self, index: int) -> Example:
        """Return row `index`, counted over the lines that are not blank.

        Raises:
            ConfigError: the row is faulty, or the file has changed since it was indexed.
        """
        start, end = self._offsets[index], self._offsets[index + 1]
        line = line_at(self._file, start, end)
        return self._example(line, f"row {index + 1} is not what it was when the file was read first")

    def digest(self, num_rows: int | None = None) -> str:
        """Return the sha256 (hex) of the first `num_rows` rows (None: all), without blank lines and line ends."""
        found, left = hashlib.sha256(), self.num_examples if num_rows is None else num_rows
        self._file.seek(0)
        for line in self._file:
            if not left:
                break
            # stripped: a file saved with other line ends is the same data
            if row := line.strip():
                found.update(row + b"\n")
                left -= 1
        return found.hexdigest()

    def _read(self, path: Path, prepared: Prepared | None) -> None:
        position, images = 0, self._prompt_keys.images
        try:
            self._file = path.open("rb")
            if prepared is not None and images is not None and images.downloads is not None:
                content = [prepared.identity(path)["digest"], self._prompt_keys.column, images.keys.column]
                download(images, content, self._urls())
                self._file.seek(0)
            with task(f"read {path.name}", os.fstat(self._file.fileno()).st_size, "bytes") as reading:
                for number, line in enumerate(self._file, start=1):
                    if line.strip():
                        if self._check:
                            self._check_row(line, number)
                        self._offsets.append(position)
                    position += len(line)
                    if position - reading.done >= TOLD_BYTES:
                        reading.reach(position)
        except OSError as error:
            raise ConfigError(f"environments[].{self.key}: {path} can't be read: {error.strerror}") from None
        if not self._offsets:
            raise ConfigError(f"environments[].{self.key}: {path} has no rows")
        # the end of the file, where the last row ends
        self._offsets.append(position)

    def _urls(self) -> Iterator[tuple[str, str]]:
        """Yield place and URL of each image that is at one."""
        for number, line in enumerate(self._file, start=1):
            try:
                row = json.loads(line)
            except ValueError:  # reported when the row is read
                continue
            where = f"environments[].{self.key}: {self.path}, line {number}"
            yield from ((where, url) for url in image_urls(row, self._prompt_keys))

    def _check_row(self, line: bytes, number: int) -> None:
        """Parse the row of a line, and note its columns and whether it can be sent."""
        example = self._example(line, f"line {number}")
        columns = set(example.columns)
        # no offset yet: the first row, whose columns start the intersection
        self.columns = self.columns & columns if self._offsets else columns
        self.num_with_images += bool(example.images)
        self.image_bytes += sum(len(image.data) for image in example.images)
        if why := why_not_sendable(example):
            self.first_unsendable = self.first_unsendable or f"line {number}, {why}"
            self.num_unsendable += 1

    def _example(self, line: bytes, place: str) -> Example:
        where = f"environments[].{self.key}: {self.path}, {place}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        return to_example(row, self._prompt_keys, where)
