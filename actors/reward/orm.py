"""Adapter of ms-swift's reward classes: `class X(ORM)` with `__call__(self, completions, **columns)` on texts."""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from actors.reward.library.completions import Completion
from schemas.errors import ConfigError

BASES = ("ORM", "AsyncORM")


def adapt_orm(found: type, kwargs: Mapping[str, Any], key: str) -> Any:
    """Return a reward function that calls an instance of a class derived from ms-swift's ORM or AsyncORM.

    The class is made once, as in ms-swift with `args`, whose attributes are the configured `kwargs`.

    Raises:
        ConfigError: the class has no such base, or can't be made.
    """
    if not any(base.__name__ in BASES for base in found.__mro__[1:]):
        raise ConfigError(
            f"{key}: {found.__name__} is a class without the base ORM or AsyncORM of ms-swift; name a function, or an "
            "instance of the class"
        )
    try:
        orm = found(args=SimpleNamespace(**kwargs))
    except Exception as error:
        raise ConfigError(
            f"{key}: {found.__name__}(args) raised {type(error).__name__}: {error}; args has the attributes of kwargs: "
            f"{', '.join(sorted(kwargs)) or 'none'}"
        ) from error
    # a function of this module would hide whether the class is async
    if inspect.iscoroutinefunction(found.__call__):

        async def score_async(prompts: list[Any], completions: list[Completion], **columns: Any) -> Any:
            return await orm(_texts(completions), **_columns(prompts, columns))

        return score_async

    def score(prompts: list[Any], completions: list[Completion], **columns: Any) -> Any:
        return orm(_texts(completions), **_columns(prompts, columns))

    return score


def _columns(prompts: list[Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns under the names of ms-swift: `response_token_ids`, and `messages` of each prompt."""
    named = {name: values for name, values in columns.items() if name != "completion_ids"}
    named["response_token_ids"] = columns.get("completion_ids", [])
    named["messages"] = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    return named


def _texts(completions: list[Completion]) -> list[str]:
    """Return the last message of each completion, as ms-swift passes it."""
    return [one if isinstance(one, str) else str(one[-1].get("content") or "") for one in completions]
