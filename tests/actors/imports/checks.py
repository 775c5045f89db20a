"""Checks that hold for an import of any system."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from actors.imports.job import Import
from schemas.config.load import check_tree
from schemas.config.run import RunConfig
from schemas.errors import ConfigError


def value_of(config: RunConfig, path: str) -> Any:
    """Return a value of a checked configuration by its dotted key."""
    node: Any = config
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() and isinstance(node, list | tuple) else node
        if not part.isdigit():
            node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    return node


def check_values(job: Import, expected: Mapping[str, Any]) -> None:
    """Compare values of the written file, as the loader reads them, and require that nothing else is wrong."""
    config = check_tree(job.run.tree)
    found = {path: value_of(config, path) for path in expected}
    plain = {path: value.model_dump() if hasattr(value, "model_dump") else value for path, value in found.items()}
    wrong = {path: (plain[path], value) for path, value in expected.items() if plain[path] != value}
    assert not wrong, f"found and expected: {wrong}"


def check_verdicts(job: Import, expected: Mapping[str, str]) -> None:
    """Compare the verdicts of keys."""
    found = {entry.key: str(entry.verdict) for entry in job.report.entries}
    wrong = {key: (found.get(key), verdict) for key, verdict in expected.items() if found.get(key) != verdict}
    assert not wrong, f"found and expected: {wrong}"


def check_each_key_once(job: Import, keys: Iterable[str]) -> None:
    """Require one entry for each key of the input, and no other entry."""
    counts = Counter(entry.key for entry in job.report.entries)
    wrong = counts.items() ^ dict.fromkeys(keys, 1).items()
    assert not wrong, f"keys and numbers of entries on one side only: {wrong}"


def check_only_missing(job: Import) -> None:
    """Require that `actors check` refuses the file for the missing values, and for nothing else."""
    asked = {question.target for question in job.report.questions}
    assert asked, "nothing is asked for; compare values"
    with pytest.raises(ConfigError) as error:
        check_tree(job.run.tree)
    found = {problem.partition(":")[0] for problem in error.value.problems}
    assert found == asked, f"refused and asked for: {found ^ asked}"
