"""Version of a package in the environment of another interpreter."""

import subprocess
from collections.abc import Sequence

from schemas.errors import ConfigError

_QUESTION = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
"""Script for the other interpreter; answers name and version of the first installed package."""
# a first start of Python on a network file system takes seconds
_PATIENCE_SECONDS = 60.0


def installed_version(python: str, names: Sequence[str]) -> tuple[str, str]:
    """Return name and version of the first of these packages that an interpreter has; empty texts if it has none.

    The package is not imported, which would take ten seconds.

    Raises:
        ConfigError: there is no such interpreter.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, *names], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"inference.engine.python: {python} can't be run: {error}") from error
    name, _, version = answer.stdout.strip().partition(" ")
    return name, version
