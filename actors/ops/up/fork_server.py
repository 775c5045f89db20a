"""Fork server: a process that has imported an actor's modules, and forks the actors of `actors up` from itself.

An import of torch and transformers takes seconds, of every actor that starts or comes back. A fork takes milliseconds.

    actors up ── request: command, variables ──▶ fork server        answer: pid
    actors up ◀─ child of `actors up`, by a second fork ── actor    waits for GO, then runs the command

The first server is a fork of `actors up`, made before its first thread. A server has a single thread, and imports
modules of this project and of libraries, never a user's. `actors up` becomes the parent of each actor (for the moment
of the fork it is a PR_SET_CHILD_SUBREAPER), so signals, exit codes and the death of the parent work as for a program
that it has started itself.

Variables of the environment that C libraries read when they are loaded are applied by their functions: the number of
threads of torch, and glibc's thresholds.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog
from setproctitle import getproctitle, setproctitle, setthreadtitle

from actors.process.exits import die_with

READY, GO = b"ready", b"go"
"""Messages: the modules are imported; the actor may start."""
MAX_BYTES = 1 << 16
"""Largest message."""
ENDED = 1
"""Exit code of a process whose start was given up, or that raised."""
HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a server blocks, since it ends with `actors up`. One sent to an actor before it has begun comes then."""
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Numbers that mallopt(3) gives to variables of glibc: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD."""
PROGRAM = "actors.cli"
"""Module whose `main` is the program of an actor. Named, not imported: a server knows of actors what `ps` shows."""
SERVER = "actors.ops.up.fork_server"
"""Name of this program."""
PYTHON = ("-P", "-m")
"""Arguments of Python in front of a program's name. -P: no packages from the working directory, where the user's may
have names of ours or of Python's."""


def num_threads() -> int:
    """Return the number of threads of this process, those of C libraries included; 0 without /proc."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def fork_here(channel: socket.socket, modules: Sequence[str], output: int) -> int:
    """Fork a fork server from this process, which must have a single thread. Return its pid.

    Args:
        channel: as for `serve`.
        modules: as for `serve`.
        output: descriptor of its stdout and stderr.

    Raises:
        OSError: there is no room for another process.
    """
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()

    def begin() -> int:
        die_with(parent)
        os.setsid()
        _leave_all_but(channel.fileno(), output)
        for name, number in (("stdout", 1), ("stderr", 2)):
            # that of this process may write elsewhere, as after contextlib.redirect_stdout, and its file is closed now
            stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        if not sys.flags.safe_path:  # as PYTHON demands
            del sys.path[0]
        structlog.reset_defaults()
        _show([SERVER])
        return serve(channel, modules, parent)

    if not pid:
        _end_with(begin)
    return pid


def serve(channel: socket.socket, modules: Sequence[str], parent: int) -> int:
    """Import modules, then fork a process for each request, until the channel is closed. Return the exit code.

    Args:
        channel: socket of packets to `actors up`.
        modules: names of the modules that actors need.
        parent: pid of `actors up`.
    """
    channel.set_inheritable(False)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    # a launcher may have ignored it, and the end of a child would not be told
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for module in modules:
        importlib.import_module(module)
    if num_threads() != 1:
        # a lock that another thread holds stays locked in a fork for good
        print(f"fork server: {num_threads()} threads after the imports, so actors start without it", file=sys.stderr)
        return ENDED
    # what lives now lives as long as each fork: a collection would only copy its pages
    gc.collect()
    gc.freeze()
    channel.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 16)
        if not message:
            return 0
        try:
            pid = _fork_twice(json.loads(message), descriptors, parent, channel)
        except OSError as error:  # no room for another process now
            print(f"fork server: {error}", file=sys.stderr)
            pid = 0
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(str(pid).encode())


def _fork_twice(request: Mapping[str, Any], descriptors: Sequence[int], parent: int, channel: socket.socket) -> int:
    """Fork an actor, and return its pid: `actors up` is its parent, as the process in between exits at once.

    Raises:
        OSError: there is no room for another process.
    """
    reading, writing = os.pipe()

    def begin() -> int:
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            return 0
        os.close(reading)
        os.close(writing)
        channel.close()
        return _become(request, descriptors, parent)

    try:
        between = os.fork()
        if not between:
            _end_with(begin)
    finally:
        os.close(writing)
        answer = os.fdopen(reading, "rb")
    with answer:
        pid = int(answer.read() or 0)
    # once it is gone, its child is a child of `actors up`
    os.waitpid(between, 0)
    return pid


def _become(request: Mapping[str, Any], descriptors: Sequence[int], parent: int) -> int:
    """Run a request's command in this process, as a program of its own would. Return the exit code."""
    go, log, *inherited = descriptors
    with os.fdopen(go, "rb") as gate:
        # `actors up` closes the gate without a word if it no longer waits for this process
        if gate.read() != GO or os.getppid() != parent:
            return ENDED
    die_with(parent)
    os.setsid()
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    _place(inherited, request["numbers"])
    _apply(request["variables"], request["removed"])
    command = request["command"]
    sys.argv = ["actors", *command]
    _show([*([SERVER] if request["serves"] else ["actors"]), *command])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    if request["serves"]:
        return serve(socket.socket(fileno=request["numbers"][0]), command, parent)
    return int(importlib.import_module(PROGRAM).main(command))


