"""Plan of a queue: the runs of files and sweeps, each with its overrides and its checked configuration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.ops.queue.sweep import OWN_KEYS, Axis, label, product
from schemas.config import RunConfig, load_config
from schemas.config.resume import as_tree
from schemas.errors import ConfigError


@dataclass(frozen=True)
class QueuedRun:
    """Run of a queue.

    Args:
        path: run.yaml.
        overrides: overrides of the configuration.
        config: the configuration with these overrides.
        values: values of the sweep, each as `key=value`; empty without a sweep.
    """

    path: Path
    overrides: tuple[str, ...]
    config: RunConfig
    values: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The run in words: its file, its values, and its folder."""
        return f"{' '.join([str(self.path), *self.values])} in {self.config.output}"


def planned(paths: Sequence[Path], overrides: Sequence[str], axes: Sequence[Axis]) -> list[QueuedRun]:
    """Return the runs of a queue in order: for each file all combinations of the sweep.

    With a sweep each run has its own `name` and `output_dir` below the file's, and the file's `ledger.path`, if set,
    with the combination in its name.

    Raises:
        ConfigError: a configuration can't be used, or two combinations are the same run.
    """
    runs, problems = [], []
    for path in paths:
        for values in product(axes):
            try:
                runs.append(_run(path, overrides, axes, values))
            except ConfigError as error:
                # one file alone is named by the user's command
                where = " ".join([*([str(path)] if len(paths) > 1 else []), *_pairs(axes, values)])
                problems += [f"{where}: {problem}" if where else problem for problem in error.problems]
    if problems := problems or _same(runs):
        raise ConfigError(*problems)
    return runs


def _run(path: Path, overrides: Sequence[str], axes: Sequence[Axis], values: tuple[str, ...]) -> QueuedRun:
    given = [*overrides, *_pairs(axes, values)]
    config = load_config(path, given)
    if axes:
        name = label(axes, values)
        # JSON texts are YAML texts too, whatever letters a path has
        given.append(f"name={json.dumps(f'{config.name}.{name}')}")
        given.append(f"output_dir={json.dumps(str(Path(config.output_dir) / name))}")
        if config.ledger.path:
            ledger = Path(config.ledger.path)
            given.append(f"ledger.path={json.dumps(str(ledger.with_name(f'{ledger.stem}.{name}{ledger.suffix}')))}")
        config = load_config(path, given)
    return QueuedRun(path, tuple(given), config, tuple(_pairs(axes, values)))


def _pairs(axes: Sequence[Axis], values: Sequence[str]) -> list[str]:
    return [f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)]


def _same(runs: Sequence[QueuedRun]) -> list[str]:
    """Return a text for each combination that repeats an earlier one under another name, as 1e-5 and 0.00001."""
    first: dict[str, QueuedRun] = {}
    problems = []
    for run in runs:
        tree = as_tree(run.config)
        for key in OWN_KEYS:
            section, _, name = key.rpartition(".")
            (tree[section] if section else tree).pop(name)
        same = first.setdefault(json.dumps([str(run.path), tree], sort_keys=True), run)
        if same is not run and run.values:
            problems.append(f"--sweep: {', '.join(run.values)} is the same run as {', '.join(same.values)}")
    return problems
