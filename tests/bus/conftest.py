"""Runs of which only the bus matters, on each transport, with sockets in a short folder of their own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.config import RunConfig, check_tree
from tests.ports import free_port

TRANSPORTS = ("tcp", "ipc", "inproc")
MakeConfig = Callable[..., RunConfig]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    return str(request.param)


@pytest.fixture
def make_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeConfig]:
    """Makes configurations; the arguments are keys of `bus`."""
    folder = tempfile.mkdtemp(prefix="bus-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def make(transport: str, **bus: Any) -> RunConfig:
        control = f"tcp://127.0.0.1:{free_port()}" if transport == "tcp" else transport
        return check_tree(
            {
                "output_dir": f"{folder}/out",
                "model": {"path": "none"},
                "environments": [{"type": "arithmetic"}],
                "reward": {"functions": [{"path": "exact_match"}]},
                "trainer": {"max_steps": 1},
                "bus": {"control": control, **bus},
            }
        )

    yield make
    shutil.rmtree(Path(folder), ignore_errors=True)
