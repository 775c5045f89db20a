"""The process of an actor: signals, logging, the metrics server, exit codes. No other module touches these.

Exit codes: 0 done or drained; 2 the configuration is wrong; 3 the run can't go on, a restart would not help; 4 another
process has this process's name; 75 restart me (the gang was told to exit, or the packer serves another run); 1 anything
else. SIGTERM, SIGINT and SIGHUP drain. A second SIGTERM or SIGINT exits at once with 128 + signal.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog

from actors.assembly import MAKERS
from actors.ops.up.server_pool import Directory, ServerPool
from actors.process import fault_points
from actors.process.actor import Actor
from actors.process.descriptors import raise_limits
from actors.process.hangup import let_go_of_terminal, stop_at_hangup
from actors.process.membership import PackerSilentError, StartOverError
from actors.process.systemd import Systemd
from actors.telemetry.http import serve_metrics
from actors.telemetry.logs import bind_everywhere, configure_logs
from actors.telemetry.metrics import ACTORS, Metrics
from bus.threads import is_ours, start_helper
from bus.threads import start as start_thread
from schemas.config import RunConfig
from schemas.config.services import bracketed, is_wildcard, without_brackets
from schemas.errors import ConfigError, NameTakenError, PeerRefusedError, ProtocolError, RunFailedError

log = structlog.get_logger("runtime")

FLUSH_SECONDS = 1.0
"""Longest wait for stdout and stderr at exit."""
REWARD_OOM_SCORE = 500
"""The kernel's oom_score_adj for reward actors, of 1000: ranks each as if it used half of the memory in addition."""
EXIT_DONE, EXIT_ERROR, EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_NAME_TAKEN, EXIT_START_OVER = 0, 1, 2, 3, 4, 75


def run_actor(
    kind: str,
    name: str,
    config: RunConfig,
    parent: int | None = None,
    started_at: float | None = None,
    fork: bool = False,
) -> int:
    """Run an actor to its end; return the exit code.

    Args:
        kind: rollout, reward, packer, trainer or inference.
        name: unique in the run; a number at the end is the actor's ordinal (rollout-3).
        config: configuration of the run.
        parent: pid of the supervisor; this process is killed when the supervisor dies. None: no supervisor.
        started_at: wall-clock time of the `actors up` command, for the summary; None without `actors up`.
        fork: True if the packer may continue with a configuration of another identity.
    """
    _begin(config, kind, name, parent)

    def run() -> None:
        # systemd's variables are taken before the actor is made: user code may start children, which inherit the rest
        metrics, systemd = Metrics(next(actor for actor in ACTORS if actor == kind)), Systemd()
        actor = MAKERS[kind](config, name, metrics, started_at=started_at, fork=fork)
        actor.liveness.on_turn = systemd.turn
        _drain_on_signals(actor.drain, systemd)
        server, url = _serve_metrics(config, metrics, actor)
        try:
            actor.run(url)
        finally:
            systemd.leave()
            server.shutdown()

    return _exit_code(run)


def run_server_pool(
    config: RunConfig, config_path: Path, name: str, overrides: Sequence[str], parent: int | None
) -> int:
    """Run the pool of `inference.pool` until the run ends; return the exit code. Its actors die with this process.

    Raises:
        ConfigError: `inference.pool` is not set.
    """
    servers = config.inference.pool
    if servers is None:
        raise ConfigError("inference.pool: is not set; `actors run inference` runs one actor")
    _begin(config, "inference-pool", name, parent)
    command = [sys.executable, "-P", "-m", "actors", "run", "inference", "--config", str(config_path), *overrides]

    def run() -> None:
        pool = ServerPool(config, name, command, Directory(servers.urls))
        _drain_on_signals(pool.drain)
        pool.run()

    return _exit_code(run)


def _begin(config: RunConfig, kind: str, name: str, parent: int | None) -> None:
    configure_logs(config.telemetry)
    bind_everywhere(actor=kind, name=name)
    raise_limits(config)
    fault_points.name_process(name)  # for tests alone
    threading.excepthook = _end_with_thread
    log.info("actor started", pid=os.getpid())
    if kind == "reward":
        prefer_oom_kill()
    if parent is not None:
        die_with(parent)


def prefer_oom_kill() -> None:
    """Make the kernel kill this process and its children before other processes of the run when memory runs out.

    Reward functions are the most likely to leak, and a reward actor can be replaced at no cost. A trainer can't, and a
    packer even less.
    """
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        if int(score.read_text()) < REWARD_OOM_SCORE:
            score.write_text(str(REWARD_OOM_SCORE))


def _exit_code(run: Callable[[], None]) -> int:
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
    start_helper("flush", _flush).join(
        FLUSH_SECONDS
    )  # with a limit, since flushing a pipe that is not read never returns
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """Exit when a thread of ours fails, since the process would wait for the thread forever. A supervisor restarts it.

    Threads of user code may fail. The event loop of async reward functions is a thread of ours.
    """
    name = failure.thread.name if failure.thread else ""
    error = failure.exc_value or failure.exc_type()
    if isinstance(error, StartOverError):  # raised in a thread, which the main loop would not notice
        log.warning("starting over", reason=str(error))
        leave(EXIT_START_OVER)
    log.error("thread failed", thread=name, exc_info=(failure.exc_type, error, failure.exc_traceback))
    if is_ours(failure.thread):
        leave(EXIT_ERROR)


def _drain_on_signals(drain: Callable[[], None], systemd: Systemd | None = None) -> None:
    """Drain at the first SIGTERM, SIGINT or SIGHUP. At a second SIGTERM or SIGINT exit at once."""
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

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    stop_at_hangup(on_signal)


def _serve_metrics(config: RunConfig, metrics: Metrics, actor: Actor) -> tuple[WSGIServer, str]:
    membership = actor.membership
    metrics.watch_bus(lambda: actor.edges, (lambda: membership.silent_seconds) if membership else None)
    host = without_brackets(config.telemetry.metrics_host)
    try:
        server = serve_metrics(config.telemetry.metrics_port, host, metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port: {host}:{config.telemetry.metrics_port} can't be bound: {error.strerror}; "
            "0 takes any free port (`actors up` gives its actors one port after the other, from the configured one on)"
        ) from error
    app = server.get_app()
    assert app is not None
    server.set_app(actor.liveness.wrap(app))
    reached_at = (config.bus.advertise_host or socket.gethostname()) if is_wildcard(host) else host
    return server, f"http://{bracketed(reached_at)}:{server.server_port}/metrics"


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies. Other systems than Linux: a thread looks every second."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            leave(EXIT_ERROR)  # the parent died before the call above
        return

    def watch() -> None:
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        leave(EXIT_ERROR)

    start_thread("parent", watch)
