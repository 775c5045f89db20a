"""Servers of other packages, started on the loopback interface for a test."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.system.environments.scripted import python_of

HERE = Path(__file__).parent


@contextlib.contextmanager
def served(script: str, *arguments: str) -> Iterator[str]:
    """The address of a server, which is killed at the end."""
    command = [python_of("openenv"), str(HERE / script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            assert port, f"{script} ended with {process.wait()}"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
