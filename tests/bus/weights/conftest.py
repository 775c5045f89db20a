"""What the tests of weight channels share."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_meeting_outlives_its_test() -> Iterator[None]:
    """A thread that waits inside gloo when the interpreter ends would abort the process (actors leave at once)."""
    yield
    for thread in threading.enumerate():
        if thread.name == "rendezvous":
            thread.join(35.0)
