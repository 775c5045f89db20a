"""The process of an actor or of a pool of inference actors: logging, limits, metrics server, then the actor's work.

`actors.process.exits` has the signals and the exit codes.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from actors.assembly import MAKERS
from actors.environments.host import EnvironmentHost
from actors.environments.specs import specs_of_host
from actors.ops.up.server_pool import Directory, ServerPool
from actors.packer.start_file import StartFile
from actors.process import exits, fault_points, tasks
from actors.process.descriptors import raise_limits
from actors.process.exits import die_with, drain_on_signals, end_with_thread, exit_code
from actors.process.output_dir import MARKER
from actors.process.systemd import Systemd
from actors.process.tasks import LogTeller
from actors.telemetry import logs, spans
from actors.telemetry.http import serve_as_configured
from actors.telemetry.logs import bind_everywhere, configure_logs
from actors.telemetry.metrics import ACTORS, Metrics
from schemas.config import RunConfig

log = structlog.get_logger("runtime")

REWARD_OOM_SCORE = 500
"""The kernel's oom_score_adj for code of the user, of 1000: ranks each such process as if it used half of the memory in
addition."""


def run_actor(
    kind: str,
    name: str,
    config: RunConfig,
    parent: int | None = None,
    started_at: float | None = None,
    fork: bool = False,
    alone: signal.Signals | None = None,
) -> int:
    """Run an actor to its end; return the exit code.

    Args:
        kind: rollout, reward, packer, trainer or inference.
        name: unique in the run; a number at the end is the actor's ordinal (rollout-3).
        config: configuration of the run.
        parent: pid of the supervisor; this process is killed when the supervisor dies. None: no supervisor.
        started_at: wall-clock time of the `actors up` command, for the summary; None without `actors up`.
        fork: True if the packer may continue with a configuration of another identity.
        alone: signal that drains in place of SIGTERM, SIGINT and SIGHUP, as `drain_on_signals`.
    """
    _begin(config, kind, name, parent)
    _record_spans(config, name)

    def run() -> None:
        # systemd's variables are taken before the actor is made: user code may start children, which inherit the rest
        metrics, systemd = Metrics(next(actor for actor in ACTORS if actor == kind)), Systemd()
        with _told_while_made(kind, config):
            actor = MAKERS[kind](config, name, metrics, started_at=started_at, fork=fork)
        actor.liveness.on_turn = systemd.turn
        # until here a signal just ends the process, which holds no work yet
        drain_on_signals(actor.drain, systemd, alone)
        membership = actor.membership
        metrics.watch_bus(lambda: actor.edges, (lambda: membership.silent_seconds) if membership else None)
        server, url = serve_as_configured(config, metrics.registry, actor.liveness.wrap)
        try:
            actor.run(url)
        finally:
            systemd.leave()
            server.shutdown()

    return exit_code(run)


@contextlib.contextmanager
def _told_while_made(kind: str, config: RunConfig) -> Iterator[None]:
    """Tell of a packer's work in a file while the block makes the packer, which no screen can ask meanwhile."""
    if kind != "packer":
        yield
        return
    file = StartFile(config.output)
    tasks.tell_by(file)
    try:
        yield
    finally:
        file.remove()
        tasks.tell_by(LogTeller())


def run_server_pool(
    config: RunConfig,
    config_path: Path,
    name: str,
    overrides: Sequence[str],
    parent: int | None,
    alone: signal.Signals | None = None,
) -> int:
    """Run the pool of `inference.pool` until the run ends; return the exit code. Its actors die with this process.

    Args:
        config: configuration of the run.
        config_path: file of the configuration, for the pool's actors.
        name: name in the run.
        overrides: overrides of the configuration, for the pool's actors.
        parent: as `run_actor`.
        alone: as `run_actor`.

    Raises:
        ConfigError: `inference.pool` is not set.
    """
    servers = Directory.of(config)
    _begin(config, "inference-pool", name, parent)
    command = ["run", "inference", "--config", str(config_path), *overrides]

    def run() -> None:
        pool = ServerPool(config, name, command, servers)
        drain_on_signals(pool.drain, alone=alone)
        pool.run()

    return exit_code(run)


def run_environment_host(config: RunConfig, name: str, address: str) -> int:
    """Run a host of environment workers until a signal; return the exit code.

    Raises:
        ConfigError: no environment of the configuration has workers.
    """
    specs = specs_of_host(config)
    _begin(config, "environment", name, None)

    def run() -> None:
        host = EnvironmentHost(specs, address, config.bus)
        drain_on_signals(host.stop)
        asyncio.run(host.run())

    return exit_code(run)


def _begin(config: RunConfig, kind: str, name: str, parent: int | None) -> None:
    configure_logs(config.telemetry)
    tasks.tell_by(LogTeller())
    exits.before_leave = _write_the_last
    bind_everywhere(actor=kind, name=name)
    # before the first socket: ZeroMQ ignores a later change of its limit
    raise_limits(config)
    fault_points.name_process(name)  # for tests alone
    threading.excepthook = end_with_thread
    log.info("actor started", pid=os.getpid())
    if kind in ("reward", "callbacks"):
        prefer_oom_kill()
    if parent is not None:
        die_with(parent)


def _record_spans(config: RunConfig, name: str) -> None:
    """Record what this process does, for `actors trace`."""
    if config.telemetry.events_bytes:
        # only where output_dir is: packer and trainer make it, and other machines may not share it
        is_ready = (config.output / MARKER).exists
        folder = config.output / spans.FOLDER
        spans.start(spans.SpanRecorder(folder, name, config.telemetry.events_bytes, is_ready))


def _write_the_last() -> None:
    """Write log lines and spans that are still in memory, before this process ends."""
    logs.flush()
    spans.stop()


def prefer_oom_kill() -> None:
    """Make the kernel kill this process and its children before other processes of the run when memory runs out.

    Code of the user is the most likely to leak, and a reward actor or the process of callbacks can be replaced at no
    cost. A trainer can't, and a packer even less.
    """
    # other systems than Linux have no /proc, and a sandbox may forbid the write
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        # a higher score, set from outside, stays
        if int(score.read_text()) < REWARD_OOM_SCORE:
            score.write_text(str(REWARD_OOM_SCORE))
