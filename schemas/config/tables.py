"""Tables of keys, with defaults and meanings, in the pages of docs/: made from the configuration classes.

A page marks where one stands, by the path of a section and, if it shall not have all of them, the names of its keys:

    <!-- keys packer: order, max_async_level -->
    …replaced by the table…
    <!-- end -->

Of a path where sections of several types may stand (`trainer.loss`) the table has a column that tells which types have
the key; it has a row for each key that differs in default or meaning.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schemas.config.run import RunConfig

MARKED = re.compile(r"(<!-- keys ([\w.]+)(?:: ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
Sections = list[type[BaseModel]]


def with_tables(page: str) -> str:
    """The page with all its tables as the classes have them now.

    Raises:
        KeyError: it asks for a path or a key that there is not.
    """

    def table(match: re.Match[str]) -> str:
        start, path, names, end = match.groups()
        return f"{start}{keys_table(path, names.split(', ') if names else None)}{end}"

    return MARKED.sub(table, page)


def keys_table(path: str, names: list[str] | None = None) -> str:
    """Rows in Markdown of the keys of a section."""
    sections = _sections_at(path)
    missing = [name for name in names or () if not any(name in section.model_fields for section in sections)]
    if missing:
        raise KeyError(f"{path}.{missing[0]}")
    types: dict[tuple[str, str, str], list[str]] = {}
    for section in sections:
        for row in _rows(section, names):
            types.setdefault(row, []).append(_type(section))
    several = len(sections) > 1
    head = ["Key", "Default", *(["Of"] if several else []), "Meaning"]
    lines = [head, ["---"] * len(head)]
    lines += [[key, default, *([", ".join(of)] if several else []), text] for (key, default, text), of in types.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rows(section: type[BaseModel], names: list[str] | None) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        if (names is None or name in names) and name != "type":
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            yield f"`{name}`", _default(field), meaning


def _default(field: FieldInfo) -> str:
    """Default first, behind it what else is allowed: `token` (or `sequence`)."""
    choices = [str(choice) for choice in get_args(field.annotation)] if _is_literal(field.annotation) else []
    default = "required" if field.default is PydanticUndefined else _value(field.default)
    others = [f"`{choice}`" for choice in choices if f"`{choice}`" != default]
    if default == "required" and others:
        return f"required: {', '.join(others)}"
    return f"{default} (or {', '.join(others)})" if others else default


def _value(value: Any) -> str:
    """As it is written in YAML; of a section its type."""
    if value is None:
        return "empty"
    if isinstance(value, BaseModel):
        return f"`{{type: {_type(type(value))}}}`" if "type" in type(value).model_fields else "see there"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sections_at(path: str) -> Sections:
    """What may stand there, in the order of the union.

    Raises:
        KeyError: nothing.
    """
    sections: Sections = [RunConfig]
    for name in path.split("."):
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        sections = list(dict.fromkeys(found for field in fields for found in _sections_in(field.annotation)))
    if not sections:
        raise KeyError(path)
    return sections


def _sections_in(annotation: Any) -> Sections:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _is_literal(annotation: Any) -> bool:
    return str(get_origin(annotation)) == "typing.Literal"


def _type(section: type[BaseModel]) -> str:
    return str(section.model_fields["type"].default) if "type" in section.model_fields else ""
