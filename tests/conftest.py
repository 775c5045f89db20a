"""Fixtures of all tests. Nothing here imports torch before a test asks for a model."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from actors.process.devices import has_gpu

if not has_gpu():
    # before anything imports Triton, which reads the variable once: kernels are interpreted on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # so that commands under test can be interrupted: a shell starts its background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("shared machine", deadline=None)  # an example's time says nothing on one
hypothesis.settings.load_profile("shared machine")
ModelFolder = Callable[..., Path]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collections: a quarter of the time would go into them, and they find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no worker is left with minutes of work when all others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the thousands of collected tests out of every later garbage collection, which would visit all of them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have recorded, by whichever process ran them."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, words in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {words}")


@pytest.fixture
def nothing_else_to_collect() -> Iterator[None]:
    """Keep what other tests of this process have left out of every garbage collection.

    A collection visits all of it, and the more there is, the longer garbage lies before Python collects it.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """`model_folder(family, seed=0, eos=2)`: the directory of a tiny random model (see tests/models.py)."""
    import torch

    from tests import models

    torch.set_num_threads(1)
    made: dict[tuple[str, int, int], Path] = {}

    def folder(family: str = "qwen3", seed: int = 0, eos: int = models.EOS) -> Path:
        key = (family, seed, eos)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            models.build(made[key], family, seed, eos)
        return made[key]

    return folder
