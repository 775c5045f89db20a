"""From `package.module:function` or `/path/to/file.py:function` to a function of the user's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import ConfigError


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that a path names; its module is imported, by this process alone.

    Args:
        path: as configured.
        key: the configuration key, for the error.

    Raises:
        ConfigError: it can't be found or can't be called; says what is there instead.
    """
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
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
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
