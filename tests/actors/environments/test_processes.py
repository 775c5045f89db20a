"""Processes below a worker are found, counted and killed, whatever they are called and whomever they belong to."""

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.environments import local
from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.environments.spec import Limits
from actors.environments.worker import processes
from tests.actors.environments.test_pool import WAIT, says, spec, until
from tests.processes import has_ended

pytestmark = pytest.mark.slow


def test_a_process_name_may_hold_any_bytes(tmp_path: Path) -> None:
    """Also those that are no UTF-8, and parentheses."""
    code = "import sys\nopen('/proc/self/comm', 'wb').write(b'\\xff) Z (')\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = processes.snapshot()
        assert found[child.pid].parent == os.getpid()
        assert child.pid in processes.below([os.getpid()], found)
        child.kill()


async def test_a_worker_with_a_name_of_any_bytes_is_watched_and_ended() -> None:
    """Beats go on, and the end of the pool finds the process."""
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)
    async with WorkerPool(spec("Named", limits=limits)) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({}, 0)
            [one] = pool.workers.values()
            one.process.seen = {}
            await until(lambda: bool(one.process.seen))
            await episode.step(says("a"))
        pid = one.process.pid
    assert has_ended(pid)


def test_a_process_that_may_not_be_killed_saves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another user: the rest is killed, and nothing is left stopped."""
    children = [subprocess.Popen(["sleep", "3600"], start_new_session=True) for _ in range(2)]
    first = children[0].pid
    kill = os.kill

    def refused(process: int, number: int) -> None:
        if process == children[1].pid:
            raise PermissionError
        kill(process, number)

    monkeypatch.setattr(os, "kill", refused)
    seen = processes.below([child.pid for child in children], processes.snapshot())
    processes.kill_all(first, seen)
    assert children[0].wait(WAIT) == -signal.SIGKILL
    kill(children[1].pid, signal.SIGKILL)
    children[1].wait(WAIT)


def test_an_id_that_is_used_again_is_not_killed() -> None:
    """Neither as a process seen before, nor as the root, which has ended."""
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as child:
        processes.kill_left(child.pid, {child.pid: -1})
        assert child.poll() is None
        assert processes.snapshot()[child.pid].is_living
        child.kill()


async def test_a_worker_that_dies_by_itself_leaves_no_process(tmp_path: Path) -> None:
    """Neither in its session, nor in one of their own if the watch has seen them."""
    mark = tmp_path / "mark"
    async with WorkerPool(spec("Orphans")) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"mark": str(mark)}, 0)
            children = [int(word) for word in mark.read_text().split()]
            [one] = pool.workers.values()
            await until(lambda: set(children) <= one.process.seen.keys())
            with pytest.raises(EpisodeError, match="ended with status 3"):
                await episode.step(says("a"))
        await until(lambda: all(map(has_ended, children)))


async def test_processes_are_counted_in_a_thread_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine has thousands of them, and the event loop serves all episodes."""
    threads: list[threading.Thread] = []

    def snapshot() -> Any:
        threads.append(threading.current_thread())
        return processes.snapshot()

    monkeypatch.setattr(local, "snapshot", snapshot)
    async with WorkerPool(spec("Guess", workers=2)) as pool:
        await until(lambda: pool.num_ready == 2)
        for task in pool._tasks:
            if "_watch" in repr(task):
                task.cancel()
        # one that was under way ends
        async with asyncio.timeout(WAIT):
            while any("_watch" in repr(task) for task in pool._tasks):
                await asyncio.sleep(0.01)
        threads.clear()
        await pool._look(may_be_silent=False)
        assert all(one.process.seen for one in pool.workers.values())
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()


async def test_no_failure_of_a_search_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no limit of a process would hold any more."""
    looks: list[int] = []

    def snapshot() -> Any:
        looks.append(1)
        raise RuntimeError("no /proc")

    monkeypatch.setattr(local, "snapshot", snapshot)
    async with WorkerPool(spec("Guess")):
        await until(lambda: len(looks) > 1)
