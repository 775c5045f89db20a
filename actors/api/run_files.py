"""Files of a run as tables: `actors.load_run(output_dir)`, for running, ended and dead runs."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import OLDER_SAMPLES, record_of
from schemas.errors import ConfigError

Row = dict[str, Any]
PER_COMPLETION = {
    "completions": "completion",
    "stop_conditions": "stop_condition",
    "reward": "reward",
    "advantages": "advantage",
    # of environments alone
    "messages": "messages",
    "turns": "turns",
    "tool_calls": "tool_calls",
    "tool_failures": "tool_failures",
    "info": "info",
    "failures": "failure",
}
"""Columns of a sample by the list of a group's record that has an item per completion; the list may be absent or
empty."""


class Table:
    """Rows read from files when the table is iterated, so that a large file is never in memory whole.

    A row is a dictionary. A row added to the file later is part of the next iteration.
    """

    def __init__(self, rows: Callable[[], Iterator[Row]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows, from the first to the newest."""
        return self._rows()

    def __len__(self) -> int:
        """Return the number of rows, which reads the files."""
        return sum(1 for _ in self)

    def where(self, **values: Any) -> "Table":
        """Return the rows with these values, such as `where(step=3, purpose="train")`."""
        return Table(lambda: (row for row in self if all(row.get(name) == value for name, value in values.items())))

    def column(self, name: str) -> list[Any]:
        """Return a column's values; None where a row does not have the column."""
        return [row.get(name) for row in self]

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas  # type: ignore[import-untyped, unused-ignore]

        return pandas.DataFrame(list(self))


class RunFiles:
    """Files of one run.

    Args:
        output_dir: the run's output_dir, or its run.yaml.

    Raises:
        ConfigError: the folder is not of a run.
    """

    def __init__(self, output_dir: str | Path) -> None:
        path = Path(output_dir)
        if path.is_file():
            from schemas.config import load_config

            path = load_config(path).output
        if not (path / "config.resolved.yaml").is_file():
            raise ConfigError(f"{path}: is not a run's output_dir: it has no config.resolved.yaml")
        self.path = path

    @property
    def config(self) -> Row:
        """Configuration with all defaults, as nested dictionaries."""
        from schemas.config.load import parse

        tree: Row = parse((self.path / "config.resolved.yaml").read_text(encoding="utf-8"))
        return tree

    @property
    def summary(self) -> Row | None:
        """Content of summary.json; None for a run that has not ended."""
        file = self.path / "summary.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def metrics(self) -> Table:
        """A row per training step."""
        return self._table("metrics.jsonl")

    @property
    def evals(self) -> Table:
        """A row per evaluation."""
        return self._table("evals.jsonl")

    @property
    def groups(self) -> Table:
        """A row per sampled group that was kept, as in samples.jsonl."""
        return self._table(OLDER_SAMPLES, "samples.jsonl")

    @property
    def samples(self) -> Table:
        """A row per completion, with `prompt`, `completion`, `reward`, and a column `reward/NAME` of each function."""
        return Table(lambda: (row for group in self.groups for row in _completions(group)))

    @property
    def trajectories(self) -> Table:
        """A row per completion of an environment with turns: as in `samples`, with `messages` and `turn_rewards`."""
        return Table(lambda: (row for row in self.samples if "messages" in row))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the checkpoints by step, the oldest first."""
        folders = (self.path / "checkpoints").glob("step_*")
        found = {int(folder.name.removeprefix("step_")): folder for folder in folders if folder.name[5:].isdecimal()}
        return dict(sorted(found.items()))

    def _table(self, *names: str) -> Table:
        return Table(lambda: (row for name in names for row in _records(self.path / name)))


def load_run(output_dir: str | Path) -> RunFiles:
    """Return the files of a run as tables.

    Args:
        output_dir: the run's output_dir, or its run.yaml.

    Raises:
        ConfigError: the folder is not of a run.
    """
    return RunFiles(output_dir)


def _records(path: Path) -> Iterator[Row]:
    """Yield the records of a .jsonl file; a last line that is still being written is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            record = record_of(line)
            if record is not None:
                yield record


def _completions(group: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each completion of a group's record."""
    names = ("step", "ordinal", "purpose", "environment", "prompt", "columns", "versions")
    shared = {name: group[name] for name in names}
    lists = {column: group[name] for name, column in PER_COMPLETION.items() if group.get(name)}
    for index in range(len(group["completions"])):
        row = shared | {"index": index} | {column: values[index] for column, values in lists.items()}
        row |= {f"reward/{name}": values[index] for name, values in group["rewards"].items()}
        if "turn_rewards" in group:
            row["turn_rewards"] = [[turn, value] for which, turn, value in group["turn_rewards"] if which == index]
        yield row
