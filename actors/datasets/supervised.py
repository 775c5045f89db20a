"""Supervised examples (`trainer.sft.path`): a JSON Lines file with `prompt` and `completion` in each row."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from actors.datasets.base import is_message
from actors.datasets.image_parts import with_images
from actors.process.tasks import task
from schemas.errors import ConfigError
from schemas.messages import Prompt

KEY = "trainer.sft.path"
"""Configuration key named in errors."""


class SupervisedExample(NamedTuple):
    """A prompt and the completion to learn."""

    prompt: Prompt
    """Text, or a list of messages."""
    completion: str | dict[str, Any]
    """Text; after messages also the assistant's message."""


def read_supervised(path: Path) -> list[SupervisedExample]:
    """Return all examples of a file, blank lines skipped.

    Raises:
        ConfigError: the file can't be read or has no rows, or a row lacks prompt or completion; the message names file
            and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} can't be read: {error.strerror}") from None
    # line numbers count blank lines too, as editors do
    found = []
    with task(f"read {path.name}", len(lines), "lines") as reading:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_example(line, f"{KEY}: {path}, line {number}"))
            reading.advance()
    if not found:
        raise ConfigError(f"{KEY}: {path} has no rows")
    return found


def _example(line: bytes, where: str) -> SupervisedExample:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not {"prompt", "completion"} <= row.keys():
        raise ConfigError(f"{where}: a row must be an object with `prompt` and `completion`")
    prompt, completion = row["prompt"], row["completion"]
    # messages take either kind of completion, a text prompt only text: it has no roles
    if isinstance(prompt, list) and prompt and all(map(is_message, prompt)):
        with_images(prompt, (), None, where)
        if isinstance(completion, str):
            return SupervisedExample(prompt, completion)
        if is_message(completion):
            with_images([completion], (), None, f"{where}: the completion")
            return SupervisedExample(prompt, completion)
        raise ConfigError(f"{where}: the completion of messages must be text, or one message with `role` and `content`")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"{where}: prompt and completion must be text, or the prompt a list of messages with `role` and `content`"
        )
    return SupervisedExample(prompt, completion)
