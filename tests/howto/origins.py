"""Configurations of other systems, as the pages show them, read into trees of plain values.

A script of TRL is run with recorders in the place of `trl`, `peft` and `datasets`: packages and hub are not here.
"""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.howto.pages import Page, page, printed_by, value_at

NUM_ROWS = 320
"""Rows of every data set: more than any page has groups in a step."""


class Rows(list[dict[str, Any]]):
    """Data set in the place of `datasets.Dataset`, as far as the pages use one."""

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> "Rows":
        """Return these rows."""
        return cls(rows)

    def map(self, function: Callable[[dict[str, Any]], dict[str, Any]]) -> "Rows":
        """Return the rows with the function's columns added or replaced."""
        return Rows([row | function(row) for row in self])

    def to_json(self, path: str) -> None:
        """Write the rows as JSON Lines."""
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in self))


def load_dataset(name: str, config: str = "default", *, split: str) -> Rows:
    """Return made-up rows with the columns of the data sets that the pages name."""
    if "gsm8k" in name:
        return Rows([{"question": f"{i} + {i}?", "answer": f"It is {2 * i}. #### {2 * i}"} for i in range(NUM_ROWS)])
    assert "Reverse-Text" in name, name
    return Rows([{"prompt": f"abc {i}"} for i in range(NUM_ROWS)])


def with_recorders(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put recorders in the place of packages that are not here; `arguments` of the result has what a trainer got."""
    recorded = SimpleNamespace(arguments={}, orms={})

    class Trainer:
        def __init__(self, **arguments: Any) -> None:
            recorded.arguments |= arguments

        def train(self) -> None:
            recorded.has_trained = True

    modules = {
        "datasets": {"Dataset": Rows, "load_dataset": load_dataset},
        "peft": {"LoraConfig": dict},
        "trl": {"GRPOConfig": dict, "GRPOTrainer": Trainer},
        "swift": {},
        "swift.rewards": {"ORM": object, "orms": recorded.orms},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__spec__ = ModuleSpec(name, None)  # what asks whether a package is there reads it
        monkeypatch.setitem(sys.modules, name, module)
    return recorded


def trl_of(found: Page, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the script of a page gives to GRPOTrainer and GRPOConfig, in one map."""
    recorded = with_recorders(monkeypatch)
    printed_by(found.block("train_grpo.py"), {})
    assert recorded.has_trained
    return recorded.arguments | recorded.arguments.pop("args")


def command_of(text: str) -> dict[str, Any]:
    """Return the flags and variables of a command; a flag with several values has a list."""
    words, found, name = shlex.split(text.replace("\\\n", " ")), dict[str, Any](), ""
    for word in words:
        if match := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            found[match[1]] = match[2]
        elif word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = []
        elif name:
            found[name].append(word)
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in found.items()}


def resolved(tree: Any, root: Any) -> Any:
    """Return a tree with its references, `${actor.path}`, replaced by the values."""
    if isinstance(tree, dict):
        return {name: resolved(value, root) for name, value in tree.items()}
    match = re.fullmatch(r"\$\{(.+)\}", tree) if isinstance(tree, str) else None
    return value_at(root, match[1]) if match else tree


def trees_of(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the configurations on a page, by the first cell of the head of their table of keys."""
    found = page(name)
    if name == "trl":
        return {"TRL": trl_of(found, monkeypatch)}
    if name == "prime-rl":
        return {"prime-rl": tomllib.loads(found.block("rl.toml"))}
    if name == "areal":
        tree = yaml.safe_load(found.block("gsm8k_grpo.yaml"))
        return {"AReaL": resolved(tree, tree)}
    if name == "ms-swift":
        return {"ms-swift": command_of(found.block("gsm8k.sh"))}
    return {file: yaml.safe_load(found.block(file)) for file in ("train.yaml", "infer.yaml", "orch.yaml")}
