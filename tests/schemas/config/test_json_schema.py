"""The JSON Schema for editors says what `actors check` says, as far as shape goes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import check_tree
from schemas.config.json_schema import json_schema
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip
BOUNDS = {
    "minimum": lambda value, bound: value >= bound, "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound, "exclusiveMaximum": lambda value, bound: value < bound,
    "minLength": lambda value, bound: len(value) >= bound, "minItems": lambda value, bound: len(value) >= bound,
    "enum": lambda value, bound: value in bound, "const": lambda value, bound: value == bound,
    "pattern": lambda value, bound: re.search(bound, value) is not None,
}  # fmt: skip


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits, by the keywords that our schema uses."""
    if "$ref" in schema:
        return valid(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    if "type" in schema:
        fits = isinstance(value, TYPES[schema["type"]]) and not (
            isinstance(value, bool) and schema["type"] != "boolean"
        )
        if not fits:
            return False
    if any(not holds(value, schema[word]) for word, holds in BOUNDS.items() if word in schema):
        return False
    if "anyOf" in schema and not any(valid(value, member) for member in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(valid(value, member) for member in schema["oneOf"]) != 1:
        return False
    if isinstance(value, dict) and "properties" in schema:
        return _valid_map(value, schema)
    return not (isinstance(value, list) and "items" in schema) or all(valid(item, schema["items"]) for item in value)


def _valid_map(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    known = schema["properties"]
    if set(schema.get("required", ())) - set(value) or set(value) - set(known):
        return False
    return all(valid(item, known[key]) for key, item in value.items())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda path: str(path.name))
def test_every_configuration_that_ships_is_valid(path: Path) -> None:
    """The quickstart's optimizer names no type, and is AdamW."""
    assert valid(yaml.safe_load(path.read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("section", "values", "good"),
    [
        ("trainer", {"optimizer": {"beta2": 0.99}}, True),
        ("trainer", {"optimizer": {"type": "muon", "momentum": 0.9}}, True),
        ("trainer", {"optimizer": {"momentum": 0.9}}, False),
        ("trainer", {"loss": {"epsilon": 0.1}}, False),
        ("trainer", {"loss": {"type": "dapo", "epsilon": 0.1}}, True),
        ("trainer", {"loss": {"type": "surogate", "epsilon": 0.1}}, False),
        ("trainer", {"loss": {"type": "dpo"}}, False),
        ("reward", {"advantage": {"std": "population"}}, False),
        ("inference", {"engine": {"max_sequences": 8}}, False),
        ("model", {"dropout": 0.1}, False),
        ("rollout", {"group_size": 0}, False),
    ],
)
def test_schema_and_check_agree(section: str, values: dict[str, Any], good: bool) -> None:
    """What one accepts the other does; a map of a union without its type is AdamW or nothing."""
    tree: dict[str, Any] = {
        "model": {"path": "m"}, "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "exact_match"}]}, "trainer": {"max_steps": 1},
    }  # fmt: skip
    tree[section] = tree.get(section, {}) | values
    assert valid(tree, SCHEMA) is good
    try:
        check_tree(tree)
    except ConfigError:
        assert not good
    else:
        assert good


def test_every_key_is_described_and_the_dialect_is_named() -> None:
    """`type` too: an editor shows what each kind is."""
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    sections = {name: section.get("properties", {}) for name, section in SCHEMA["$defs"].items()}
    keys = [(f"{name}.{key}", value) for name, section in sections.items() for key, value in section.items()]
    assert [key for key, value in keys if "description" not in value] == []
