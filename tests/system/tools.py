"""Programs of others that tests marked `system` need: found beside this interpreter, or on PATH."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def tool(name: str, how_to_install: str) -> str:
    """The path of a program. Without it the test is not run and says why; where CI=true it fails.

    Args:
        name: `promtool`.
        how_to_install: the command that brings it, `apt-get install prometheus`.
    """
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        missing(f"install {name} ({how_to_install})")
    return path


def missing(words: str) -> NoReturn:
    """Not run: words. A failure where CI=true, for there everything is installed."""
    words = f"not run: {words}"
    pytest.fail(words) if os.environ.get("CI") == "true" else pytest.skip(words)
