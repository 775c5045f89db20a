"""Marks of tests that more than one file uses."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which only the first runs in `make test`; `make test-long` runs the others.

    Args:
        cases: values, or tuples where several arguments are parametrized.
    """
    first, *others = cases
    return [first, *(_long(case) for case in others)]


def long_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which only those in `kept` run in `make test`."""
    kept = list(kept)
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
