"""Runs for these tests; what writes their files may be held up for seconds on a busy machine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry import writer
from tests.actors.view.runs import MadeRun, made_config


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what is written."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 60.0)


Make = Callable[..., MadeRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make a run in a folder of its own, with `steps` steps; other arguments are of `made_config`."""
    made: list[MadeRun] = []

    def build(steps: int = 0, name: str = "made", size: int = 4, **sections: Any) -> MadeRun:
        run = MadeRun(made_config(tmp_path / name, name, **sections), size)
        for _ in range(steps):
            run.add_step()
        made.append(run)
        return run

    yield build
    for run in made:
        run.close()
