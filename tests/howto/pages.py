"""The pages of docs/howto as data: blocks of code with their titles, tables, words; and their blocks as files."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from schemas.config import RunConfig
from schemas.config.tables import keys_table

FOLDER = Path(__file__).parents[2] / "docs" / "howto"
NAMES = sorted(path.stem for path in FOLDER.glob("*.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """Code between fences."""

    language: str
    title: str
    """Name of the file that the block is; empty for a fragment."""
    text: str


@dataclass(frozen=True)
class Table:
    """Table of a page."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Page:
    """Page of docs/howto."""

    name: str
    text: str

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks, in order."""
        return [Block(*found) for found in FENCE.findall(self.text)]

    def block(self, title: str) -> str:
        """Return the text of the block with a title."""
        (text,) = [block.text for block in self.blocks if block.title == title]
        return text

    @cached_property
    def tables(self) -> list[Table]:
        """All tables, in order."""
        found = re.findall(r"^\|.*\|\n\|[-| ]+\|\n(?:\|.*\|\n)+", self.text, re.MULTILINE)
        return [Table(lines[0], lines[2:]) for lines in map(_cells, found)]

    def table(self, *head: str) -> Table:
        """Return the table whose head has these cells."""
        (table,) = [table for table in self.tables if table.head == list(head)]
        return table

    @property
    def num_words(self) -> int:
        """Number of words, code included and tables excluded."""
        return len([word for line in self.text.splitlines() if not line.startswith("|") for word in line.split()])

    def write_files(self, folder: Path) -> None:
        """Write each block with a title as a file."""
        for block in self.blocks:
            if block.title:
                (folder / block.title).write_text(block.text)


def _cells(table: str) -> list[list[str]]:
    # in code a bar is written with a backslash
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]


@cache
def page(name: str) -> Page:
    """Return a page."""
    return Page(name, (FOLDER / f"{name}.md").read_text(encoding="utf-8"))


def pages() -> Iterator[Page]:
    """Yield all pages."""
    yield from map(page, NAMES)


def printed_by(code: str, namespace: dict[str, Any]) -> list[str]:
    """Run code; return what it prints, as lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "a block of docs/howto", "exec"), namespace)
    return printed.getvalue().splitlines()


def matches(words: str, line: str) -> bool:
    """Return whether a line is a page's words; `…` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, words.split("…"))), line) is not None


def check_key(key: str) -> None:
    """Check that a key of the configuration exists, written as `reward.functions[].path`.

    Raises:
        KeyError: there is no such key.
    """
    section, _, name = key.replace("[]", "").rpartition(".")
    if section:
        keys_table(section, [name])
    elif name not in RunConfig.model_fields:
        raise KeyError(name)


def value_at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path of maps, sections and lists; `a[].b` is the list of the items' values.

    Raises:
        KeyError: there is no such value.
    """
    name, _, rest = path.partition(".")
    if name.endswith("[]"):
        items = value_at(tree, name.removesuffix("[]"))
        return [value_at(item, rest) for item in items] if rest else items
    if isinstance(tree, dict):
        found = tree[name]
    elif name in type(tree).model_fields:
        found = getattr(tree, name)
    else:
        raise KeyError(name)
    return value_at(found, rest) if rest else found
