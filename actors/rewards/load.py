"""From the `path` of a reward function to the function. Only the reward actor resolves it (DESIGN §7)."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from actors.rewards.builtin import BUILTIN
from schemas.errors import ConfigError

RewardFunction = Callable[..., Any]


def load_function(path: str, key: str) -> RewardFunction:
    """A built-in name, `package.module:function`, or `/path/to/file.py:function`.

    Args:
        path: as configured.
        key: the configuration key, for the error.

    Raises:
        ConfigError: it can't be found or can't be called; says what is there instead.
    """
    if ":" not in path:
        if path in BUILTIN:
            return BUILTIN[path]
        close = difflib.get_close_matches(path, BUILTIN, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"{key}: no built-in reward {path!r}{hint}; built in are {', '.join(sorted(BUILTIN))}; "
            "your own is named package.module:function or file.py:function"
        )
    module_name, _, attribute = path.rpartition(":")
    module = _import_file(Path(module_name), key) if module_name.endswith(".py") else _import(module_name, key)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _import(name: str, key: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: can't import {name}: {type(error).__name__}: {error}") from error


def _import_file(path: Path, key: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ConfigError(f"{key}: there is no file {path}")
    _search(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {path} fails on import: {type(error).__name__}: {error}") from error
    return module


def _search(folder: Path) -> None:
    """Find modules of this folder too, as Python does for scripts; for good, since functions may import when called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
