"""Facts about the user's object beside its episodes: its own examples, columns of an example, scores of a group."""

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .shapes import ShapeError, accepted, is_driving, named_rewards
from .tools import Json
from .wire import pack

Run = Callable[..., Awaitable[Any]]
Rewards = dict[str, float | None]
SPLITS = ("train", "eval")


async def examples_of(target: Any, options: Json, run: Run) -> dict[str, int | None] | None:
    """Return the number of the environment's own examples by split (None: endless); None if it has none of its own.

    They are what `examples(split, **options)` returns: an attribute of the class or function, or a function of the
    module of a factory.

    Args:
        target: what the user's path names.
        options: keyword arguments of the class or factory; `examples` gets those that it has parameters for.
        run: runs the user's functions.

    Raises:
        ShapeError: `examples` needs an object, or returns no count.
    """
    examples = _of(target, "examples", "split")
    if examples is None and inspect.isfunction(target):
        examples = _of(sys.modules.get(target.__module__), "examples", "split")
    if examples is None:
        return None
    named = accepted(examples, options)
    counts = {split: await run(examples, split, **named) for split in SPLITS}
    for split, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ShapeError(f"examples({split!r}) returned {count!r}, but must return a count, or None for no end")
    return counts


def group_scorer(target: Any) -> Callable[..., Any] | None:
    """Return the target's `score_group(environments)`; None if it has none.

    Raises:
        ShapeError: the function needs an object, or episodes of this target have no objects to score.
    """
    scorer = _of(target, "score_group", "environments")
    if scorer is not None and is_driving(target) and not inspect.isclass(target):
        raise ShapeError("score_group needs an object of each episode; let a class with run(example, policy) drive")
    return scorer


def group_rewards(results: Any, count: int, name: str) -> list[Rewards]:
    """Return the rewards of each episode in a result of `score_group`.

    Args:
        results: a list of rewards by name, numbers, or None.
        count: number of episodes.
        name: name of a reward that is only a number.

    Raises:
        ShapeError: there is not one for each episode, or one is not finite.
    """
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != count:
        many = f"{len(results)} results" if isinstance(results, (list, tuple)) else type(results).__name__
        raise ShapeError(f"score_group returned {many}, but must return a list with one result for each of {count}")
    return [{} if one is None else named_rewards(one, name) for one in results]


def columns_of(environment: Any) -> Json:
    """Return further columns of an example: the attribute `columns` of the user's object, if it is a dictionary.

    Any other attribute of this name has a meaning of the user's own: a tool, or the width of a board.

    Raises:
        ShapeError: a name is no text, or a value can't be sent.
    """
    columns = getattr(environment, "columns", None)
    if not isinstance(columns, dict):
        return {}
    for name, value in columns.items():
        if not isinstance(name, str):
            raise ShapeError(f"the name of a column is {name!r}, but must be a text")
        try:
            pack({name: value})
        except (TypeError, ValueError, OverflowError) as error:
            raise ShapeError(f"the column {name!r} can't be sent: {error}") from error
    return dict(columns)


def _of(target: Any, name: str, first: str) -> Callable[..., Any] | None:
    """Return a function of the target, if its first parameter has the right name; raise if it needs an object."""
    function: Callable[..., Any] | None = getattr(target, name, None)
    parameters = _parameters(function)
    if inspect.isclass(target) and inspect.isfunction(inspect.getattr_static(target, name, None)):
        # of an object; a tool may well have this name
        if parameters[1:2] == [first]:
            raise ShapeError(f"{target.__name__}.{name} needs an object; make it a @staticmethod or a @classmethod")
        return None
    return function if parameters[:1] == [first] else None


def _parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters; none of what is no function."""
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return []
