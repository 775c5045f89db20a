"""Supervised examples (`trainer.sft.path`): a JSON Lines file with `prompt` and `completion` in each row."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from actors.datasets.base import is_message
from actors.datasets.downloads import download, downloads_folder
from actors.datasets.image_parts import urls_of, with_images
from actors.datasets.images import Image, ImageSource, values_of
from actors.datasets.prepared import Prepared
from actors.datasets.readers import line_at
from actors.process.tasks import task
from schemas.config.sft import SftConfig
from schemas.errors import ConfigError
from schemas.messages import Prompt

KEY = "trainer.sft.path"
"""Configuration key named in errors."""


class SupervisedExample(NamedTuple):
    """A prompt and the completion to learn."""

    prompt: Prompt
    """Text, or a list of messages, each image in them named by its digest."""
    completion: str | dict[str, Any]
    """Text; after messages also the assistant's message."""
    images: tuple[Image, ...] = ()
    """Images in the order of their parts in the prompt."""


class SupervisedRows:
    """Rows of the file, blank lines skipped. A row is read whenever it is asked for, so memory holds no images.

    Args:
        sft: file, and limits of images.
        prepared: folder of the run, for images that are downloaded; None: they are not looked at.

    Raises:
        ConfigError: the file can't be read or has no rows, or an image can't be downloaded.
    """

    def __init__(self, sft: SftConfig, prepared: Prepared | None = None) -> None:
        self.path = Path(sft.path)
        downloads = downloads_folder(prepared, sft.images)
        self._images = ImageSource(sft.images, self.path.parent, "trainer.sft.images", downloads)
        self._places = array("Q")
        """Position in bytes of each row."""
        # editors count blank lines too
        self._line_numbers = array("Q")
        position = 0
        try:
            # kept open: a file that is replaced under the same name does not change the examples
            self._file = self.path.open("rb")
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    self._places.append(position)
                    self._line_numbers.append(number)
                position += len(line)
        except OSError as error:
            raise ConfigError(f"{KEY}: {self.path} can't be read: {error.strerror}") from None
        if not self._places:
            raise ConfigError(f"{KEY}: {self.path} has no rows")
        self._places.append(position)
        if prepared is not None and downloads is not None:
            content = [KEY, prepared.identity(self.path)["digest"], sft.images.column]
            download(self._images, content, self._urls())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._line_numbers)

    def __iter__(self) -> Iterator[SupervisedExample]:
        """Yield all examples, and tell the progress.

        Raises:
            ConfigError: as `example`.
        """
        with task(f"read {self.path.name}", len(self), "rows") as reading:
            for index in range(len(self)):
                yield self.example(index)
                reading.advance()

    def example(self, index: int) -> SupervisedExample:
        """Return the example of row `index`, from 0.

        Raises:
            ConfigError: the row lacks prompt or completion, or an image can't be used; the message names file and line.
        """
        return self._parsed(self._line(index), self.where(index))

    def where(self, index: int) -> str:
        """Return the place of a row, for errors: key, file and line."""
        return f"{KEY}: {self.path}, line {self._line_numbers[index]}"

    def _line(self, index: int) -> bytes:
        return line_at(self._file, self._places[index], self._places[index + 1])

    def _urls(self) -> Iterator[tuple[str, str]]:
        """Yield place and URL of each image that is at one."""
        for index in range(len(self)):
            try:
                row = json.loads(self._line(index))
            except ValueError:  # reported when the row is read
                continue
            if isinstance(row, dict):
                urls = urls_of(row.get("prompt"), self._in_column(row))
                yield from ((self.where(index), url) for url in urls)

    def _in_column(self, row: dict[str, Any]) -> list[Any]:
        column = self._images.keys.column
        return values_of(row.get(column)) if column else []

    def _parsed(self, line: bytes, where: str) -> SupervisedExample:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not {"prompt", "completion"} <= row.keys():
            raise ConfigError(f"{where}: a row must be an object with `prompt` and `completion`")
        prompt, completion = row["prompt"], row["completion"]
        in_column = self._in_column(row)
        # messages take either kind of completion, a text prompt only text: it has no roles
        if isinstance(prompt, list) and prompt and all(map(is_message, prompt)):
            shown, images = with_images(prompt, in_column, self._images, where)
            if is_message(completion):
                # a completion is what the policy writes, and it writes no images
                with_images([completion], (), None, f"{where}: the completion")
            elif not isinstance(completion, str):
                raise ConfigError(
                    f"{where}: the completion of messages must be text, or one message with `role` and `content`"
                )
            return SupervisedExample(shown, completion, images)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ConfigError(
                f"{where}: prompt and completion must be text, or the prompt a list of messages with `role` and "
                "`content`"
            )
        if in_column:
            raise ConfigError(
                f"{where}: column {self._images.keys.column} has images, and the prompt is no list of messages"
            )
        return SupervisedExample(prompt, completion)
