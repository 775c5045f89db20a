"""The tracker actor: sends the steps of a run to one tracker, in a process that nothing waits for.

Consumes the run's files and the phase of the run from its directive. Emits entries to the tracker, and its journal
below output_dir/trackers. The files are the buffer: a tracker that is away, slow or frozen costs the run nothing, and
gets what it has missed when it is back.

    opened ──▶ steps sent, in order ──▶ done: summary sent, finished
      ▲── pause ◀── any failure, counted          steps trained again: taken out, or sent to a new run
"""

import contextlib
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from actors.process.membership import Drain, Membership
from actors.telemetry.metrics import Metrics
from actors.trackers.history import History
from actors.trackers.journal import Journal
from actors.trackers.protocol import TrackedRun, Tracker
from bus.counts import EdgeCounts
from schemas.config import RunConfig
from schemas.config.data import EvalConfig
from schemas.config.trackers import TrackerConfig
from schemas.messages import ObserverHeartbeat

log = structlog.get_logger("tracker")

POLL_SECONDS = 0.25
"""Pause between two looks at the run's files."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Pause after a failure; it doubles with each failure in a row."""
MOST_CPU = 0.02
"""Largest share of a processor that a tracker takes which fails again and again, since a run must not lose more: the
steps of a long run are read again each time."""
BATCH = 100
"""Largest number of entries between two flushes."""
FOLDER = "trackers"
NICENESS = 10
"""Niceness of what sends steps, above that of the run: a tenth of the share of a trainer's thread on a busy machine."""


