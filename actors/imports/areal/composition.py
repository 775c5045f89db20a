"""Files of AReaL as one tree: Hydra's defaults list, words of its command line, references of OmegaConf."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from actors.imports.areal.tables import KEYS
from actors.imports.files import map_of
from schemas.config.load import parse
from schemas.errors import ConfigError

MAX_VALUES = 20_000
"""Values of a configuration with all references replaced, against references that grow without end."""
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_OWN = "_self_"


def composed(path: Path, includers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the tree of a file with the files of its defaults list, which lie in its folder.

    The file itself takes precedence over those files, unless the list says where `_self_` stands.

    Raises:
        ConfigError: a file can't be read, has a key twice, or includes itself.
    """
    if path.resolve() in includers:
        raise ConfigError(f"{path}: includes itself through its defaults list")
    own = map_of(path, unique=True)
    listed = own.pop("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: defaults must be a list of files, got {listed!r}")
    tree: dict[str, Any] = {}
    for item in listed if _OWN in listed else [*listed, _OWN]:
        if item == _OWN:
            join(tree, own)
            continue
        for group, name in _choices(path, item):
            file = path.parent / group / f"{name.removesuffix('.yaml')}.yaml"
            part = composed(file, (*includers, path.resolve()))
            # a file of a group is the section of that name
            for section in reversed(group.split("/") if group else []):
                part = {section: part}
            join(tree, part)
    return tree


def _choices(path: Path, item: Any) -> list[tuple[str, str]]:
    """Return group and name of an item of a defaults list: `base`, or `group: name`."""
    if isinstance(item, str):
        return [("", item.removeprefix("/"))]
    if isinstance(item, dict) and all(isinstance(part, str) for pair in item.items() for part in pair):
        return [(group.removeprefix("/"), name) for group, name in item.items() if not group.startswith("override ")]
    raise ConfigError(f"{path}: defaults: {item!r} is no name of a file and no group: name")


def join(tree: dict[str, Any], top: Mapping[str, Any]) -> None:
    """Join a tree into another one, which gives way."""
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            join(tree[key], value)
        else:
            tree[key] = value


def put(tree: dict[str, Any], word: str) -> None:
    """Put a word of the command line into a tree: `a.b=c`, `+a.b=c`, `++a.b=c`, or `~a.b`, which takes a key out.

    Raises:
        ConfigError: the word is none of these, or has no place.
    """
    name, equals, text = word.lstrip("+").partition("=")
    is_removed = name.startswith("~")
    if not equals and not is_removed:
        raise ConfigError(f"{word}: is no file and no word key=value of AReaL")
    node, *parts = tree, *name.removeprefix("~").split(".")
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{word}: there is a value where it needs a section")
    if is_removed:
        if parts[-1] not in node:
            raise ConfigError(f"{word}: no file has this key, so that there is nothing to take out")
        del node[parts[-1]]
        return
    try:
        node[parts[-1]] = parse(text)
    except yaml.YAMLError:
        node[parts[-1]] = text


class Resolver:
    """A tree with references `${a.b}`, `${.a}` and `${oc.env:NAME,default}`, also to sections."""

    def __init__(self, tree: dict[str, Any]) -> None:
        """Keep the tree."""
        self._tree = tree
        self._count = 0

    def tree(self) -> dict[str, Any]:
        """Return the tree with all references replaced.

        Raises:
            ConfigError: a reference has no value, needs the environment, or leads back to itself.
        """
        return {key: self._resolved(value, key, ()) for key, value in self._tree.items()}

    def _resolved(self, value: Any, key: str, path: tuple[str, ...]) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise ConfigError(f"{key}: the references of the file make more than {MAX_VALUES} values")
        if isinstance(value, dict):
            return {name: self._resolved(one, f"{key}.{name}", path) for name, one in value.items()}
        if isinstance(value, list):
            return [self._resolved(one, f"{key}.{number}", path) for number, one in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if key in path:
            raise ConfigError(f"{path[0]}: refers to itself: {' → '.join([*path, key])}")
        if match := _REFERENCE.fullmatch(value):
            return self._found(match[1].strip(), key, (*path, key))
        return _REFERENCE.sub(lambda match: str(self._found(match[1].strip(), key, (*path, key))), value)

    def _found(self, name: str, key: str, path: tuple[str, ...]) -> Any:
        """Return the value of a reference that stands at a key."""
        if name.startswith("oc.env:"):
            variable, comma, default = name.removeprefix("oc.env:").partition(",")
            if not comma:
                raise ConfigError(f"{key}: needs the environment variable {variable}, not read here; give {key}=VALUE")
            return parse(default)
        if name.startswith("."):
            # one dot is the section of the key, each further one the section above
            rest = name.lstrip(".")
            above = key.split(".")[: -(len(name) - len(rest))]
            name = ".".join([*above, rest])
        node: Any = self._tree
        for part in name.split("."):
            is_item = isinstance(node, list) and part.isdigit() and int(part) < len(node)
            if not is_item and not (isinstance(node, dict) and part in node):
                break
            node = node[int(part)] if isinstance(node, list) else node[part]
        else:
            return self._resolved(node, name, path)
        if name in KEYS:
            return KEYS[name].default
        raise ConfigError(f"{key}: refers to {name}, which no file has; give {name}=VALUE")
