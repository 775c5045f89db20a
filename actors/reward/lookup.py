"""Reward functions by their `path`: built in, or the user's own. Imports no numpy: `actors check` looks here too."""

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from actors.process import user_code
from actors.reward.builtin import BUILTIN, EXTRAS, NAMES_ELSEWHERE
from schemas.errors import ConfigError

RewardFunction = Callable[..., Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments filled with the sampled group, as in TRL. Columns and keys of `kwargs` must have other names."""
TRL_ARGUMENTS = frozenset({"log_extra", "log_metric", "trainer_state"})
"""Arguments of TRL beyond those of a group, passed to functions whose signature has them by name."""


def is_maker(path: str) -> bool:
    """Tell whether a path names a function of TRL that returns a reward function."""
    module, _, name = path.partition(":")
    return module == "trl.rewards" and name.startswith("get_")


def make_function(path: str, key: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Return the reward function that a function of TRL makes of its arguments.

    Args:
        path: path for which `is_maker` holds.
        key: configuration key with the path; named in errors.
        kwargs: arguments.

    Raises:
        ConfigError: TRL can't be imported, has no such function, or refuses the arguments.
    """
    maker = user_code.load_function(path, key)
    try:
        made: RewardFunction = maker(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path} refuses the kwargs {', '.join(sorted(kwargs)) or '(none)'}: {error}; it takes "
            f"{', '.join(inspect.signature(maker).parameters)}"
        ) from error
    return made


def load_function(path: str, key: str) -> RewardFunction:
    """Return a reward function: built in, or the user's own.

    Args:
        path: built-in name, `package.module:function`, or `/path/to/file.py:function`.
        key: configuration key with the path; named in errors.

    Raises:
        ConfigError: there is no built-in function of this name, or the user's module or function can't be loaded.
    """
    if is_maker(path):
        here = NAMES_ELSEWHERE.get(path.partition(":")[2], "a function of your own file that calls it")
        raise ConfigError(f"{key}: {path} returns a function and is none itself; use {here}")
    # names of built-in functions have no colon
    if ":" in path:
        return user_code.load_function(path, key)
    if path in BUILTIN:
        package = EXTRAS.get(path)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key}: {path} needs the package {package}; install grpo-actors[rewards]")
        return BUILTIN[path]
    close = difflib.get_close_matches(path, BUILTIN, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    hint = f", here it is {NAMES_ELSEWHERE[path]}" if path in NAMES_ELSEWHERE else hint
    raise ConfigError(
        f"{key}: no built-in reward {path!r}{hint}; built in are {', '.join(sorted(BUILTIN))}; "
        "your own is named package.module:function or file.py:function"
    )
