"""One process, one actor: signals, logging, the metrics server, exit codes. Nothing else in the code touches these.

Exit codes: 0 done or drained; 2 the configuration is wrong; 3 the run can't go on, starting again would not help;
75 start me again (the gang was told to, or the packer serves another run); 1 anything else. SIGTERM and SIGINT drain;
the second one ends the process at once with 128 + its number.
"""

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
from prometheus_client import start_http_server

from actors import faults
from actors.assembly import MAKERS, Actor
from actors.liveness import Liveness
from actors.membership import PackerSilentError, StartOverError
from actors.pool import Directory, Pool
from actors.telemetry.logs import bind_everywhere, configure_logs
from actors.telemetry.metrics import ACTORS, Metrics
from schemas.config import RunConfig
from schemas.errors import ConfigError, PeerRefusedError, ProtocolError, RunFailedError

log = structlog.get_logger("runtime")

OWN_THREADS = ("control", "scored", "batches", "http", "ranks", "reward-async")
"""Names of threads without which an actor can't work begin so. Threads of user code may die as they please, but the
event loop of async reward functions is one of ours, whatever they do to it."""
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
EXIT_DONE, EXIT_ERROR, EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_START_OVER = 0, 1, 2, 3, 75


def run_actor(
    kind: str,
    name: str,
    config: RunConfig,
    parent: int | None = None,
    started_at: float | None = None,
    fork: bool = False,
) -> int:
    """Run one actor to its end; returns the exit code.

    Args:
        kind: rollout, reward, packer, trainer or inference.
        name: unique in the run; the number at its end is the actor's ordinal (rollout-3).
        config: of the run.
        parent: pid of the supervisor; this process dies when that one does.
        started_at: wall-clock time of the command, for the summary.
        fork: whether the packer may go on with a configuration of another identity.
    """
    _begin(config, kind, name, parent)
    faults.name_process(name)
    threading.excepthook = _end_with_thread

    def run() -> None:
        metrics, liveness = Metrics(next(actor for actor in ACTORS if actor == kind)), Liveness()
        actor = MAKERS[kind](config, name, metrics, started_at=started_at, fork=fork)
        going_round: Any = getattr(actor, "membership", actor)  # the packer has none, and says it itself
        going_round.on_turn = liveness.turn
        _drain_on_signals(actor.drain, liveness)
        server, url = _serve_metrics(config, metrics, actor, liveness)
        try:
            actor.run(url)
        finally:
            liveness.leave()
            server.shutdown()

    return _exit_code(run)


def run_pool(config: RunConfig, config_path: Path, name: str, overrides: Sequence[str], parent: int | None) -> int:
    """Run the pool of `inference.pool` to its end; returns the exit code. Its actors die with this process.

    Raises:
        ConfigError: there is none in the configuration.
    """
    servers = config.inference.pool
    if servers is None:
        raise ConfigError("inference.pool: is not set; `actors run inference` runs one actor")
    _begin(config, "inference-pool", name, parent)
    command = [sys.executable, "-m", "actors", "run", "inference", "--config", str(config_path), *overrides]

    def run() -> None:
        pool = Pool(config, name, command, Directory(servers.urls))
        _drain_on_signals(pool.drain)
        pool.run()

    return _exit_code(run)


def _begin(config: RunConfig, kind: str, name: str, parent: int | None) -> None:
    configure_logs(config.telemetry)
    bind_everywhere(actor=kind, name=name)
    if parent is not None:
        die_with(parent)


def _exit_code(run: Callable[[], None]) -> int:
    """What a process ends with that does this."""
    try:
        run()
        return EXIT_DONE
    except ConfigError as error:
        log.error("configuration can't be used", problems=error.problems)
        return EXIT_CONFIG
    except (RunFailedError, PeerRefusedError, ProtocolError) as error:
        log.error("run can't go on", reason=str(error))
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


def leave(code: int) -> None:
    """End the process now: threads of user code or of an engine may never return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """An actor whose bus thread has died would wait for ever: it ends, and is started again."""
    name = failure.thread.name if failure.thread else ""
    error = failure.exc_value or failure.exc_type()
    if isinstance(error, StartOverError):  # of a thread beside a main loop that can't hear it
        log.warning("starting over", reason=str(error))
        leave(EXIT_START_OVER)
    log.error("thread failed", thread=name, exc_info=(failure.exc_type, error, failure.exc_traceback))
    if name.startswith(OWN_THREADS):
        leave(EXIT_ERROR)


def _drain_on_signals(drain: Callable[[], None], liveness: Liveness | None = None) -> None:
    """The first SIGTERM or SIGINT drains, the second one ends at once."""
    seen = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if seen.is_set():
            leave(128 + number)
        seen.set()
        if liveness is not None:
            liveness.leave()
        drain()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def _serve_metrics(config: RunConfig, metrics: Metrics, actor: Actor, liveness: Liveness) -> tuple[WSGIServer, str]:
    membership = getattr(actor, "membership", None)
    metrics.watch_bus(lambda: actor.edges, (lambda: float(membership.silent_seconds)) if membership else None)
    host = config.telemetry.metrics_host
    try:
        server, _ = start_http_server(config.telemetry.metrics_port, host, metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port: {host}:{config.telemetry.metrics_port} can't be bound: {error.strerror}; "
            "0 takes any free port"
        ) from error
    app = server.get_app()
    assert app is not None
    server.set_app(liveness.beside(app))
    reached_at = (config.bus.advertise_host or socket.gethostname()) if host in WILDCARDS else host
    return server, f"http://{reached_at}:{server.server_port}/metrics"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; on systems without that, a thread looks every second."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            leave(EXIT_ERROR)  # it died before the line above
        return

    def watch() -> None:
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        leave(EXIT_ERROR)

    threading.Thread(target=watch, daemon=True).start()
