"""The callbacks actor: tells the events of a run to objects of the user.

Consumes the run's files (metrics.jsonl, evals.jsonl, the witnesses of checkpoints) and the phase of the run from its
directive. Emits calls, the file callbacks.json with what has been told, and stop.json if a callback wishes to stop.
Nothing waits for this process: a callback that is slow, hangs or kills the process delays other callbacks only, and
what it has missed is in the files. An event is told at least once: again if the process died between call and note.

    first directive ──▶ on_train_begin ──▶ follow the files ──▶ done, or drained after a wish: on_train_end
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from actors.callbacks.arguments import CallbackArguments, epochs_per_step, evaluated, updates_of
from actors.callbacks.events import Events, Told
from actors.callbacks.handler import Callbacks
from actors.callbacks.memory import Memory, keyed, restore_states, states_of
from actors.process.membership import Drain, Membership
from actors.process.stop_wish import StopWish, ask_to_stop, wish_to_stop
from actors.process.user_code import load_function
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from schemas.config import RunConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import ObserverHeartbeat

log = structlog.get_logger("callbacks")

POLL_SECONDS = 0.2
"""Pause between two looks at the run's files."""
SAVE_RETRY_SECONDS = 10.0
"""Pause before a failed write of callbacks.json is tried again."""


class CallbacksActor:
    """Actor that tells a run's events to the objects of `callbacks`.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_callbacks_*` metrics.
        num_rows: examples of the training data, for epochs; None: not known.
    """

    def __init__(self, config: RunConfig, name: str, metrics: Metrics, num_rows: int | None = None) -> None:
        self._config, self._metrics, self._num_rows = config, metrics, num_rows
        self.membership = Membership(config, ObserverHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._drain = Drain()
        self._callbacks: dict[str, Any] = {}
        """Callbacks by place and path."""
        self._failed: RunFailedError | None = None
        """Exception of a required callback; raised by the main loop."""
        self._lost: set[str] = set()
        self._shown: set[tuple[str, str]] = set()
        """Callbacks and events whose traceback has been logged; each is logged once."""
        self._save_at = 0.0
        self._dirty = False

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts]

    def run(self, metrics_url: str = "") -> None:
        """Tell events until the run is done, or this actor has drained.

        Raises:
            ConfigError: a callback can't be made.
            RunFailedError: a required callback has failed.
            StartOverError, PeerRefusedError, PackerSilentError: as `Membership.latest`.
        """
        self._callbacks = make_callbacks(self._config)
        self.membership.start(metrics_url=metrics_url, phase="running")
        try:
            first = self._first_run()
            if first is not None:
                self._tell_run(*first)
        finally:
            self.membership.close()

    def drain(self) -> None:
        """Tell what the files have, and exit. Thread-safe."""
        self._drain.begin()

    def _first_run(self) -> tuple[str, int] | None:
        """Wait for the id of the run and its number of steps. None: drained while waiting.

        A run that is done may have no packer any more: then callbacks.json has the id.
        """
        deadline, steps = time.monotonic() + self._config.bus.lease, self._config.trainer.max_steps
        while not self._drain:
            directive = self.membership.wait(POLL_SECONDS)
            if directive is not None and directive.max_steps:
                return directive.run, directive.max_steps
            is_late = time.monotonic() > deadline and is_done(self._config.output)
            if is_late and steps and (run := Memory.run_of(self._config.output)):
                return run, steps
        return None

    def _tell_run(self, run: str, max_steps: int) -> None:
        config = self._config if self._config.trainer.max_steps else self._config.with_steps(max_steps)
        arguments = CallbackArguments.of(config, self._num_rows)
        memory = Memory.load(config.output, run)
        restore_states(self._callbacks, memory.states)
        state = arguments.state()
        handler = Callbacks(list(self._callbacks.values()), arguments, state, self._note_failure)
        events = Events(
            config.output,
            state,
            handler.call,
            updates=updates_of(config),
            epochs_per_step=epochs_per_step(config, self._num_rows),
            evaluated=evaluated(config),
            told=memory.told,
            best=arguments.best,
            note=lambda told: self._note(memory, handler, told),
        )
        state.global_step = memory.told.step * updates_of(config)
        handler.call("on_train_begin")
        while not self._follow(events, memory):
            pass
        # not after an interruption: the run goes on later, and then has its end
        if is_done(config.output) or wish_to_stop(config.output):
            handler.call("on_train_end")
        self._raise_failure()
        self._save(memory)
        if handler.ignored:
            log.warning("only should_training_stop is followed", ignored=sorted(handler.ignored))

    def _follow(self, events: Events, memory: Memory) -> bool:
        """Tell what is new; return True at the end of the run, or of this process."""
        # the packer may have left before this process has heard of the end: its summary is there then
        over = bool(self._drain) or is_done(self._config.output)
        if not over:
            directive = self.membership.wait(POLL_SECONDS)
            over = directive is not None and directive.phase == "done"
            self._metrics.set("grpo_callbacks_behind_steps", max(0, (directive.step if directive else 0) - events.read))
        events.follow(is_over=over and is_done(self._config.output))
        self._raise_failure()
        if self._dirty and time.monotonic() >= self._save_at:
            self._save(memory)
        return over

    def _note(self, memory: Memory, handler: Callbacks, told: Told) -> None:
        """Remember what has been told, and pass on the wish to stop."""
        # before anything is noted: once the callback is repaired, the event is told again
        self._raise_failure()
        if handler.control.should_training_stop and wish_to_stop(self._config.output) is None:
            log.warning("training stops by the wish of a callback", callback=handler.stopped_by, step=told.step)
            ask_to_stop(self._config.output, StopWish(memory.run, handler.stopped_by, told.step))
        # asked once: the run may be continued, and the callback is asked again then
        handler.control.should_training_stop, handler.stopped_by = False, ""
        memory.told, memory.states = told, states_of(self._callbacks, self._lost)
        self._metrics.set("grpo_callbacks_told_step", told.step)
        self.liveness.turn()
        self._save(memory)

    def _save(self, memory: Memory) -> None:
        try:
            memory.save(self._config.output)
            self._dirty = False
        except OSError as error:
            # events stay told in memory; a restart would tell them again
            self._dirty, self._save_at = True, time.monotonic() + SAVE_RETRY_SECONDS
            log.error("callbacks.json not written; trying again", detail=str(error))

    def _note_failure(self, callback: Any, event: str, error: Exception) -> None:
        """Count and log an exception of a callback; a required one ends the run."""
        index = next(i for i, one in enumerate(self._callbacks.values()) if one is callback)
        one = self._config.callbacks[index]
        where = f"callbacks.{index}: {event} of {one.path} failed"
        self._metrics.count("grpo_callbacks_failures_total", event=event)
        first = (one.path, event) not in self._shown
        self._shown.add((one.path, event))
        log.error("callback failed", callback=one.path, event_name=event, detail=repr(error), exc_info=first and error)
        if one.required and self._failed is None:
            self._failed = RunFailedError(
                f"{where}: {type(error).__name__}: {error} (callbacks.{index}.required; the traceback is in the log)"
            )

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed


def is_done(output: Path) -> bool:
    """Return whether the run is done: the packer has written the summary."""
    return (output / "summary.json").exists()


def make_callbacks(config: RunConfig) -> dict[str, Any]:
    """Make the configured callbacks, by place and path.

    Raises:
        ConfigError: a class can't be loaded, or not be made with its arguments.
    """
    made = []
    for index, one in enumerate(config.callbacks):
        make: Callable[..., Any] = load_function(one.path, f"callbacks.{index}.path")
        try:
            made.append(make(**one.kwargs))
        except Exception as error:
            raise ConfigError(
                f"callbacks.{index}: {one.path} can't be made with kwargs {sorted(one.kwargs)}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return keyed([one.path for one in config.callbacks], made)
