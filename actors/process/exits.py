"""Ends of an actor's process: exit codes, signals, failed threads, the death of the parent.

Exit codes: 0 done or drained; 2 the configuration is wrong; 3 the run can't go on, a restart would not help; 4 another
process has this process's name; 75 restart me (the gang was told to exit, or the packer serves another run); 1 anything
else. SIGTERM, SIGINT and SIGHUP drain. A second SIGTERM or SIGINT exits at once with 128 + signal.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import structlog

from actors.process.hangup import let_go_of_terminal, stop_at_hangup
from actors.process.membership import PackerSilentError, StartOverError
from actors.process.systemd import Systemd
from bus import threads
from schemas.errors import ConfigError, NameTakenError, PeerRefusedError, ProtocolError, RunFailedError

log = structlog.get_logger("runtime")

FLUSH_SECONDS = 5.0
"""Longest wait for stdout, log and stderr at exit; they take that long only where nothing reads them."""
before_leave: Callable[[], None] | None = None
"""Set by the runtime: waits for the lines of the log that are not written yet."""
# 2 is argparse's code for a wrong command line, 75 is EX_TEMPFAIL of BSD's sysexits.h: try again
NODE_DRAIN = signal.SIGUSR2
"""Signal with which the supervisor of a node drains its actors."""
EXIT_DONE, EXIT_ERROR, EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_NAME_TAKEN, EXIT_START_OVER = 0, 1, 2, 3, 4, 75


def exit_code(run: Callable[[], None]) -> int:
    """Run a process's work; return the exit code for its outcome, and log the reason."""
    try:
        run()
        return EXIT_DONE
    except ConfigError as error:
        _tell("configuration can't be used", error.problems, problems=error.problems)
        return EXIT_CONFIG
    except NameTakenError as error:
        log.error("name is taken", reason=str(error))
        return EXIT_NAME_TAKEN
    except (RunFailedError, PeerRefusedError, ProtocolError) as error:
        _tell("run can't go on", str(error).splitlines(), reason=str(error))
        return EXIT_RUN_FAILED
    except StartOverError as error:
        log.warning("starting over", reason=str(error))
        return EXIT_START_OVER
    except PackerSilentError as error:
        log.error("gave up", reason=str(error))
        return EXIT_ERROR
    except Exception:
        log.exception("actor failed")
        return EXIT_ERROR


def _tell(event: str, lines: Sequence[str], **fields: Any) -> None:
    """Report why this process exits: as plain lines on a terminal, else as a line of the log."""
    if sys.stderr.isatty():
        print("\n".join([f"{event}:", *lines]), file=sys.stderr)
    else:
        log.error(event, **fields)


def leave(code: int) -> None:
    """Exit now, without waiting for threads: those of user code or of an engine may never return."""

    def flush() -> None:
        sys.stdout.flush()
        if before_leave is not None:  # the log's thread may not have come to the last line, which says why we end
            before_leave()
        sys.stderr.flush()

    # in a thread with a limit, since flushing a pipe that is not read never returns
    threads.start_helper("flush", flush).join(FLUSH_SECONDS)
    os._exit(code)


def end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """Exit when a thread of ours fails, since the process would wait for the thread forever. A supervisor restarts it.

    Threads of user code may fail. The event loop of async reward functions is a thread of ours.
    """
    name = failure.thread.name if failure.thread else ""
    error = failure.exc_value or failure.exc_type()
    if isinstance(error, StartOverError):  # raised in a thread, which the main loop would not notice
        log.warning("starting over", reason=str(error))
        leave(EXIT_START_OVER)
    # logged for any thread, since user code that lost a thread may behave oddly later
    log.error("thread failed", thread=name, exc_info=(failure.exc_type, error, failure.exc_traceback))
    if threads.is_ours(failure.thread):
        leave(EXIT_ERROR)


def drain_on_signals(
    drain: Callable[[], None], systemd: Systemd | None = None, alone: signal.Signals | None = None
) -> None:
    """Drain at the first SIGTERM, SIGINT or SIGHUP. At a second SIGTERM or SIGINT exit at once.

    Args:
        drain: starts to drain.
        systemd: the service manager, which is told.
        alone: signal that drains in place of all these, from the supervisor of a node. A batch system signals every
            process of a job at once, and the packer would leave before the actors that need it.
    """
    seen = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
            if seen.is_set():
                return  # kernel and shell may each send a SIGHUP
        if seen.is_set():
            leave(128 + number)  # as a shell reports a process killed by the signal
        seen.set()
        if systemd is not None:
            systemd.leave()
        drain()

    if alone is not None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            # no SIG_IGN, which the processes of user code would inherit
            signal.signal(number, lambda number, frame: None)
        signal.signal(alone, on_signal)
        return
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    stop_at_hangup(on_signal)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies. Other systems than Linux: a thread looks every second."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            # the parent died before prctl was called, and the kernel sends the signal only for a later death
            leave(EXIT_ERROR)
        return

    def watch() -> None:
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        leave(EXIT_ERROR)

    threads.start("parent", watch)
