"""Groups of NCCL, with doubles: how they are made, and that the loss of a rank is no crash of the others."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from actors.learner import process_groups
from actors.learner.collective_watch import CollectiveWatch
from actors.learner.ranks import GlooRanks, RanksBrokenError

HANDLING, DUMP = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
GPU = torch.device("cuda")
RANK = """
import threading
from actors.learner.collective_watch import CollectiveWatch
from actors.process.exits import end_with_thread
from actors.process.membership import StartOverError

aborted = threading.Event()

def shall_wait():
    raise StartOverError("the gang was told to exit")

def abort():
    print("aborted", flush=True)
    aborted.set()

threading.excepthook = end_with_thread
watch = CollectiveWatch(shall_wait, abort)
try:
    with watch.watching():
        aborted.wait(60)  # the collective
    print("went on with garbage", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
threading.Event().wait(60)
"""


class Group:
    """Double of torch's ProcessGroupNCCL: a gather of it never ends."""

    made: "list[Group]"

    class Options:
        """As torch's."""

        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.timeout, self.connected, self.aborted = options._timeout, list[torch.device](), threading.Event()
        self.environment = {name: os.environ.get(name) for name in (HANDLING, DUMP)}
        Group.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Note the GPU."""
        self.connected.append(device)

    def allgather(self, *_: Any) -> Any:
        """Begin a gather."""
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self) -> None:
        """Note it."""
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that are made; torchrun has set the variable to another value."""
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(process_groups, "ABORT_SECONDS", 60.0)  # what is aborted here does not hang, and is looked at
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.setenv(DUMP, "1")
    return Group.made


def test_a_group_of_nccl_is_connected_when_it_is_made_and_its_watchdog_ends_no_process(nccl: list[Group]) -> None:
    """No collective may be the first to connect, since nobody could leave it; the packer bounds waits, not torch."""
    group = process_groups.nccl(None, 0, 2, GPU)
    assert [group] == nccl
    assert group.connected == [torch.device("cuda", 3)]
    assert group.environment == {HANDLING: "0", DUMP: "0"}
    assert group.timeout >= timedelta(days=1)


def test_a_sum_between_gpus_that_is_left_is_aborted(nccl: list[Group], tmp_path: Path) -> None:
    """The gang is told to exit while a rank waits in a sum: the second group is ended, and the order passes on."""

    class ToldToExitError(Exception):
        pass

    told = threading.Event()

    def check() -> None:
        if told.is_set():
            raise ToldToExitError

    ranks = GlooRanks(0, 1, tmp_path / "ranks", "127.0.0.1", check, 60.0)
    ranks.sum_on(torch.device("cpu"), "GPU-1")
    told.set()
    with pytest.raises(ToldToExitError):
        ranks.sum([torch.ones(2)])
    assert nccl[0].aborted.is_set()


def test_a_mesh_between_gpus_is_aborted_with_its_ranks(nccl: list[Group], tmp_path: Path, monkeypatch: Any) -> None:
    """Before the mesh there is nothing to end; its watchdog ends no process either."""
    ranks = GlooRanks(0, 1, tmp_path / "ranks", "127.0.0.1", lambda: None, 60.0)
    ranks.abort()
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **_: seen.append((backend, os.environ[HANDLING]))
    )
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", lambda kind, shape: (kind, shape))
    world = Group(None, 0, 1, Group.Options())
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    assert ranks.mesh(GPU) == ("cuda", (1,))
    assert seen == [("nccl", "0")]
    assert not world.aborted.is_set()
    ranks.abort()
    assert world.aborted.is_set()


@pytest.mark.parametrize("kind", ["hangs", "fails"])
def test_an_abort_that_hangs_or_fails_holds_no_exit_up(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """NCCL's own may; the process leaves all the same."""
    monkeypatch.setattr(process_groups, "ABORT_SECONDS", 0.05 if kind == "hangs" else 60.0)
    never = threading.Event()

    class Broken:
        def abort(self) -> None:
            if kind == "fails":
                raise RuntimeError("no communicator")
            never.wait(120.0)

    with capture_logs() as logs:
        process_groups.abort(Broken())
    never.set()
    assert [line["why"] for line in logs] == (["no communicator"] if kind == "fails" else [])


@pytest.mark.slow
def test_a_rank_in_a_collective_of_nccl_starts_over_and_ends_the_collective() -> None:
    """A process of its own: the watch aborts the double of a group, whose collective returns; the exit code is 75."""
    found = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 75, found.stdout + found.stderr
    assert "starting over" in found.stdout + found.stderr
    assert "aborted" in found.stdout
    assert "garbage" not in found.stdout


def test_a_block_whose_collective_was_aborted_does_not_end_as_if_it_had_a_result() -> None:
    """An aborted collective returns without an error, with anything in its tensors."""
    told: list[Any] = []
    before, threading.excepthook = threading.excepthook, told.append
    aborted = threading.Event()

    def shall_wait() -> None:
        raise ValueError("the gang was told to exit")

    try:
        watch = CollectiveWatch(shall_wait, aborted.set)
        with pytest.raises(RanksBrokenError, match="the gang shall not wait"), watch.watching():
            assert aborted.wait(60.0)
    finally:
        threading.excepthook = before
