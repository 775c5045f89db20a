"""`actors top` and `actors status`: a run seen from another terminal.

An observer beats on the control plane and is sent the packer's progress; the run neither counts it nor waits for it.
Where nobody answers, what lies on disk is shown.
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

from actors.membership import Membership
from actors.telemetry.logs import configure_logs
from actors.view.disk import has_ended_on_disk, view_on_disk
from actors.view.render import View, render
from actors.view.screen import Screen
from bus.topology import Addresses
from schemas.config import RunConfig, load_config
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError
from schemas.messages import ObserverBeat, ObserverState, State

EXIT_HEALTHY, EXIT_NOT_HEALTHY = 0, 1
ANSWER_SECONDS = 5.0
"""For the packer to answer a first beat: it does within a round, unless it is starting or has much to commit."""
GONE_SECONDS = 60.0
"""A packer that has not been heard for so long is not being started again."""
POLL_SECONDS = 0.1
PAGE = (100, 40)
"""Columns and rows where there is no terminal."""


def config_of(run: Path, overrides: list[str]) -> RunConfig:
    """The configuration of a run, which is given by its output_dir or by its run.yaml.

    Raises:
        ConfigError: there is no such run.
    """
    if run.is_file():
        return load_config(run, overrides)
    if not (run / RESOLVED).is_file():
        what = f"has no {RESOLVED}" if run.is_dir() else "is not there"
        raise ConfigError(f"{run}: {what}; give a run's output_dir, or the run.yaml that it was started with")
    return load_config(run / RESOLVED, overrides)


def status(config: RunConfig) -> int:
    """Print one screen about a run; returns 0 where it is healthy, 1 where somebody should look at it.

    Raises:
        ConfigError: there is no such run.
    """
    with _observed(config) as observer:
        view = _view(config, observer)
    return _print(view)


def top(config: RunConfig) -> int:
    """Show a run until it ends, or until Ctrl-C; returns 0 unless it has failed or is not there any more.

    Raises:
        ConfigError: there is no such run.
    """
    with _observed(config) as observer:
        view = _view(config, observer)
        if observer is None or view.ended:
            return _print(view)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts with & ignore it
        screen = Screen(sys.stdout, config)
        try:
            while not observer.has_ended:
                screen.show(*observer.newest())
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            screen.close(observer.newest()[0])
            return EXIT_HEALTHY
        screen.close(observer.newest()[0])
        return _print_end(config, observer)


def _view(config: RunConfig, observer: "_Observer | None") -> View:
    if observer is None or not observer.is_answered(ANSWER_SECONDS):
        return view_on_disk(config)
    return View(config.name, str(config.output), *observer.newest())


def _print(view: View) -> int:
    print("healthy" if view.is_healthy else "not healthy")
    print("\n".join(render(view, shutil.get_terminal_size(PAGE).columns)))
    return EXIT_HEALTHY if view.is_healthy else EXIT_NOT_HEALTHY


def _print_end(config: RunConfig, observer: "_Observer") -> int:
    """How a run that was watched has ended."""
    view = View(config.name, str(config.output), *observer.newest())
    if not view.is_over and has_ended_on_disk(config):
        view = view_on_disk(config)
    if view.is_healthy:
        print("the run is done")
        return EXIT_HEALTHY
    print("\n".join([*view.troubles, *([view.ended] if view.ended else [])]), file=sys.stderr)
    return EXIT_NOT_HEALTHY


class _Observer:
    """What the packer tells an observer."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._state: ObserverState | None = None
        self._membership = Membership(config, ObserverBeat, f"watcher-{uuid.uuid4().hex[:8]}", self._take)
        self._membership.start(phase="running")

    def _take(self, state: State) -> None:
        if isinstance(state, ObserverState):
            self._state = state

    def is_answered(self, seconds: float) -> bool:
        """Whether the packer answers within a time."""
        deadline = time.monotonic() + seconds
        while self._state is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
        return self._state is not None

    def newest(self) -> tuple[dict[str, Any], float]:
        """(progress, seconds since the packer was heard). A packer that refuses this process says why in it."""
        state, silent = self._state, self._membership.silent_seconds
        assert state is not None
        failed = {"phase": "failed", "step": state.step, "max_steps": state.max_steps, "failure": state.refusal}
        return state.progress | (failed if state.refusal else {}), silent

    @property
    def has_ended(self) -> bool:
        """Whether the run has, or can't be reached any more. Its packer does not wait for who only watches."""
        progress, silent = self.newest()
        if progress["phase"] in ("done", "failed") or silent > GONE_SECONDS:
            return True
        return silent > self._config.bus.lease and has_ended_on_disk(self._config)

    def close(self) -> None:
        """Leave."""
        self._membership.close()


@contextmanager
def _observed(config: RunConfig) -> Iterator[_Observer | None]:
    """An observer for a block; None where there is no socket to connect to, as after the end on one machine."""
    configure_logs(config.telemetry)
    addresses = Addresses(config)
    if addresses.transport != "tcp" and not (addresses.folder / "control").exists():
        yield None
        return
    observer = _Observer(config)
    try:
        yield observer
    finally:
        observer.close()
