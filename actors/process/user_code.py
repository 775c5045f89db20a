"""User functions: from `package.module:function` or `/path/to/file.py:function` to the function itself."""

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import ConfigError

OURS = Path(__file__).resolve().parents[2]
"""Folder of this project's packages."""
OUR_PACKAGES = ("actors", "bus", "schemas")
MOVED = {
    "actors.algorithms.batch_words": "actors.algorithms.batch_sizes",
    "actors.engines.openai": "actors.reward.judge",
    "actors.environments.generated": "actors.datasets.generated",
    "actors.rewards.builtin": "actors.reward.builtin",
}
"""Present names of modules that user code of earlier builds names. A configured path may have either name: the path is
part of a run's identity, so a run of an earlier build must be able to keep it."""
NAME_TAKEN = "this name is taken by a package of grpo-actors, which Python finds instead; rename yours"
"""End of the error for a user's module with the name of one of OUR_PACKAGES."""


def load_function(path: str, key: str) -> Callable[..., Any]:
    """Return the function that a path names. The module is imported into this process.

    Args:
        path: `package.module:function` or `/path/to/file.py:function`, as configured.
        key: configuration key with the path; named in errors.

    Raises:
        ConfigError: the module can't be imported, or has no such function.
    """
    module_name, _, attribute = path.rpartition(":")
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name), key)
    else:
        _search(Path.cwd())
        try:
            module = importlib.import_module(MOVED.get(module_name, module_name))
        except (Exception, SystemExit) as error:  # SystemExit: a script without `if __name__ == "__main__"`
            words = f"{key}: can't import {module_name}: {type(error).__name__}: {error}"
            raise ConfigError(words + _hint(error, Path.cwd())) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _import_file(path: Path, key: str) -> ModuleType:
    # the name depends on the whole path: functions of the same file share a module, equal file names don't clash
    name = f"user_file_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ConfigError(f"{key}: there is no file {path}")
    if problems := list(hidden_imports(path)):
        raise ConfigError(*(f"{key}: {problem}" for problem in problems))
    _search(path.parent)
    module = importlib.util.module_from_spec(spec)
    # before the code runs, as Python does: dataclasses look up the module of their class
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        words = f"{key}: {path} fails on import: {type(error).__name__}: {error}"
        raise ConfigError(words + _hint(error, path.parent)) from error
    return module


def hidden_imports(file: Path) -> Iterator[str]:
    """Yield an error text for each import in a user's file that Python would resolve to one of OUR_PACKAGES instead.

    Such an import means a module next to the file, named like one of OUR_PACKAGES. The file is parsed, not run. A file
    with a syntax error yields nothing here; the import reports the error.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (package + alias.name for alias in node.names):
            # the first part decides: Python looks for `actors` before it looks for `actors.mine`
            beside = _named_like_ours(file.parent, name.partition(".")[0])
            if beside and not _is_ours(name):
                yield f"{file}, line {node.lineno}: imports {beside}, and {NAME_TAKEN}"


def _named_like_ours(folder: Path, name: str) -> Path | None:
    """Return the module or package in a user's folder whose name is `name`, if `name` is one of OUR_PACKAGES."""
    if name not in OUR_PACKAGES or folder.resolve() == OURS:
        return None
    return next((path for path in (folder / f"{name}.py", folder / name) if path.exists()), None)


def _is_ours(dotted: str) -> bool:
    """Return whether a dotted name is a submodule of OUR_PACKAGES, or an attribute of a submodule."""
    parts = dotted.split(".")
    places = [OURS.joinpath(*parts[:length]) for length in (2, 3) if length <= len(parts)]
    return any(place.with_suffix(".py").is_file() or place.is_dir() for place in places)


def _hint(error: BaseException, folder: Path) -> str:
    """Return a hint for an import error explained by MOVED or by a user's module named like ours; empty otherwise."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    moved = [f"{old} is {new} now" for old, new in MOVED.items() if f"{old}.".startswith(f"{error.name}.")]
    package = error.name.partition(".")[0]
    if module := _named_like_ours(folder, package):
        return f"; {package!r} is {module}, and {NAME_TAKEN}"
    return f"; {', '.join(moved)}" if moved else ""


def _search(folder: Path) -> None:
    """Add a folder to Python's search path, as for scripts. The folder stays: functions may import when called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
