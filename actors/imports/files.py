"""Reading of input files. Faults are errors that name the file."""

import re
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import ConfigError

MAX_BYTES = 4_000_000
"""Largest configuration file or script."""


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number, as the parsers of the origins do in the end.

    It also lists the keys that stand twice in a map.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a map, and keep the keys that stand in it twice, with the line of the second one."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                self.repeated.append(f"{key.value} (lines {lines[key.value]} and {key.start_mark.line + 1})")
            elif isinstance(key, yaml.ScalarNode):
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def text_of(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: the file can't be read, is too large, or is not UTF-8.
    """
    try:
        size, text = path.stat().st_size, None
        if size <= MAX_BYTES:
            text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it in that encoding") from None
    if text is None:
        raise ConfigError(f"{path}: has more than {MAX_BYTES} bytes; that is no configuration")
    return text


def map_of(path: Path, notes: list[str] | None = None, *, unique: bool = False) -> dict[str, Any]:
    """Return the map in a YAML file. Of keys that occur twice the last counts, as for PyYAML.

    Args:
        path: the file.
        notes: gets a remark for each key that occurs twice in a map.
        unique: whether the origin refuses such keys, as OmegaConf does.

    Raises:
        ConfigError: the file can't be read, is not YAML, or has no map.
    """
    text = text_of(path)
    try:
        loader = _Loader(text)
        try:
            tree = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise ConfigError(f"{path}:{line} is not YAML: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path}: must be a map of keys; it is {type(tree).__name__}")
    for key in loader.repeated:
        if unique:
            raise ConfigError(f"{path}: {key} stands twice in a map, which the origin refuses; remove one")
        if notes is not None:
            notes.append(f"{path.name}: {key} stands twice in a map; the last one counts, as there")
    return {str(key): value for key, value in tree.items()}
