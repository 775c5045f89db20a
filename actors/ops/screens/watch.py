"""`actors top` and `actors status`: watch a run from another terminal.

An observer sends heartbeats on the control plane and gets the packer's progress. The run neither counts nor awaits
observers. If no packer answers, the run's files are shown.
"""

import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.ops.screens.disk import has_ended_on_disk, view_on_disk
from actors.ops.screens.render import View, render
from actors.ops.screens.screen import Screen
from actors.packer.start_file import starting_words
from actors.process.membership import Membership
from actors.telemetry.logs import configure_logs
from bus.topology import Addresses
from schemas.config import RunConfig, load_config
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError
from schemas.messages import Directive, ObserverDirective, ObserverHeartbeat

EXIT_HEALTHY, EXIT_NOT_HEALTHY = 0, 1
ANSWER_SECONDS = 5.0
"""Time for the packer to answer a first heartbeat; usually a round, more during a start or a large commit."""
GONE_SECONDS = 60.0
"""Silence of a packer after which no restart is expected any more."""
POLL_SECONDS = 0.1
"""Seconds between two looks at the progress."""
PAGE = (100, 40)
"""Columns and rows without a terminal."""


def config_of(run: Path, overrides: list[str]) -> RunConfig:
    """Load the configuration of a run, given its output_dir or its run.yaml.

    Raises:
        ConfigError: there is no such run, or its configuration is invalid.
    """
    if run.is_file():
        return load_config(run, overrides)
    if not (run / RESOLVED).is_file():
        what = f"has no {RESOLVED}" if run.is_dir() else "is not there"
        raise ConfigError(f"{run}: {what}; give a run's output_dir, or the run.yaml that it was started with")
    return load_config(run / RESOLVED, overrides)


def status(config: RunConfig) -> int:
    """Print a screen about a run. Return 0 for a healthy run, 1 for a run in need of attention.

    Raises:
        ConfigError: there is no such run.
    """
    with _observed(config) as observer:
        view = _view(config, observer)
    return _print(view)


def top(config: RunConfig) -> int:
    """Show a run until it ends or Ctrl-C is pressed. Return 1 if the run has failed or the packer is gone, else 0.

    Raises:
        ConfigError: there is no such run.
    """
    with _observed(config) as observer:
        view = _view(config, observer)
        if observer is None or view.ended:
            return _print(view)
        # a shell starts background jobs with SIGINT ignored; `kill -INT` shall end them all the same
        signal.signal(signal.SIGINT, signal.default_int_handler)
        screen = Screen(sys.stdout, config, own_clock=False)
        try:
            while not observer.has_ended:
                screen.show(*observer.newest())
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            screen.close(observer.newest()[0])
            return EXIT_HEALTHY
        screen.close(observer.newest()[0])
        view = View(config.name, str(config.output), *observer.newest())
        if not view.is_over and has_ended_on_disk(config):
            # the packer may have exited before a directive with the end has come here
            view = view_on_disk(config)
        if view.ended_well and view.progress.get("phase") == "done":
            print("\n".join(["the run is done", *view.diagnostics]))
            return EXIT_HEALTHY
        print("\n".join([*view.diagnostics, *([view.ended] if view.ended else [])]), file=sys.stderr)
        return EXIT_NOT_HEALTHY


def _view(config: RunConfig, observer: "_Observer | None") -> View:
    if observer is None or not observer.is_answered(ANSWER_SECONDS):
        if starting := starting_words(config.output):
            return View(config.name, str(config.output), {}, starting=starting)
        return view_on_disk(config)
    return View(config.name, str(config.output), *observer.newest())


def _print(view: View) -> int:
    print("healthy" if view.is_healthy else "not healthy")
    print("\n".join(render(view, shutil.get_terminal_size(PAGE).columns)))
    return EXIT_HEALTHY if view.is_healthy else EXIT_NOT_HEALTHY


class _Observer:
    """Observer of a run: keeps the newest directive from the packer."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._directive: ObserverDirective | None = None
        self._membership = Membership(config, ObserverHeartbeat, f"watcher-{uuid.uuid4().hex[:8]}", self._take)
        self._membership.start(phase="running")

    def _take(self, directive: Directive) -> None:
        if isinstance(directive, ObserverDirective):
            self._directive = directive

    def is_answered(self, seconds: float) -> bool:
        """Wait up to `seconds` for the packer's first answer; return whether it has come."""
        deadline = time.monotonic() + seconds
        while self._directive is None and time.monotonic() < deadline:
            # shorter than the pause of the screen, since `actors status` shall answer at once
            time.sleep(POLL_SECONDS / 5)
        return self._directive is not None

    def newest(self) -> tuple[dict[str, Any], float]:
        """Return the newest progress, and the seconds since the packer was heard; no progress before its first answer.

        If the packer refuses this process, the progress has the phase "failed" and the reason.
        """
        directive, silent = self._directive, self._membership.silent_seconds
        if directive is None:  # it starts, and reads its data
            return {}, silent
        failed = {
            "phase": "failed",
            "step": directive.step,
            "max_steps": directive.max_steps,
            "failure": directive.refusal,
        }
        return directive.progress | (failed if directive.refusal else {}), silent

    @property
    def has_ended(self) -> bool:
        """True if the run has ended or can't be reached any more. No packer waits for observers."""
        progress, silent = self.newest()
        if progress.get("phase") in ("done", "failed"):
            return True
        if silent > GONE_SECONDS and not starting_words(self._config.output):
            return True
        return silent > self._config.bus.lease and has_ended_on_disk(self._config)

    def close(self) -> None:
        """Leave the run's control plane."""
        self._membership.close()


@contextmanager
def _observed(config: RunConfig) -> Iterator[_Observer | None]:
    """Provide an observer for a block; None if there is no socket to connect to, as after the end of a local run."""
    configure_logs(config.telemetry)
    addresses = Addresses(config)
    # on one machine the control socket is a file, so its absence is known without waiting for an answer
    if addresses.transport != "tcp" and not (addresses.folder / "control").exists():
        yield None
        return
    observer = _Observer(config)
    try:
        yield observer
    finally:
        observer.close()
