"""Reading of input files. Faults are errors that name the file."""

import re
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import ConfigError

MAX_BYTES = 4_000_000
"""Largest configuration file or script."""


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number, as the parsers of the origins do in the end."""


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


def map_of(path: Path) -> dict[str, Any]:
    """Return the map in a YAML file. Of keys that occur twice the last counts, as for the origins.

    Raises:
        ConfigError: the file can't be read, is not YAML, or has no map.
    """
    text = text_of(path)
    try:
        tree = yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise ConfigError(f"{path}:{line} is not YAML: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path}: must be a map of keys; it is {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}
