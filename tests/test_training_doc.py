"""docs/reference/training.md cannot rot: its tables of keys are the code's, its YAML is loaded."""

import re
from pathlib import Path
from typing import Any

import yaml

from schemas.config import check_tree
from schemas.config.tables import with_tables

TEXT = (Path(__file__).parent.parent / "docs/reference/training.md").read_text(encoding="utf-8")
RUN: dict[str, Any] = {
    "model": {"path": "some/model"},
    "environments": [{"type": "reverse_text"}],
    "reward": {"functions": [{"path": "characters_in_place"}]},
    "trainer": {"max_steps": 1},
}


def test_the_table_of_keys_is_current() -> None:
    """`make docs` writes it."""
    assert TEXT.count("<!-- keys ") == TEXT.count("<!-- end -->") == 2
    assert with_tables(TEXT) == TEXT


def test_every_piece_of_yaml_is_part_of_a_run() -> None:
    """Merged into a small one, section by section."""
    pieces = [yaml.safe_load(piece) for piece in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    assert pieces
    for piece in pieces:
        check_tree(RUN | {name: RUN.get(name, {}) | section for name, section in piece.items()})


def test_every_key_that_the_page_names_is_there() -> None:
    """Dotted names in code marks that begin with a section."""
    named = set(re.findall(r"`((?:trainer|model)\.[a-z_.]+)`", TEXT))
    assert len(named) > 5
    config = check_tree(RUN)
    for path in named:
        found = config
        for key in path.split("."):
            assert key in type(found).model_fields, path
            found = getattr(found, key)
