"""The tree of configuration keys, read from the section classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Sections = Sequence[type[BaseModel]]
"""Section classes allowed in one place: several after a union, one for each `type`."""


@dataclass(frozen=True)
class Key:
    """One key of one section class."""

    name: str
    field: FieldInfo

    @property
    def sections(self) -> list[type[BaseModel]]:
        """Section classes allowed as value, in the order of the union; empty for a plain value."""
        return sections_in(self.field.annotation)

    @property
    def is_list(self) -> bool:
        """True if the value is a list."""
        return get_origin(self.field.annotation) is list

    @property
    def is_container(self) -> bool:
        """True if the value is always a section, never empty: only keys in the section have a value to compare."""
        return bool(self.sections) and not self.is_list and NoneType not in get_args(self.field.annotation)


def keys_in(sections: Sections, name: str | None = None) -> list[Key]:
    """Return the keys of section classes, or of each class the key with this name."""
    return [
        Key(key, field)
        for section in sections
        for key, field in section.model_fields.items()
        if name is None or key == name
    ]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in an annotation, in the order of its union. A class may occur twice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def type_of(section: type[BaseModel]) -> str:
    """Return the value of the key `type` that selects a section class; empty for classes outside unions."""
    default = section.model_fields["type"].default if "type" in section.model_fields else None
    return default if isinstance(default, str) else ""


def sections_at(path: str, root: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """Return the section classes allowed at a dotted path, in the order of the union.

    The value lists the types for which a class is allowed: its own type, or the types of the sections around it.

    Raises:
        KeyError: no section is allowed there.
    """
    found: dict[type[BaseModel], list[str]] = {root: []}
    for name in path.split("."):
        below: dict[type[BaseModel], list[str]] = {}
        for section, types in found.items():
            # a section without a type, such as `compat`, belongs to the types of the section around it
            for inner in (inner for key in keys_in([section], name) for inner in key.sections):
                own = [type_of(inner)] if type_of(inner) else types
                below[inner] = list(dict.fromkeys([*below.get(inner, []), *own]))
        found = below
    if not found:
        raise KeyError(path)
    return found


def paths(sections: Sections, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield all keys below section classes by dotted path, `environments[].name` for keys of list items.

    A key that several classes of a union have occurs once for each of the classes.
    """
    for key in keys_in(sections):
        path = f"{prefix}{key.name}"
        # a section before its keys, as in the file
        yield path, key
        yield from paths(key.sections, f"{path}[]." if key.is_list else f"{path}.")
