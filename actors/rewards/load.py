"""From the `path` of a reward function to the function. Only the reward actor resolves it (DESIGN §7)."""

import difflib
from collections.abc import Callable
from typing import Any

from actors import user_functions
from actors.rewards.builtin import BUILTIN
from schemas.errors import ConfigError

RewardFunction = Callable[..., Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What functions get from us, as from TRL: neither a column nor `kwargs` may take one of these names."""


def load_function(path: str, key: str) -> RewardFunction:
    """A built-in name, `package.module:function`, or `/path/to/file.py:function`.

    Args:
        path: as configured.
        key: the configuration key, for the error.

    Raises:
        ConfigError: it can't be found or can't be called; says what is there instead.
    """
    if ":" in path:
        return user_functions.load_function(path, key)
    if path in BUILTIN:
        return BUILTIN[path]
    close = difflib.get_close_matches(path, BUILTIN, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"{key}: no built-in reward {path!r}{hint}; built in are {', '.join(sorted(BUILTIN))}; "
        "your own is named package.module:function or file.py:function"
    )
