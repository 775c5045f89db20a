"""A JSON Lines file as an environment: one row, one example.

The file is read once, to check every row and to note where it begins; rows are parsed again when they are asked for, so
a large file costs eight bytes a row.
"""

import json
from array import array
from pathlib import Path
from typing import Any

from actors.environments.base import Example
from schemas.config.data import JsonlConfig, Split
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Jsonl:
    """Rows of `path` (train) or `eval_path` (eval; no examples where it is not set).

    Raises:
        ConfigError: the file can't be read or has no rows, or a row is not a JSON object with a prompt in the prompt
        column; names file and line.
    """

    def __init__(self, config: JsonlConfig, split: Split) -> None:
        self._config = config
        self._key = "path" if split == "train" else "eval_path"
        given = config.path if split == "train" else config.eval_path
        self.path = Path(given) if given else None
        self._offsets = array("Q")
        self.columns: set[str] = set()
        """Those that every row has, the prompt aside."""
        if self.path:
            self._read(self.path)
        self.num_examples: int | None = len(self._offsets)

    def example(self, index: int) -> Example:
        """Row `index`, counted over the lines that are not blank."""
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return self._example(file.readline(), f"row {index + 1} is not what it was when the file was read first")

    def _read(self, path: Path) -> None:
        position = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        columns = set(self._example(line, f"line {number}").columns)
                        self.columns = self.columns & columns if self._offsets else columns
                        self._offsets.append(position)
                    position += len(line)
        except OSError as error:
            raise ConfigError(f"environments[].{self._key}: {path} can't be read: {error.strerror}") from None
        if not self._offsets:
            raise ConfigError(f"environments[].{self._key}: {path} has no rows")

    def _example(self, line: bytes, place: str) -> Example:
        where, column = f"environments[].{self._key}: {self.path}, {place}", self._config.prompt_column
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or column not in row:
            found = f"its columns are {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
            raise ConfigError(f"{where}: no column {column!r} (prompt_column); {found}")
        prompt = self._as_prompt(row.pop(column), where)
        return Example(prompt=prompt, columns=row)

    def _as_prompt(self, value: Any, where: str) -> Prompt:
        system = [{"role": "system", "content": self._config.system_prompt}] if self._config.system_prompt else []
        if isinstance(value, str):
            return [*system, {"role": "user", "content": value}] if system or self._config.chat else value
        if isinstance(value, list) and value and all(map(_is_message, value)):
            return [*system, *value]
        raise ConfigError(
            f"{where}: the prompt must be text, or a list of messages with `role` and `content` (text or a list)"
        )


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str | list)
