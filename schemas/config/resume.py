"""Comparison of a configuration with that of the run so far, key by key (protocol rule P23).

What a difference means is the key's class: free, repack or identity (`schemas.config.resume_classes`). A fork keeps the
steps up to the newest checkpoint. Later groups are dropped as `forked`, and their examples are issued again.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import BaseModel

from schemas.config.keys import Sections, keys_in
from schemas.config.moved import with_keys_moved
from schemas.config.resume_classes import KeyClass, ResumeMark
from schemas.config.run import RunConfig

STRICTEST: tuple[KeyClass, ...] = ("identity", "repack", "free")


@dataclass(frozen=True)
class Difference:
    """A key with another value than in the run so far."""

    key: str
    before: Any
    now: Any
    key_class: KeyClass

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} so far, {self.now!r} now"


def as_tree(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain values, the form stored with a run."""
    return config.model_dump(mode="json")


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """Return the differences to the stored tree of the run so far, in the order of the keys.

    A key missing in the stored tree, new in this release, is no difference. The tree may be of an earlier release: its
    keys are compared in their current places.
    """
    trees = [_divided(tree) for tree in (with_keys_moved(before), as_tree(config))]
    (so_far, evaluated_so_far), (now, evaluated_now) = trees
    changed = _changed("", so_far, now)
    if not config.trainer.max_steps:
        # trainer.max_epochs, not counted here
        changed.pop("trainer.max_steps", None)
    found = [Difference(key, *values, class_of(key)) for key, values in changed.items()]
    # groups of training do not depend on environments that are evaluated only
    if evaluated_so_far != evaluated_now:
        found.append(Difference("environments[] with train: false", evaluated_so_far, evaluated_now, "free"))
    return found


def _divided(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return a configuration without the environments that are evaluated only, and these environments."""
    if "environments" not in tree:
        return dict(tree), []
    trained = [one for one in tree["environments"] if one.get("train", True)]
    return {**tree, "environments": trained}, [one for one in tree["environments"] if not one.get("train", True)]


def class_of(key: str) -> KeyClass:
    """Return the class of a dotted key, with or without numbers of list items (`environments.0.path`).

    A section that is always there has the strictest class of its keys. A key inside a plain value, such as a keyword
    argument of a reward function, has the class of the value.

    Raises:
        KeyError: there is no such key.
    """
    classes = key_classes()
    path = ".".join(part for part in key.split(".") if not part.isdigit())
    while path not in classes:
        # inside a plain map the names are the user's
        path = path.rpartition(".")[0]
        if not path:
            raise KeyError(key)
    return classes[path]


@functools.cache
def key_classes(root: type[BaseModel] = RunConfig) -> dict[str, KeyClass]:
    """Return the class of every key below a section class by its dotted path, without numbers of list items.

    Raises:
        TypeError: a key has no class, or two types of a section disagree about it.
    """
    return _classes_in([root], "", covered=False)


def _classes_in(sections: Sections, prefix: str, *, covered: bool) -> dict[str, KeyClass]:
    """Return the classes of all keys below section classes; `covered`: a section above is marked Identity."""
    found: dict[str, KeyClass] = {}
    for key in keys_in(sections):
        path = f"{prefix}{key.name}"
        marks = [mark.key_class for mark in key.field.metadata if isinstance(mark, ResumeMark)]
        mark: KeyClass | None = "identity" if covered else next(iter(marks), None)
        below = _classes_in(key.sections, f"{path}.", covered=mark == "identity")
        if mark is None:
            if not key.is_container:
                raise TypeError(f"{path} has no resume class; mark its field as Free, Repack or Identity")
            # a section that is always there never differs as a whole; its class is for callers that ask all the same
            strictest = min(below.values(), key=STRICTEST.index)
            mark = strictest
        for name, key_class in {path: mark, **below}.items():
            # the other types of a union were here before, with the same path
            if found.setdefault(name, key_class) != key_class:
                raise TypeError(f"{name} has two resume classes; mark it alike in all types of its section")
    return found


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys with different values in two stored trees, also of an earlier release."""
    return list(_changed("", with_keys_moved(before), with_keys_moved(now)))


def refusal(found: list[Difference]) -> list[str]:
    """Return error lines for differences of class identity; empty if the run may be resumed."""
    identity = [difference for difference in found if difference.key_class == "identity"]
    return [f"{difference}; this makes another run (--fork, or another output_dir)" for difference in identity]


def _changed(path: str, before: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """Return (before, now) by dotted key, with numbers for items of a list of sections.

    A section present on one side only counts as one key, the section itself.
    """
    found: dict[str, tuple[Any, Any]] = {}
    if isinstance(before, dict) and isinstance(now, dict):
        if "type" in before and before["type"] != now.get("type"):
            # another type has other keys, so that a comparison key by key would say nothing
            return {f"{path}.type": (before["type"], now.get("type"))}
        for name in sorted(now.keys() & before.keys()):
            found |= _changed(f"{path}.{name}" if path else name, before[name], now[name])
    elif _is_table(before) and _is_table(now):
        for number, (entry_before, entry_now) in enumerate(zip_longest(before, now)):
            found |= _changed(f"{path}.{number}", entry_before, entry_now)
    elif before != now:
        found = {path: (before, now)}
    return dict(sorted(found.items()))


def _is_table(value: Any) -> bool:
    """Return whether a value is a list of sections (an empty list counts)."""
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
