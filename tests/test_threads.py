"""No thread of ours can be forgotten: all are made in one place, and none of them ends unheard."""

import ast
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from actors.process import exits
from bus import threads

pytestmark = pytest.mark.xdist_group("tree")  # a worker parses the tree once
ROOT = Path(__file__).parent.parent
FILES = [path for package in ("bus", "actors") for path in sorted((ROOT / package).rglob("*.py"))]
MAKERS = {
    "bus/threads.py",
    "actors/engines/external/guard.py",
    "actors/environments/worker/service.py",
    "actors/reward/sandbox/verifier.py",
}
"""The one place, and programs of their own that import nothing of `bus`."""
FORBIDDEN = {"Thread", "ThreadPoolExecutor", "Timer", "start_new_thread", "ProcessPoolExecutor"}
UNREAD = {"submit", "keep", "create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor", "to_thread"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _called(node: ast.AST) -> str:
    """The last part of the name of what is called; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _lines(is_meant: Callable[[ast.AST], bool], but: Collection[str]) -> list[str]:
    """The lines of such nodes, but for those in some files."""
    return [
        f"{_name(path)}:{node.lineno}"  # type: ignore[attr-defined]  # a call or a statement, which has one
        for path in FILES
        if _name(path) not in but
        for node in ast.walk(ast.parse(path.read_text()))
        if is_meant(node)
    ]


def test_threads_are_made_in_one_place() -> None:
    """What makes a thread or a pool elsewhere would end without a word when it raises."""
    assert _lines(lambda node: _called(node) in FORBIDDEN, but=MAKERS) == []
    assert _lines(lambda node: _called(node) in FORBIDDEN, but=()) != []


def test_no_result_of_other_threads_or_tasks_is_thrown_away() -> None:
    """An exception is in the result, so a statement that drops it swallows the exception."""
    assert _lines(lambda n: isinstance(n, ast.Expr) and _called(n.value) in UNREAD, but=("bus/threads.py",)) == []


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the runtime would have ended this process."""
    codes: list[int] = []
    monkeypatch.setattr(exits, "leave", codes.append)
    monkeypatch.setattr(threading, "excepthook", exits.end_with_thread)
    return codes


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(0), MemoryError()], ids=lambda e: type(e).__name__)
def test_an_exception_in_a_thread_of_ours_ends_the_process(left: list[int], error: BaseException) -> None:
    """Whatever it is: a loop that has ended does its work no more."""
    threads.start("weights", _raise, error).join(60.0)
    assert left == [exits.EXIT_ERROR]


@pytest.mark.parametrize("pool", [threads.Workers, threads.DaemonWorkers])
def test_work_whose_result_nobody_reads_ends_the_process_when_it_raises(left: list[int], pool: Any) -> None:
    """A pool keeps exceptions for those who ask; here nobody does."""
    with pool(1, "score") as workers:
        workers.run(_raise, RuntimeError("no"))
    assert left == [exits.EXIT_ERROR]


@pytest.mark.parametrize("pool", [threads.Workers, threads.DaemonWorkers])
def test_a_pool_returns_results_and_cancels_work_that_waits(pool: Any) -> None:
    """No more threads than allowed, each used again; work after the end is refused."""
    may_end, names, started = threading.Event(), set(), threading.Barrier(3)

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        return 1 // number

    def hang() -> bool:
        started.wait(60.0)
        return may_end.wait(60.0)

    workers = pool(2, "score")
    assert [workers.submit(work, number).result(10.0) for number in (1, 1, 1)] == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        workers.submit(work, number=0).result(10.0)
    assert len(names) <= 2
    running, waiting = [workers.submit(hang) for _ in range(2)], workers.submit(work, 1)
    started.wait(60.0)
    workers.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.submit(work, 1)
    may_end.set()
    assert [one.result(10.0) for one in running] == [True, True]


def test_the_interpreter_exits_while_work_of_a_user_never_returns() -> None:
    """A reward function may hang in a program of the user, which ends all the same."""
    code = """
import threading
from bus.threads import DaemonWorkers
started = threading.Event()
def hang():
    started.set()
    threading.Event().wait()
DaemonWorkers(1, "reward").submit(hang)
started.wait()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class _Stuck:
    """A stream whose reader is gone, or reads no more."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def flush(self) -> None:
        """Fail, or never return."""
        if self._raises:
            raise BrokenPipeError
        threading.Event().wait()


def _leave(output: Any) -> None:
    """End the process with this output, by code 7."""
    sys.stdout = output
    exits.leave(7)


@pytest.mark.parametrize("raises", [True, False], ids=["broken", "full"])
def test_a_process_that_is_to_end_ends_though_its_output_can_not_be_flushed(
    monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """With its own exit code: the thread that flushes is waited for, and not for long."""
    monkeypatch.setattr(exits, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    child = multiprocessing.get_context("fork").Process(target=_leave, args=(_Stuck(raises),), daemon=True)
    child.start()
    child.join(60.0)
    assert child.exitcode == 7


WATCHED = """
import os, sys, time
from actors.process import exits
sys.platform = "darwin"
exits.die_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WATCHED!r}])"


def test_a_process_that_the_kernel_does_not_kill_ends_with_its_parent() -> None:
    """On systems without Linux's death signal a thread looks for the parent; then the pipe has no writer any more."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.kill()
        readable, _, _ = select.select([parent.stdout], [], [], 60.0)
        if not readable:
            os.kill(orphan, signal.SIGKILL)
        assert readable
        assert parent.stdout.read() == ""


def test_threads_of_user_code_end_as_they_please(left: list[int]) -> None:
    """They are not marked, whatever they are called; so is one that hands its exceptions on."""
    thread = threading.Thread(target=_raise, args=(RuntimeError("mine"),), name="control-of-mine")
    thread.start()
    thread.join(60.0)
    threads.start_helper("meeting", _raise, RuntimeError("handed on")).join(60.0)
    assert left == []
