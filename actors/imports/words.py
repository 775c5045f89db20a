"""Words and values of a command line as transformers' HfArgumentParser reads them (TRL, ms-swift)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.config.load import parse
from schemas.errors import ConfigError

_NUMBER = re.compile(r"-?\.?\d")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
MAY_BE_EMPTY = ("top_k", "min_p", "max_grad_norm", "vllm_importance_sampling_clip_max", "logging_steps")
"""Keys with a number as default whose value may be None."""


def options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line: `--key value`, `--key=value`, `--key a b` (a list), `--key` (true).

    `key=value` without dashes is an option too. Dashes inside a key are underscores. The last of equal keys counts.

    Raises:
        ConfigError: a word belongs to no option.
    """
    found: dict[str, Any] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word):
            key, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
            found[key.replace("-", "_")] = values
        elif values is not None:
            values.append(word)
        elif "=" in word:
            key, _, value = word.partition("=")
            found[key] = [value]
        else:
            raise ConfigError(f"{word}: is no option; write --KEY VALUE")
    return {key: True if not value else value[0] if len(value) == 1 else value for key, value in found.items()}


def without_negations(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `--no_KEY` as KEY false: the parser has such a flag for each key that is true by default.

    Args:
        given: options of a command line.
        defaults: the origin's defaults.
    """
    found = dict(given)
    for flag, value in given.items():
        key = flag.removeprefix("no_")
        if key != flag and flag not in defaults and isinstance(defaults.get(key), bool) and value is True:
            del found[flag]
            found[key] = False
    return found


def typed(key: str, value: Any, default: Any, *, numeric: bool = False) -> Any:
    """Return a value as the origin's parser converts it, by the type of the key's default.

    Args:
        key: key of the origin, for the error.
        value: value of YAML, or text.
        default: the origin's default.
        numeric: whether the value is a number although the default is None.

    Raises:
        ConfigError: the value has another type.
    """
    if isinstance(value, list | tuple):
        raise ConfigError(f"{key}: takes one value, got {list(value)!r}")
    if value is None and isinstance(default, int | float) and key not in MAY_BE_EMPTY:
        raise ConfigError(f"{key}: is empty; remove it, or give a value such as the default {default}")
    if value is None or (default is None and not numeric):
        return mapping(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    if isinstance(default, bool):
        return _bool(key, value, default)
    if isinstance(default, int | float) or numeric:
        return _number(key, value, default)
    return value


def items(key: str, value: Any, *, numeric: bool = False) -> list[Any]:
    """Return a list of texts or numbers; a single value is a list of one.

    Raises:
        ConfigError: an item is neither.
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    if numeric:
        return [float(_number(key, one, 0.0)) for one in values]
    if not all(isinstance(one, str) for one in values):
        raise ConfigError(f"{key}: must be a list of texts, got {value!r}")
    return values


def mapping(text: str) -> Any:
    """Return the value of a text in JSON, or the text itself if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bool(key: str, value: Any, default: bool) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{key}: must be true or false, got {value!r}; its default is {str(default).lower()}")
    return text in _TRUE


def _number(key: str, value: Any, default: Any) -> int | float:
    number = parse(value) if isinstance(value, str) and len(value) < 40 else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{key}: must be a number, got {value!r}")
    if not isinstance(default, int):
        return number
    if number != int(number):
        raise ConfigError(f"{key}: must be an integer, got {value!r}")
    return int(number)
