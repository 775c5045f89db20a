"""What pydantic found, in the words of the file: `path.to.key: what is wrong, what is allowed`."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from schemas.config.run import RunConfig

Location = Sequence[str | int]
Models = list[type[BaseModel]]


def describe(problem: Any) -> str:
    """One problem of a `ValidationError`; the rules of `RunConfig` bring their own lines, several at times."""
    kind, given = problem["type"], problem["input"]
    keys, members, _ = _at(problem["loc"])
    if kind.startswith("union_tag"):
        keys, words = [*keys, "type"], _wrong_tag(problem, members)
    elif kind == "missing":
        words = "is required"
    elif kind == "extra_forbidden":
        words = _unknown_key(problem["loc"])
    elif given is None:
        words = "is empty: remove it or give a value"
    elif kind in ("model_type", "model_attributes_type"):
        words = f"must be a map of keys, {_as_map(given, members)}"
    else:
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        seen = "" if isinstance(given, dict | list | BaseModel) else f", got {given!r}"
        words = f"{message[0].lower()}{message[1:]}{seen}" if keys else message
    return f"{'.'.join(map(str, keys))}: {words}" if keys else words


def _wrong_tag(problem: Any, members: Models) -> str:
    if problem["type"] == "union_tag_not_found":
        return "is required"
    tags, given = [_tag(model) for model in members], problem["ctx"]["tag"]
    close = difflib.get_close_matches(str(given), tags, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"{given!r} is not one of {', '.join(map(repr, tags))}{hint}"


def _as_map(given: Any, members: Models) -> str:
    """`zscore` where `{type: zscore}` is meant is a usual slip."""
    close = difflib.get_close_matches(str(given), [_tag(model) for model in members], n=1)
    return f"write {{type: {close[0]}}}" if close else f"got {given!r}"


def _unknown_key(location: Location) -> str:
    """A key of the union's other types, or one at another place, or the nearest here, or all that are here."""
    name = str(location[-1])
    keys, members, chosen = _at(location[:-1])
    types = [_tag(model) for model in members if name in model.model_fields]
    if types:
        return f"is a key of type {' or '.join(types)}, not of {_tag(chosen[0])}"
    allowed = sorted({key for model in chosen for key in model.model_fields})
    elsewhere = [path for path in dict.fromkeys(_paths(RunConfig)) if path.rpartition(".")[2] == name]
    meant = elsewhere if len(elsewhere) == 1 or not keys else []
    meant = meant or difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else f"allowed are {', '.join(allowed)}"
    return f"no such key, {hint}"


def _at(location: Location) -> tuple[list[str | int], Models, Models]:
    """A location as keys of the file, the sections that may stand there, and those of them that do.

    Pydantic puts the tag of a discriminated union between key and field, and the member of a plain one, `list[str]`.
    """
    keys: list[str | int] = []
    members: Models = [RunConfig]
    chosen = members
    for part in location:
        tagged = [model for model in members if _tag(model) == part]
        if chosen is members and len(members) > 1 and tagged:
            chosen = tagged
        elif not str(part).endswith("]"):
            keys.append(part)
            if isinstance(part, str):
                fields = [model.model_fields[part] for model in chosen if part in model.model_fields]
                members = chosen = [model for field in fields for model in _models_in(field.annotation)]
    return keys, members, chosen


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key there is, dotted."""
    for name, field in model.model_fields.items():
        yield prefix + name
        item = "[]" if get_origin(field.annotation) is list else ""
        for section in _models_in(field.annotation):
            yield from _paths(section, f"{prefix}{name}{item}.")


def _tag(model: type[BaseModel]) -> str:
    return str(model.model_fields["type"].default) if "type" in model.model_fields else ""


def _models_in(annotation: Any) -> Models:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
