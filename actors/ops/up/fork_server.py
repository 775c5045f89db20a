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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from actors.process.exits import die_with

READY, GO = b"ready", b"go"
"""Messages: the modules are imported; the actor may start."""
MAX_BYTES = 1 << 16
"""Largest message."""
ENDED = 1
"""Exit code of a process whose start was given up, or that raised."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the server ignores, since it ends with `actors up`. Actors get the handlers back that it had before."""
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
    """Return the number of threads of this process, those of C libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def fork_here(channel: socket.socket, modules: Sequence[str], output: int) -> int:
    """Fork a fork server from this process, which must have a single thread. Return its pid.

    Args:
        channel: as for `serve`.
        modules: as for `serve`.
        output: descriptor of its stdout and stderr.
    """
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return pid
    try:
        die_with(parent)
        os.setsid()
        for standard in (1, 2):
            os.dup2(output, standard)
        for entry in list(Path("/proc/self/fd").iterdir()):
            if int(entry.name) not in (0, 1, 2, channel.fileno()):
                with contextlib.suppress(OSError):  # that of this very list
                    os.close(int(entry.name))
        setproctitle(" ".join([sys.executable, *PYTHON, SERVER]))
        os._exit(serve(channel, modules, parent))
    except BaseException:  # noqa: BLE001 - nothing may go back into the code of `actors up`
        traceback.print_exc()
    os._exit(ENDED)


def serve(channel: socket.socket, modules: Sequence[str], parent: int) -> int:
    """Import modules, then fork a process for each request, until the channel is closed. Return the exit code.

    Args:
        channel: socket of packets to `actors up`.
        modules: names of the modules that actors need.
        parent: pid of `actors up`.
    """
    channel.set_inheritable(False)
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in HANDLED}
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    if num_threads() > 1:
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
        request = json.loads(message)
        try:
            pid = _fork_twice(request, descriptors, handlers, parent, channel)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(str(pid).encode())


def _fork_twice(
    request: Mapping[str, Any], descriptors: Sequence[int], handlers: Mapping[int, Any], parent: int, channel: Any
) -> int:
    """Fork an actor, and return its pid: `actors up` is its parent, as the process in between exits at once."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            pid = int(pipe.read())
        # once it is gone, its child is a child of `actors up`
        os.waitpid(between, 0)
        return pid
    try:
        pid = os.fork()
        if pid:
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        channel.close()
        _become(request, descriptors, handlers, parent)
    except BaseException:  # noqa: BLE001 - nothing may go back into the server's loop
        traceback.print_exc()
    os._exit(ENDED)


def _become(
    request: Mapping[str, Any], descriptors: Sequence[int], handlers: Mapping[int, Any], parent: int
) -> NoReturn:
    """Run a request's command in this process, as a program of its own would."""
    go, log, *inherited = descriptors
    with os.fdopen(go, "rb") as gate:
        # `actors up` closes the gate without a word if it no longer waits for this process
        if gate.read() != GO or os.getppid() != parent:
            os._exit(ENDED)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.setsid()
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    _place(inherited, request["numbers"])
    _apply(request["variables"], request["removed"])
    command = request["command"]
    sys.argv = ["actors", *command]
    program = [SERVER] if request["serves"] else ["actors"]
    setproctitle(" ".join([sys.executable, *PYTHON, *program, *command]))
    if request["serves"]:
        die_with(parent)
        channel = socket.socket(fileno=request["numbers"][0])
        os._exit(serve(channel, command, parent))

    code: object = ENDED
    try:
        code = importlib.import_module(PROGRAM).main(command)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else ENDED if code else 0)


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
    if "torch" in sys.modules and "OMP_NUM_THREADS" in variables:
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
    # each process draws its own numbers; Python sees to `random` at every fork
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main() -> int:
    """Run the program: `fork_server DESCRIPTOR PARENT MODULES…`."""
    descriptor, parent, *modules = sys.argv[1:]
    die_with(int(parent))
    getproctitle()  # looks for the room of a title, before any variable changes
    return serve(socket.socket(fileno=int(descriptor)), modules, int(parent))


if __name__ == "__main__":
    sys.exit(main())
