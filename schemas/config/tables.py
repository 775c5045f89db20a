"""Tables of configuration keys for docs/*.md, with defaults and meanings from the configuration classes.

A page marks a table by the path of a section and, unless all are wanted, the names of keys:

    <!-- keys packer: order, max_async_level -->
    …replaced by the table…
    <!-- end -->

For a path with sections of several types (`trainer.loss`) the table has a column "Of" with the types that have the key,
and one row for each combination of default and meaning.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config.keys import Sections, keys_in, type_of
from schemas.config.run import RunConfig

MARKED = re.compile(r"(<!-- keys ([\w.]+)(?:: ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


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
    sections = _sections_at(path)
    missing = [name for name in names or () if not any(name in section.model_fields for section in sections)]
    if missing:
        raise KeyError(f"{path}.{missing[0]}")
    types: dict[tuple[str, str, str], list[str]] = {}
    for section in sections:
        for row in _rows(section, names):
            types.setdefault(row, []).append(type_of(section))
    several = len(sections) > 1
    head = ["Key", "Default", *(["Of"] if several else []), "Meaning"]
    lines = [head, ["---"] * len(head)]
    lines += [[key, default, *([", ".join(of)] if several else []), text] for (key, default, text), of in types.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rows(section: type[BaseModel], names: list[str] | None) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        if (names is None or name in names) and name != "type":  # types are the column "Of"
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")  # `|` ends a cell
            yield f"`{name}`", _default(field), meaning


def _default(field: FieldInfo) -> str:
    """Return the default, and after it the other allowed values: `token` (or `sequence`)."""
    choices = [str(choice) for choice in get_args(field.annotation)] if _is_literal(field.annotation) else []
    default = "required" if field.default is PydanticUndefined else _value(field.default)
    others = [f"`{choice}`" for choice in choices if f"`{choice}`" != default]
    if default == "required" and others:
        return f"required: {', '.join(others)}"
    return f"{default} (or {', '.join(others)})" if others else default


def _value(value: Any) -> str:
    """Return a value as written in YAML; for a section its type and the keys that differ from the type's defaults."""
    if value is None:
        return "empty"
    if isinstance(value, BaseModel):
        if "type" not in type(value).model_fields:
            return "see there"
        other = value.model_dump(exclude_defaults=True)  # keys that differ from the type's defaults
        keys = "".join(f", {key}: {of:g}" if isinstance(of, float) else f", {key}: {of}" for key, of in other.items())
        return f"`{{type: {type_of(type(value))}{keys}}}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sections_at(path: str) -> Sections:
    """Return the section classes allowed at a dotted path, in the order of the union.

    Raises:
        KeyError: no section is allowed there.
    """
    sections: Sections = [RunConfig]  # several after a union: the classes of all its types
    for name in path.split("."):
        sections = list(dict.fromkeys(found for key in keys_in(sections, name) for found in key.sections))
    if not sections:
        raise KeyError(path)
    return sections


def _is_literal(annotation: Any) -> bool:
    return str(get_origin(annotation)) == "typing.Literal"