class TrackerActor:
    """Actor that sends the steps of a run to one tracker.

    Args:
        config: configuration of the run.
        index: number of the tracker in `telemetry.trackers`.
        name: name in the run.
        metrics: destination of the `grpo_tracker_*` metrics.
        make: makes the tracker, again after each failure.
    """

    def __init__(
        self, config: RunConfig, index: int, name: str, metrics: Metrics, make: Callable[[], Tracker] | None = None
    ) -> None:
        self._config, self._keys, self._metrics = config, config.telemetry.trackers[index], metrics
        self.label = labels_of(config)[index]
        self._make = make or (lambda: make_tracker(self._keys))
        self.membership = Membership(config, ObserverHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._drain = Drain()
        self._tracker: Tracker | None = None
        self._max_steps = config.trainer.max_steps
        self._history = History(config.output, self._is_due, config.telemetry.names, turn=self.liveness.turn)
        self._failures, self._retry_at = 0, 0.0

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts]

    def run(self, metrics_url: str = "") -> None:
        """Send steps until the run is done and the tracker has them all, or this actor has drained.

        Raises:
            StartOverError, PeerRefusedError, PackerSilentError: as `Membership.latest`.
        """
        self.membership.start(metrics_url=metrics_url, phase="running")
        # this thread, with all threads and processes that the tracker's package starts; heartbeats keep their priority
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)
        try:
            run = self._first_run()
            if not run:
                return
            journal = Journal(self._journal_path, run)
            while not self._drain:
                is_over = is_done(self._config.output)
                if self.turn(journal, is_over=is_over) and is_over:
                    return
                if is_over:
                    self.liveness.turn()  # a packer that has left is no error any more
                    time.sleep(POLL_SECONDS)
                else:
                    self._look_at_run()
            # what the files have by now, unless the tracker is away
            self.turn(journal, is_over=False)
        finally:
            self._let_go()
            self.membership.close()

    def drain(self) -> None:
        """Exit after the entry under way; what is missing is sent after the next start. Thread-safe."""
        self._drain.begin()

    def turn(self, journal: Journal, *, is_over: bool) -> bool:
        """Send what is new; return whether the tracker has everything, and is finished if the run is over.

        Args:
            journal: what the tracker has been sent.
            is_over: True after the end of the run.
        """
        if time.monotonic() < self._retry_at:
            return False
        began = time.process_time()
        try:
            done = self._send(journal, is_over=is_over)
        # of the tracker's package: whatever it is, the run goes on. A SystemExit too: its code would be taken for ours,
        # and 2 (a wrong configuration) would end the run
        except BaseException as error:  # noqa: BLE001
            self._fail(error, time.process_time() - began)
            return False
        self._failures = 0
        return done

    def _send(self, journal: Journal, *, is_over: bool) -> bool:
        tracker = self._tracker or self._open(journal)
        changed = self._history.read(journal.digests)
        if changed is not None:
            self._go_back(tracker, journal, changed)
            return False
        sent = 0
        for entry, digest in self._history.take(is_over=is_over):
            journal.note_sending(entry.step, digest)
            tracker.log(entry)
            sent += 1
            self.liveness.turn()
            if sent >= BATCH:
                break
        newest = self._history.next - 1
        if sent:
            tracker.flush()
            journal.note_held(newest)
        self._metrics.set("grpo_tracker_sent_step", max(0, newest))
        self._metrics.set("grpo_tracker_behind_steps", max(0, self._history.newest - max(0, newest)))
        if sent or not is_over:
            return not sent
        if 0 < self._history.newest < journal.newest:  # the run went back and was ended earlier: no new line tells
            self._go_back(tracker, journal, self._history.newest + 1)
            return False
        if not journal.finished:
            tracker.finish(json.loads((self._config.output / "summary.json").read_text(encoding="utf-8")))
            self._tracker = None
            journal.note_finished()
            log.info("finished", tracker=self.label, step=newest)
        return True

    def _open(self, journal: Journal) -> Tracker:
        tracker = self._tracker = self._make()
        name = self._keys.name or self._config.name
        run = TrackedRun(
            id=journal.id,
            name=name if not journal.generation else f"{name}-{journal.generation + 1}",
            group=getattr(self._keys, "group", "") or name,
            folder=self._config.output / FOLDER / self.label,
            config=self._config.model_dump(mode="json"),
            next_step=journal.held + 1,
        )
        run.folder.mkdir(parents=True, exist_ok=True)
        newest = tracker.open(run)
        # the tracker knows best: a step may have arrived without a note, or be lost in a buffer of its package
        newest = journal.held if newest is None else newest
        for step in range(journal.held + 1, newest + 1):
            if step not in journal.digests:
                journal.note_sending(step, "")
        journal.note_held(newest)
        self._history.restart(newest + 1)
        log.info("opened", tracker=self.label, id=run.id, newest_step=newest)
        return tracker

    def _go_back(self, tracker: Tracker, journal: Journal, step: int) -> None:
        """Take out steps that were trained again, or start a run that has each step once."""
        log.warning("the run went back: steps are sent again", tracker=self.label, from_step=step)
        if tracker.goes_back:
            tracker.go_back(step)
            journal.note_back(step)
            self._history.restart(step)
            return
        tracker.finish({"replaced_from_step": step})
        self._tracker = None
        journal.start_again()

    def _fail(self, error: BaseException, cpu_seconds: float) -> None:
        self._failures += 1
        self._metrics.count("grpo_tracker_failures_total")
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 10))
        pause = max(pause, cpu_seconds / MOST_CPU)
        self._retry_at = time.monotonic() + pause
        log.error(
            "tracker failed; training goes on, and what is missing is sent later",
            tracker=self.label,
            detail=f"{type(error).__name__}: {error}",
            next_seconds=pause,
            exc_info=error if self._failures == 1 else None,
        )
        self._let_go()

    def _let_go(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(BaseException):
                tracker.close()

    def _first_run(self) -> str:
        """Wait for the id of the run; empty: drained while waiting.

        A run that is done may have no packer any more: then the journal has the id.
        """
        deadline = time.monotonic() + self._config.bus.lease
        while not self._drain:
            directive = self.membership.wait(POLL_SECONDS)
            if directive is not None and directive.run and directive.max_steps:
                self._max_steps = directive.max_steps
                return directive.run
            known = time.monotonic() > deadline and is_done(self._config.output)
            if known and (run := run_of(self._journal_path)):
                return run
        return ""

    def _look_at_run(self) -> None:
        directive = self.membership.wait(POLL_SECONDS)
        self._max_steps = (directive.max_steps if directive else 0) or self._max_steps

    def _is_due(self, version: int) -> bool:
        keys = [one.keys for one in self._config.evaluations.values()]
        return any(is_evaluated(one, version, self._max_steps) for one in keys)

    @property
    def _journal_path(self) -> Path:
        return self._config.output / FOLDER / f"{self.label}.jsonl"


def is_evaluated(keys: EvalConfig, version: int, max_steps: int) -> bool:
    """Return whether a version is evaluated by these keys; as the ledger's `EvalRule.is_due`."""
    if version == max_steps:
        return keys.at_end
    return keys.at_start if version == 0 else bool(keys.every_steps) and version % keys.every_steps == 0


def is_done(output: Path) -> bool:
    """Return whether the run is done: the packer has written the summary."""
    return (output / "summary.json").exists()


def labels_of(config: RunConfig) -> list[str]:
    """Return the name of each tracker's files: its type, and a number from the second one of a type on."""
    types = [one.type for one in config.telemetry.trackers]
    return [
        kind if kind not in types[:index] else f"{kind}-{types[:index].count(kind) + 1}"
        for index, kind in enumerate(types)
    ]


def run_of(journal: Path) -> str:
    """Return the id of the run in a journal; empty without one."""
    try:
        with journal.open(encoding="utf-8") as file:
            return str(json.loads(file.readline())["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def has_rest(config: RunConfig, index: int) -> bool:
    """Return whether a tracker of a run that is done has not been sent everything."""
    path = config.output / FOLDER / f"{labels_of(config)[index]}.jsonl"
    run = run_of(path)
    return bool(run) and not Journal(path, run).finished


def make_tracker(keys: TrackerConfig) -> Tracker:
    """Make the tracker of a configuration. Its package is loaded here."""
    module: Any = importlib.import_module(f"actors.trackers.adapters.{keys.type}")
    made: Tracker = module.make(keys)
    return made
