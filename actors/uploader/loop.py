"""The uploader actor: pushes checkpoints to the hub, in a process that nothing waits for but the end of `actors up`.

Consumes the checkpoints in output_dir and the phase of the run from its directive. Emits commits on the hub and the
file uploads.json. An attempt runs in a thread, so that a hub that hangs holds up neither heartbeats nor a drain; after
`attempt_timeout` the process ends, and its successor first looks whether the commit has arrived.

    checkpoint saved ──▶ linked into uploads/ ──▶ one commit ──▶ noted ──▶ link removed
                                      ▲── pause ◀── failed, up to max_attempts
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from actors.process.membership import Drain, Membership, PackerSilentError, StartOverError
from actors.process.stop_wish import wish_to_stop
from actors.telemetry.metrics import Metrics
from actors.uploader.choice import due, pushes_all, updates_model
from actors.uploader.files import Known, Saved, forget_copies, keep, place_of, run_of, saved_by
from actors.uploader.hub import HubRepository, PushFailedError
from actors.uploader.model_card import card_of
from actors.uploader.record import Uploads
from bus import threads
from bus.counts import EdgeCounts
from schemas.config import RunConfig
from schemas.config.push_to_hub import PushToHubConfig
from schemas.messages import ObserverHeartbeat

log = structlog.get_logger("uploader")

POLL_SECONDS = 0.25
"""Pause between two looks."""
MOST_PAUSES = 60.0
"""Limit of the doubling pause, in multiples of `retry_pause`."""


@dataclass
class Attempt:
    """Attempts at one checkpoint."""

    saved: Saved
    number: int = 0
    """Attempts so far."""
    next_at: float = 0.0
    """Monotonic time of the next one."""
    started: float = 0.0
    """Monotonic time of the start of the one under way."""
    running: "Future[str] | None" = None


class UploaderActor:
    """Actor that pushes the checkpoints of a run to the hub.

    Args:
        config: configuration of the run.
        keys: keys of `push_to_hub`.
        name: name in the run.
        metrics: destination of the `grpo_uploader_*` metrics.
    """

    def __init__(self, config: RunConfig, keys: PushToHubConfig, name: str, metrics: Metrics) -> None:
        self._config, self._keys, self._metrics, self._output = config, keys, metrics, config.output
        self.membership = Membership(config, ObserverHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._patience = config.bus.lease
        """Seconds for the packer of a run that is done to be heard, if there is one."""
        self._drain = Drain()
        self._pool = threads.Workers(1, "upload")
        self._repository = HubRepository(keys, config.name, config.output.name)
        self._record = Uploads("")
        self._attempt: Attempt | None = None
        self._known: Known = {}
        self._is_unsure = True
        """True if an earlier process may have pushed more than is recorded."""
        self._given_up: set[str] = set()
        """Chains of checkpoints that this process tries no more."""

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts]

    def run(self, metrics_url: str = "") -> None:
        """Push checkpoints until the run is done and all is pushed or given up, or this actor has drained.

        Raises:
            TimeoutError: an attempt has taken `attempt_timeout`; a new process tries again.
            StartOverError, PeerRefusedError, PackerSilentError: as `Membership.latest`.
        """
        self.membership.start(metrics_url=metrics_url, phase="running")
        try:
            run = self._first_run()
            if not run:
                return
            self._begin(run)
            while not self._over():
                self.turn(is_end=wish_to_stop(self._output) is not None)
            self._finish()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self.membership.close()

    def drain(self) -> None:
        """Finish the push under way, and exit. Thread-safe."""
        self._drain.begin()

    def turn(self, *, is_end: bool) -> bool:
        """Look for checkpoints and go on with the attempt; return whether something is still to be pushed.

        Args:
            is_end: True once training has ended, so that strategy `end` pushes.

        Raises:
            TimeoutError: the attempt has taken `attempt_timeout`.
        """
        self.liveness.turn()
        saved = saved_by(self._output, self._known)
        wanted = due(saved, self._record.chains, self._keys, is_end=is_end)
        self._note_missed(wanted)
        wanted = [one for one in wanted if one.chain not in self._record.missed]
        self._metrics.set("grpo_uploader_pending_checkpoints", len(wanted))
        attempt = self._attempt
        if attempt is not None and attempt.running is not None:
            self._look(attempt, attempt.running)
            return True
        open_ones = [one for one in wanted if one.chain not in self._given_up]
        if not open_ones:
            return False
        # a newer checkpoint takes the place of one that could not be pushed
        if attempt is None or attempt.saved != open_ones[0]:
            attempt = self._attempt = Attempt(open_ones[0])
        if time.monotonic() >= attempt.next_at:
            self._start(attempt, saved)
        return True

    def _first_run(self) -> str:
        """Wait for the id of the run; empty: drained while waiting.

        A run that is done may have no packer any more: then the witnesses of its checkpoints have the id.
        """
        deadline = time.monotonic() + self._patience
        while not self._drain:
            directive = self.membership.wait(POLL_SECONDS)
            if directive is not None and directive.run:
                return directive.run
            if time.monotonic() > deadline and is_done(self._output) and (run := run_of(self._output)):
                return run
        return ""

    def _begin(self, run: str) -> None:
        self._record = Uploads.load(self._output, run)
        # given up by an earlier process, or pushed by a repair of the token: tried again
        self._record.unpushed.clear()
        self._is_unsure = not self._record.pushed
        newest = self._record.pushed[-1]["step"] if self._record.pushed else 0
        self._metrics.set("grpo_uploader_pushed_step", newest)
        forget_copies(self._output, {one.name for one in saved_by(self._output)})

    def _over(self) -> bool:
        """Wait a moment; return whether the run is done or this actor drains."""
        try:
            directive = self.membership.wait(POLL_SECONDS)
        except (PackerSilentError, StartOverError):
            # the push under way is worth more than a timely end
            if self._attempt is None or self._attempt.running is None:
                raise
            time.sleep(POLL_SECONDS)
            return bool(self._drain)
        done = directive is not None and directive.phase == "done"
        return done or bool(self._drain) or is_done(self._output)

    def _finish(self) -> None:
        """Push what is left: after the end all of it, for `end_timeout`; in a drain the push under way alone."""
        is_end = is_done(self._output) or wish_to_stop(self._output) is not None
        deadline = time.monotonic() + self._keys.end_timeout
        while time.monotonic() < deadline and self.turn(is_end=is_end):
            busy = self._attempt is not None and self._attempt.running is not None
            if not is_end and self._drain.may_leave(holds_work=busy):
                break
            time.sleep(POLL_SECONDS)
        self._note_unpushed(is_end)
        self._save()

    # --- one checkpoint ------------------------------------------------------------------------------------------

    def _start(self, attempt: Attempt, saved: list[Saved]) -> None:
        folder = keep(self._output, attempt.saved)
        if folder is None:
            self._attempt = None
            return  # removed a moment ago: noted at the next turn
        forget_copies(self._output, {attempt.saved.name})
        may_be_there = self._is_unsure or self._record.attempted == attempt.saved.chain
        self._record.attempted = attempt.saved.chain
        # before the first request: a successor of a killed process must know that the commit may be there
        self._save()
        attempt.number, attempt.started = attempt.number + 1, time.monotonic()
        attempt.running = self._pool.submit(
            self._repository.push,
            attempt.saved,
            folder,
            replaces_model=updates_model(attempt.saved, saved, self._record.chains),
            may_be_there=may_be_there,
            card=partial(card_of, self._config, attempt.saved.step),
        )

    def _look(self, attempt: Attempt, running: "Future[str]") -> None:
        """Look whether the attempt has ended.

        Raises:
            TimeoutError: it has taken `attempt_timeout`.
        """
        took = time.monotonic() - attempt.started
        if not running.done():
            if took > self._keys.attempt_timeout:
                self._fail(attempt, f"the push has taken {took:.0f} s (push_to_hub.attempt_timeout)", refused=False)
                raise TimeoutError(self._record.unpushed[str(attempt.saved.step)])
            return
        attempt.running = None
        try:
            commit = running.result()
        except PushFailedError as error:
            self._fail(attempt, str(error), refused=error.refused)
            return
        except Exception as error:  # noqa: BLE001 - of the file system: a checkpoint that can't be read
            self._fail(attempt, f"{type(error).__name__}: {error}", refused=False)
            return
        self._attempt = None
        self._record.repository = self._repository.name
        self._record.note_pushed(attempt.saved, commit)
        self._save()
        forget_copies(self._output)
        self._metrics.count("grpo_uploader_pushes_total", outcome="pushed")
        self._metrics.set("grpo_uploader_pushed_step", attempt.saved.step)
        log.info("pushed", step=attempt.saved.step, to=self._repository.name, commit=commit, seconds=round(took, 1))

    def _fail(self, attempt: Attempt, reason: str, *, refused: bool) -> None:
        self._metrics.count("grpo_uploader_pushes_total", outcome="refused" if refused else "failed")
        self._record.unpushed[str(attempt.saved.step)] = reason
        self._save()
        last = refused or attempt.number >= self._keys.max_attempts
        pause = min(MOST_PAUSES, 2.0 ** (attempt.number - 1)) * self._keys.retry_pause
        attempt.next_at = time.monotonic() + pause
        if last:
            self._given_up.add(attempt.saved.chain)
            self._attempt = None
        log.error(
            "checkpoint not pushed; training goes on",
            step=attempt.saved.step,
            detail=reason,
            attempt=attempt.number,
            next_seconds=None if last else pause,
        )

    # --- what is not pushed --------------------------------------------------------------------------------------

    def _note_missed(self, wanted: list[Saved]) -> None:
        """Note the checkpoints that are gone, where each one was to be pushed."""
        if not pushes_all(self._keys):
            return
        for one in wanted:
            if one.chain not in self._record.missed and place_of(self._output, one) is None:
                self._record.missed[one.chain] = one.step
                self._save()
                self._metrics.count("grpo_uploader_pushes_total", outcome="missed")
                log.error(
                    "checkpoint was removed before it was pushed; raise trainer.checkpoint.keep_last", step=one.step
                )

    def _note_unpushed(self, is_end: bool) -> None:
        saved = saved_by(self._output, self._known)
        wanted = due(saved, self._record.chains, self._keys, is_end=is_end)
        reasons = self._record.unpushed
        self._record.unpushed = {
            str(one.step): reasons.get(str(one.step), "there was no time (push_to_hub.end_timeout)")
            for one in wanted
            if one.chain not in self._record.missed
        }

    def _save(self) -> None:
        try:
            self._record.save(self._output)
        except OSError as error:
            # the commits on the hub are looked up by the next process
            log.error("uploads.json not written", detail=str(error))


def is_done(output: Path) -> bool:
    """Return whether the run is done: the packer has written the summary."""
    return (output / "summary.json").exists()