def _end_with(run: Callable[[], int]) -> NoReturn:
    """Run, and exit with the code, as the interpreter does at the end of a program.

    Whatever happens, also on a full disk, this process ends: it is a fork, and nothing may go back into the code of the
    process that it is a fork of.
    """
    code: object = ENDED
    try:
        try:
            code = run()
        except SystemExit as ended:
            code = ended.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
        except BaseException:  # noqa: BLE001 - as above
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code if isinstance(code, int) else ENDED)


def _leave_all_but(channel: int, output: int) -> None:
    """Close all descriptors but a channel and stdin; stdout and stderr become `output`."""
    for standard in (1, 2):
        os.dup2(output, standard)
    kept = {1, 2, channel}
    if sys.stdin is None:  # closed, so 0 may be a file of `actors up`
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - its number counts
            os.dup2(nothing.fileno(), 0)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in kept | {0}:
            with contextlib.suppress(OSError):  # that of this very list
                os.close(int(entry.name))


def _show(arguments: Sequence[str]) -> None:
    """Show arguments of Python as the command of this process in `ps`."""
    setproctitle(" ".join([sys.executable, *PYTHON, *arguments]))
    # the title's first letters are the name otherwise, by which `top` and the kernel call a process
    setthreadtitle(Path(sys.executable).name)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give inherited descriptors the numbers that they have in `actors up`."""
    # above all numbers first, so that none is overwritten before it is moved
    above = max([*descriptors, *numbers, 2]) + 1
    moved = [os.dup2(descriptor, above + index) for index, descriptor in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _apply(variables: Mapping[str, str], removed: Sequence[str]) -> None:
    """Set environment variables, also for libraries that are loaded already."""
    for name in removed:
        os.environ.pop(name, None)
    os.environ.update(variables)
    library = ctypes.CDLL(None)
    for name, parameter in MALLOPT.items():
        if name in variables and hasattr(library, "mallopt"):
            library.mallopt(parameter, int(variables[name]))
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        # a program of its own is bounded so by torch's library
        sys.modules["torch"].set_num_threads(min(int(threads), _num_cores()))
    # each process draws its own numbers; Python sees to `random` at every fork
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _num_cores() -> int:
    """Return the number of cores that this process may use; threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return len(cores)


def main() -> int:
    """Run the program: `fork_server DESCRIPTOR PARENT MODULES…`."""
    descriptor, parent, *modules = sys.argv[1:]
    die_with(int(parent))
    getproctitle()  # looks for the room of a title, before any variable changes
    return serve(socket.socket(fileno=int(descriptor)), modules, int(parent))


if __name__ == "__main__":
    sys.exit(main())
