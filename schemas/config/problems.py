"""Translation of pydantic's errors to lines `path.to.key: problem, allowed values`, with the paths of the YAML file."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from schemas.config.keys import Sections, keys_in, paths, type_of
from schemas.config.moved import new_place
from schemas.config.run import RunConfig
from schemas.config.trl_names import TRL_NAMES

Location = Sequence[str | int]


def describe(problem: Any) -> str:
    """Return one error of a `ValidationError` as a line.

    Rules of `RunConfig` itself (errors without a key) already are such lines and are returned unchanged.
    """
    kind, given = problem["type"], problem["input"]
    keys, members, _ = _at(problem["loc"])
    if kind.startswith("union_tag"):
        # pydantic locates the problem at the section, without key
        keys, words = [*keys, "type"], _wrong_tag(problem, members)
    elif kind == "missing":
        words = "is required"
    elif kind == "extra_forbidden":
        words = _unknown_key(problem["loc"])
    elif given is None:
        words = "is empty: remove it or give a value"
    elif kind in ("model_type", "model_attributes_type"):
        # `advantage: zscore` for `advantage: {type: zscore}` is a common slip
        close = difflib.get_close_matches(str(given), [type_of(model) for model in members], n=1)
        remedy = f"write {{type: {close[0]}}}" if close else f"got {given!r}"
        words = f"must be a map of keys, {remedy}"
    else:
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        seen = "" if isinstance(given, dict | list | BaseModel) else f", got {given!r}"
        words = f"{message[0].lower()}{message[1:]}{seen}" if keys else message
    return f"{'.'.join(map(str, keys))}: {words}" if keys else words


def _wrong_tag(problem: Any, members: Sections) -> str:
    if problem["type"] == "union_tag_not_found":
        return "is required"
    tags, given = [type_of(model) for model in members], problem["ctx"]["tag"]
    close = difflib.get_close_matches(str(given), tags, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"{given!r} is not one of {', '.join(map(repr, tags))}{hint}"


def _unknown_key(location: Location) -> str:
    """Return a hint for an unknown key.

    The first that applies: the key has moved since an earlier release; it belongs to another `type` of this section; it
    is TRL's name of a key; it exists in one other section; a key here has a similar name; else all keys allowed here.
    """
    name = str(location[-1])
    keys, members, chosen = _at(location[:-1])
    here = ".".join(map(str, [*keys, name]))
    if moved := new_place(here):
        return f"has moved to {moved}"
    types = [type_of(model) for model in members if name in model.model_fields]
    if types:
        return f"is a key of type {' or '.join(types)}, not of {type_of(chosen[0])}"
    allowed = sorted({key for model in chosen for key in model.model_fields})
    # a near miss of a key here is a typo, even if TRL has the word too
    if name in TRL_NAMES and not difflib.get_close_matches(name, allowed, n=1, cutoff=0.9):
        return f"no such key; TRL's {name} is {' and '.join(TRL_NAMES[name])} here (docs/reference/libraries.md)"
    # a path is known and still unknown here if only another type of a section above has it
    elsewhere = [path for path in dict(paths([RunConfig])) if path.rpartition(".")[2] == name and path != here]
    # a name used by many sections is no hint, except at the top level, where the user has forgotten the section
    meant = elsewhere if len(elsewhere) == 1 or not keys else []
    meant = meant or difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else f"allowed are {', '.join(allowed)}"
    return f"no such key, {hint}"


def _at(location: Location) -> tuple[list[str | int], Sections, Sections]:
    """Return a pydantic location as keys of the file, section classes allowed there, and classes chosen there.

    Besides keys, a location has the tag of a discriminated union between key and field, and the member of a plain
    union, such as `str` or `list[str]`. Both are skipped.
    """
    keys: list[str | int] = []
    members: Sections = [RunConfig]
    chosen = members
    for part in location:
        tagged = [model for model in members if type_of(model) == part]
        if chosen is members and len(members) > 1 and tagged:
            chosen = tagged
        # `list[str]`, a member of a plain union, is no key
        elif part != "str" and not str(part).endswith("]"):
            keys.append(part)
            if isinstance(part, str):
                members = chosen = [section for key in keys_in(chosen, part) for section in key.sections]
    return keys, members, chosen
