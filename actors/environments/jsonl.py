"""A JSON Lines file as an environment: one row, one example.

The file is read once for the byte offsets of its lines; rows are parsed when they are asked for, so a large file costs
eight bytes a row.
"""

import json
from pathlib import Path
from typing import Any

from actors.environments.base import Example
from schemas.config.data import JsonlConfig, Split
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Jsonl:
    """Rows of `path` (train) or `eval_path` (eval; no examples where it is not set)."""

    def __init__(self, config: JsonlConfig, split: Split) -> None:
        self._config = config
        self._key = "path" if split == "train" else "eval_path"
        given = config.path if split == "train" else config.eval_path
        self._path = Path(given) if given else None
        self._offsets = self._line_offsets() if self._path else []
        self.num_examples: int | None = len(self._offsets)
        if split == "train" and not self._offsets:
            raise ConfigError(f"environments[].path: {given} has no rows")

    def example(self, index: int) -> Example:
        """Row `index`, counted over the lines that are not blank.

        Raises:
            ConfigError: the row is not a JSON object or lacks the prompt column; names file and line.
        """
        assert self._path is not None
        number, offset = self._offsets[index]
        with self._path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        where = f"environments[].{self._key}: {self._path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or self._config.prompt_column not in row:
            found = f"its columns are {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
            raise ConfigError(f"{where}: no column {self._config.prompt_column!r} (prompt_column); {found}")
        columns = {name: value for name, value in row.items() if name != self._config.prompt_column}
        return Example(prompt=self._as_prompt(row[self._config.prompt_column], where), columns=columns)

    def _as_prompt(self, value: Any, where: str) -> Prompt:
        system = [{"role": "system", "content": self._config.system_prompt}] if self._config.system_prompt else []
        if isinstance(value, str):
            return [*system, {"role": "user", "content": value}] if system or self._config.chat else value
        if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
            return [*system, *value]
        raise ConfigError(f"{where}: the prompt must be text or a list of messages with `role` and `content`")

    def _line_offsets(self) -> list[tuple[int, int]]:
        """(line number, byte offset) of each line that is not blank."""
        assert self._path is not None
        offsets, position = [], 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        offsets.append((number, position))
                    position += len(line)
        except OSError as error:
            raise ConfigError(f"environments[].{self._key}: {self._path} can't be read: {error.strerror}") from None
        return offsets
