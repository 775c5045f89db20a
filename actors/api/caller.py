"""Functions of the Python program that started a run: rewards given to `GRPOTrainer` as objects.

A path `actors.api.caller:NAME` in a configuration means such a function. Only that program has the function, so its
reward actor runs inside the program.
"""

from collections.abc import Callable, Mapping
from typing import Any

_functions: dict[str, Callable[..., Any]] = {}


def provide(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Make functions of this process available by path; return the paths by name."""
    _functions.update(functions)
    return {name: f"{__name__}:{name}" for name in functions}


def __getattr__(name: str) -> Any:
    """Return a provided function.

    Raises:
        AttributeError: this process has not provided the function.
    """
    if name in _functions:
        return _functions[name]
    raise AttributeError(f"{name} belongs to the Python program that started this run; start that program again")
