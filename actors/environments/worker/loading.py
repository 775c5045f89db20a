"""The user's object out of a path: `my_env.py:Env`, or `package.module:Env`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters"
"""Folder of the adapters, each a file with the name of the package that it imports."""


class LoadError(ValueError):
    """Error for a path that leads to no object; says what to change."""


def load(path: str) -> Any:
    """Return the object that a path names. The module is imported into this process.

    Args:
        path: `/folder/file.py:name` or `package.module:name`; `file.py` is looked for below the working directory. A
            file's folder is searched for its imports.

    Raises:
        LoadError: there is no such file, module or name, or the import fails.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name:
        raise LoadError(f"{path!r} must be file.py:name or package.module:name")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_package(module_name)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script without `if __name__ == "__main__"`
        raise LoadError(f"can't import {module_name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise LoadError(f"{module_name} has no {name!r}")
    return getattr(module, name)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise LoadError(f"there is no file {path.resolve()}")
    name = _module_name(path.stem)
    if path.resolve().parent == ADAPTERS:
        # neither its name nor its folder may come before the package
        name = f"adapter_{path.stem}"
    else:
        _search(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a name that ends with .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # before the code runs, as Python does: dataclasses look up the module of their class
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _module_name(stem: str) -> str:
    """Return the name of a file's module: its own, by which processes of the user find its classes, unless taken."""
    is_taken = "." in stem or stem in sys.modules or stem in sys.stdlib_module_names
    return f"user_environment_{stem}" if is_taken else stem


def _from_package(name: str) -> Any:
    _search(Path.cwd())
    return importlib.import_module(name)


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
