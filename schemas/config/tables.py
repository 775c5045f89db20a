"""Tables of configuration keys for docs/*.md, with defaults and meanings from the configuration classes.

A page marks a table by the path of a section and, unless all are wanted, the names of keys:

    <!-- keys packer: order, max_async_level -->
    …replaced by the table…
    <!-- end -->

For a path with sections of several types (`trainer.loss`) the table has a column "Of" with the types that have the key,
and one row for each combination of default and meaning.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from schemas.config.keys import Key, keys_in, sections_at, type_of
from schemas.config.run import RunConfig

MARKED = re.compile(r"(<!-- keys ([\w.]+)(?:: ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
Column = tuple[str, Callable[[Key], str]]
"""Heading of a column, and its cell for a key."""


def with_tables(page: str) -> str:
    """Return the page with all its tables generated from the current classes.

    Raises:
        KeyError: the page names a path or a key that does not exist.
    """

    def table(match: re.Match[str]) -> str:
        start, path, names, end = match.groups()
        return f"{start}{keys_table(path, names.split(', ') if names else None)}{end}"

    return MARKED.sub(table, page)


def keys_table(path: str, names: list[str] | None = None) -> str:
    """Return a Markdown table of the keys of a section.

    Args:
        path: dotted path of the section, e.g. `trainer.loss`.
        names: keys to show; None: all.

    Raises:
        KeyError: the path or a name does not exist.
    """
    sections = sections_at(path, RunConfig)
    known = [key.name for key in keys_in(list(sections))]
    missing = [name for name in names or () if name not in known]
    if missing:
        raise KeyError(f"{path}.{missing[0]}")
    return table_of(sections, [("Default", default_or_others)], names)


def table_of(
    sections: dict[type[BaseModel], list[str]], columns: Sequence[Column], names: list[str] | None = None
) -> str:
    """Return a Markdown table of keys: name, the given columns, types that have the key if there are several, meaning.

    Args:
        sections: section classes with their types, as of `sections_at`.
        columns: columns between name and meaning.
        names: keys to show; None: all.
    """
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for section, types in sections.items():
        for key in keys_in([section]):
            # in a table of several types, `type` is the column "Of"
            if (names is None or key.name in names) and not (key.name == "type" and type_of(section)):
                row = (f"`{key.name}`", *(cell(key) for _, cell in columns), meaning(key))
                rows.setdefault(key.name, {}).setdefault(row, []).extend(types)
    several = len(sections) > 1
    head = ["Key", *(heading for heading, _ in columns), *(["Of"] if several else []), "Meaning"]
    lines = [head, ["---"] * len(head)]
    # "all" is shorter, and stays true when a type is added
    every = {kind for types in sections.values() for kind in types}
    # the rows of one name stand together, whatever types they are of
    for (*cells, text), types in (found for of_name in rows.values() for found in of_name.items()):
        owners = "all" if set(types) == every else ", ".join(types)
        lines.append([*cells, *([owners] if several else []), text])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def meaning(key: Key) -> str:
    """Return the document of a key as the text of a table's cell."""
    return in_cell(key.field.description or "")


def in_cell(text: str) -> str:
    """Return a text in one line, with `|` escaped, which would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def default_or_others(key: Key) -> str:
    """Return the default, and after it the other allowed values: `token` (or `sequence`)."""
    default = default_of(key)
    others = [f"`{choice}`" for choice in choices(key.field.annotation) if f"`{choice}`" != default]
    if default == "required" and others:
        return f"required: {', '.join(others)}"
    return f"{default} (or {', '.join(others)})" if others else default


def default_of(key: Key) -> str:
    """Return the default of a key as written in YAML; `required` if there is none."""
    default = key.field.default
    return "required" if default is PydanticUndefined else value_text(default)


def value_text(value: Any) -> str:
    """Return a value as written in YAML; for a section its type and the keys that differ from the type's defaults."""
    if value is None or value == "":
        return "empty"
    if isinstance(value, BaseModel):
        if not type_of(type(value)):
            return "see there"
        # only the keys that differ from the type's defaults
        other = value.model_dump(exclude_defaults=True)
        keys = "".join(f", {key}: {of:g}" if isinstance(of, float) else f", {key}: {of}" for key, of in other.items())
        return f"`{{type: {type_of(type(value))}{keys}}}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def choices(annotation: Any) -> list[Any]:
    """Return the values of a Literal; empty for any other annotation."""
    return list(get_args(annotation)) if str(get_origin(annotation)) == "typing.Literal" else []
