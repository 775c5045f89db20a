"""The trainer actor: one rank of the gang.

Consumes StepBatches (a thread reads them, always) and orders from State. Emits published versions, step reports and
checkpoints in its beats. Waits for the gang's order, for the other ranks and for the batch of its next step; all waits
end with a State that says exit, with a drain, or with `bus.peer_timeout`. Nothing is sent from here but beats, so
nothing here can block. Rank 0 alone publishes, reports and saves; the ranks share `output_dir`.

    order wait ──run──▶ restore, meet, publish version c ──▶ step c+1 … max_steps ──▶ finish: wait until the run is done
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from actors.faults import point
from actors.membership import Drain, Membership, PackerSilentError, StartOverError
from actors.policy.checkpoints import CheckpointFolder
from actors.saving import CheckpointSaver, Witness
from actors.sending import WeightSender
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.weights import BroadcastPublisher, WeightPublisher
from schemas.config import RunConfig
from schemas.errors import PeerRefusedError, RunFailedError
from schemas.messages import (
    Manifest,
    Policy,
    State,
    StepBatch,
    StepReport,
    TrainerBeat,
    TrainerState,
    UpdateFailure,
)

if TYPE_CHECKING:
    from actors.policy.learner import Learner
    from actors.policy.ranks import Ranks

log = structlog.get_logger("trainer")

POLL_SECONDS = 0.5
REPORTS = "trainer/reports.json"
SAVE_POLL_SECONDS = 0.02
SAVE_RETRY_SECONDS = 5.0


class _Batches:
    """The batches that have come, read by a thread of its own; only those of the live incarnation and rank count.

    `on_arrival` is told the steps whose batch is here; it runs in that thread.
    """

    def __init__(self, inbox: Inbox, rank: int, on_arrival: Callable[[list[int]], None]) -> None:
        self._inbox, self._rank, self._on_arrival = inbox, rank, on_arrival
        self._by_step: dict[int, StepBatch] = {}
        self._arrived = threading.Condition()
        self._incarnation = -1
        self._stopping = False
        self._thread = threading.Thread(target=self._read, name="batches", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def accept(self, incarnation: int) -> None:
        """Batches of this incarnation count from now on."""
        with self._arrived:
            self._incarnation = incarnation
            self._by_step.clear()

    def take(self, step: int, timeout: float) -> StepBatch | None:
        """The batch of a step, or None after the timeout; batches of earlier steps are forgotten."""
        with self._arrived:
            self._arrived.wait_for(lambda: step in self._by_step or self._stopping, timeout)
            for old in [number for number in self._by_step if number < step]:
                del self._by_step[old]
            return self._by_step.get(step)

    @property
    def steps(self) -> list[int]:
        """The steps whose batch is here."""
        with self._arrived:
            return sorted(self._by_step)

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._inbox.close()

    def _read(self) -> None:
        while not self._stopping:
            message = self._inbox.receive(0.2)
            if isinstance(message, StepBatch) and message.rank == self._rank:
                with self._arrived:
                    if message.incarnation != self._incarnation:
                        continue
                    self._by_step[message.step] = message
                    self._arrived.notify_all()
                self._on_arrival(self.steps)


class TrainerActor:
    """Trains.

    Args:
        make_learner: called after the first beat, since loading takes long.
        meet: makes the ranks of an incarnation known to each other; gets run, incarnation and what to call meanwhile.
        publisher: of weights; None on ranks that publish nothing.
        checkpoints: of this run.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_learner: Callable[[], "Learner"],
        meet: Callable[[str, int, Callable[[], object]], "Ranks"],
        publisher: WeightPublisher | None,
        checkpoints: CheckpointFolder,
        rank: int = 0,
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self._config, self._metrics, self._make_learner, self._meet = config, metrics, make_learner, meet
        self._publisher, self._checkpoints, self._rank = publisher, checkpoints, rank
        self.membership = Membership(config, TrainerBeat, name, self._pass_update_on, lose=lose)
        self._inbox = Inbox("steps", self.membership.addresses, config.bus, name, self.membership.boot_id)
        self._batches = _Batches(self._inbox, rank, self._say_received)
        self._drain = Drain()
        self._reports: list[StepReport] = []
        self._stalled = 0.0
        self._told_to_leave = False
        self._sender: WeightSender | None = None
        if isinstance(publisher, BroadcastPublisher):
            self._sender = WeightSender(publisher, metrics, self._say_failed_update)
        self._witness, self._saver = Witness(), CheckpointSaver(checkpoints, metrics)
        self._run, self._incarnation, self._lineage = "", 0, 0

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts, self._inbox.counts]

    def run(self, metrics_url: str = "") -> None:
        """Until the run is done, or drained."""
        self.membership.start(
            metrics_url=metrics_url,
            rank=self._rank,
            num_ranks=self._config.trainer.num_ranks,
            address=self._inbox.address,
            incarnation=0,
            next_step=1,
            checkpoints=[],
            published=[],
            reports=[],
            received=np.zeros(0, np.int64),
        )
        self._batches.start()
        try:
            self._train()
        except RunFailedError as error:
            self._tell_everybody(error)
            raise
        finally:
            if self._sender is not None:
                self._sender.close()
            self._saver.close()
            self._batches.close()
            self.membership.close()

    def drain(self) -> None:
        """End after the step under way, with a checkpoint. From any thread."""
        self._drain.begin()

    def _say_received(self, steps: list[int]) -> None:
        """So that the packer does not send again what is here, however long the step under way takes."""
        self.membership.report(urgent=False, received=np.array(steps, np.int64))

    def _pass_update_on(self, state: State) -> None:
        """In the control thread, so that a broadcast begins at once, whatever the step under way does."""
        if isinstance(state, TrainerState):
            self._told_to_leave = state.order == "exit" or bool(state.refusal)
            if self._sender is not None:
                self._sender.follow(state.update)

    def _say_failed_update(self, failure: UpdateFailure) -> None:
        self.membership.report(failed_update=failure)

    def _train(self) -> None:
        learner = self._make_learner()
        from actors.policy.ranks import (
            RanksBrokenError,
        )  # here: torch is slow to import, and a gang would be kept waiting

        start = self._join(learner)
        if start is None:
            return
        try:
            self._run_steps(learner, start)
            if self._rank == 0:
                self._save_last(learner)
            self._end_of_assistance(learner)
        except RanksBrokenError as error:
            self._wait_for_exit(error)
        while not self._drain and not self._done():
            self.membership.wait(POLL_SECONDS)
        if self._publisher and self._done():
            self._publisher.close()

    def _run_steps(self, learner: "Learner", start: int) -> None:
        """All steps after `start`, until the last one or a drain."""
        ranks = self._meet(self._run, self._incarnation, self._follow)
        learner.enter(ranks, self._ensure_the_gang_waits)
        self._publish(learner, start)
        self._end_of_assistance(learner)
        self.membership.report(published=self._published())
        for step in range(start + 1, self._config.trainer.max_steps + 1):
            batch, waited = self._wait_for(step)
            if batch is None:
                return
            self._step(learner, ranks, batch, waited)
            if b"leaving" in ranks.exchange(b"leaving" if self._drain else b""):
                return  # all ranks after the same step: none waits for one that has left

    def _end_of_assistance(self, learner: "Learner") -> None:
        """Where weights are spread over the ranks, the others assist rank 0 in publishing and saving up to here."""
        if self._rank == 0:
            learner.dismiss()
        else:
            learner.assist()

    def _ensure_the_gang_waits(self) -> None:
        """For a thread beside a collective that stands still; `_follow` is for the main loop alone.

        Raises:
            StartOverError: the gang was told to exit, or the run has failed.
            PackerSilentError: nobody is there to tell it.
        """
        if self._told_to_leave:
            raise StartOverError("the gang was told to exit while this rank waited for another one")
        if self.membership.silent_seconds > self._config.bus.peer_timeout:
            raise PackerSilentError("the packer has been silent while this rank waited for another one")

    def _wait_for_exit(self, error: Exception) -> None:
        """A rank is lost. The packer, whose word counts, says so within its lease; if it does not, the fault is here.

        Raises:
            StartOverError: the gang is told to exit.
        """
        log.warning("another rank is lost", detail=str(error))
        deadline = time.monotonic() + 2 * self._config.bus.lease
        while time.monotonic() < deadline:
            self._follow()
            self.membership.wait(POLL_SECONDS)
        raise error

    def _tell_everybody(self, error: RunFailedError) -> None:
        """The packer tells all others that the run has failed; who starts again later does not know of it."""
        self.membership.report(failure=str(error))
        deadline = time.monotonic() + 2 * self._config.bus.lease
        with contextlib.suppress(PeerRefusedError):  # which is how we are told
            while time.monotonic() < deadline:
                self.membership.wait(POLL_SECONDS)

    def _join(self, learner: "Learner") -> int | None:
        """Wait for the gang's incarnation and go to its checkpoint; returns the step of it, None when drained."""
        state = self._wait_for_order(lambda state: bool(state.run))
        if state is None:
            return None
        self._run = state.run
        self.membership.report(checkpoints=self._checkpoints.good(state.run), phase="running")
        state = self._wait_for_order(lambda state: state.order in ("run", "finish") and state.incarnation > 0)
        if state is None:
            return None
        if self._rank == 0:
            self._checkpoints.begin_at(state.checkpoint)
        if state.checkpoint:
            learner.restore(self._checkpoints.path(state.checkpoint))
            self._witness = Witness(state.checkpoint, self._checkpoints.witness(state.checkpoint)["chain"])
            reports = (self._checkpoints.path(state.checkpoint) / REPORTS).read_text(encoding="utf-8")
            self._reports = [StepReport(**report) for report in json.loads(reports)] if self._rank == 0 else []
        self._incarnation, self._lineage = state.incarnation, state.lineage
        self._batches.accept(state.incarnation)
        self.membership.report(
            incarnation=state.incarnation, next_step=state.checkpoint + 1, reports=list(self._reports)
        )
        log.info("gang runs", incarnation=state.incarnation, checkpoint=state.checkpoint)
        return state.checkpoint

    def _wait_for_order(self, good: Callable[[TrainerState], bool]) -> TrainerState | None:
        """The first State that is good; None when drained."""
        state = self._follow()
        while state is None or not good(state):
            if self._drain:
                return None
            self.membership.wait(POLL_SECONDS)
            state = self._follow()
        return state

    def _wait_for(self, step: int) -> tuple[StepBatch | None, float]:
        """The batch of a step and the seconds waited; None when drained."""
        started = time.monotonic()
        while True:
            batch = self._batches.take(step, POLL_SECONDS)
            self._follow()
            if self._drain:
                return None, 0.0
            if batch is not None:
                waited = time.monotonic() - started
                self._metrics.count("grpo_trainer_step_seconds_total", waited, phase="wait_batch")
                return batch, waited

    def _step(self, learner: "Learner", ranks: "Ranks", batch: StepBatch, waited: float) -> None:
        bind_everywhere(step=batch.step)
        point("trainer.batch")
        try:
            values = learner.step(batch, ranks)
        except FloatingPointError as error:
            raise RunFailedError(str(error)) from error
        point("trainer.updated")
        self._witness.add(batch)
        values |= {"seconds_wait_batch": waited} | self._publish(learner, batch.step)
        point("trainer.published")
        # said before the checkpoint is begun: engines need not wait for the disk
        self.membership.report(next_step=batch.step + 1, published=self._published())
        if self._rank == 0:
            values["seconds_checkpoint"], self._stalled = self._stalled, 0.0
            weights = self._published()[-1].digest
            self._reports.append(StepReport(step=batch.step, values=values, weights=weights))
            self.membership.report(reports=list(self._reports))
            if batch.step % self._config.trainer.checkpoint.interval == 0:
                self._save(learner)
        self._end_of_assistance(learner)
        self._show(batch, values)

    def _publish(self, learner: "Learner", version: int) -> dict[str, float]:
        """Make the current weights available as this version; returns the seconds of the parts."""
        self._metrics.set("grpo_trainer_policy_version", version)
        if self._publisher is None:
            return {}
        state = self._follow()
        started = time.monotonic()
        weights = learner.weights()
        gathered = time.monotonic()
        self._publisher.prune(state.keep_version if state else 0)
        self._publisher.publish(Policy(lineage=self._lineage, version=version), weights)
        seconds = {"seconds_gather": gathered - started, "seconds_publish": time.monotonic() - gathered}
        self._metrics.count("grpo_trainer_step_seconds_total", sum(seconds.values()), phase="publish")
        return seconds

    def _published(self) -> list[Manifest]:
        return self._publisher.published() if self._publisher else []

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, learner: "Learner") -> None:
        """Begin to save the newest step, after the save before it. What training stood still for is told with the next.

        Reports that nobody has written down yet go along: whoever goes on from the checkpoint tells them.
        """
        started = time.monotonic()
        while self._saver.busy:
            self._follow()
            time.sleep(SAVE_POLL_SECONDS)
        reports = json.dumps([report.model_dump() for report in self._reports])
        snapshot = learner.snapshot().with_text(REPORTS, reports)
        self._saver.begin(self._witness, self._run, snapshot)
        self._stalled = time.monotonic() - started
        self._metrics.count("grpo_trainer_step_seconds_total", self._stalled, phase="checkpoint")

    def _save_last(self, learner: "Learner") -> None:
        """Do not leave before the newest step is on disk; a disk that is full has `checkpoint.timeout` to be freed.

        Raises:
            RunFailedError: it could not be written.
        """
        timeout = self._config.trainer.checkpoint.timeout
        deadline = time.monotonic() + timeout
        while self._saver.busy or self._witness.saved_step < self._witness.step:
            if not self._saver.busy and time.monotonic() > deadline:
                raise RunFailedError(
                    f"the last checkpoint can't be written, tried for {timeout:g} s (trainer.checkpoint.timeout): "
                    f"{self._saver.problem}. Free space and start the same command again: nothing else is lost"
                )
            if not self._saver.busy:
                self._save(learner)
            self._follow()
            self.membership.wait(SAVE_RETRY_SECONDS if self._saver.problem else SAVE_POLL_SECONDS)

    # --- State ---------------------------------------------------------------------------------------------------

    def _follow(self) -> TrainerState | None:
        """The newest State, after what it and the checkpoint writer tell has been taken note of.

        Raises:
            StartOverError: the gang was told to exit.
        """
        saved = self._saver.collect()
        if saved is not None:
            self._witness.saved(saved)
            self.membership.report(checkpoints=self._checkpoints.good(self._run))
        state = self.membership.latest()
        if not isinstance(state, TrainerState):
            return None
        if state.order == "exit":
            raise StartOverError("another rank of the gang is gone, so this one starts anew with it")
        confirmed = [report for report in self._reports if report.step > state.recorded_step]
        if len(confirmed) < len(self._reports):
            self._reports = confirmed
            self.membership.report(urgent=False, reports=list(confirmed))
        return state

    def _done(self) -> bool:
        state = self._follow()
        return state is not None and state.phase == "done"

    def _show(self, batch: StepBatch, values: dict[str, float]) -> None:
        m = self._metrics
        m.count("grpo_trainer_steps_total")
        m.count("grpo_trainer_tokens_total", values["tokens"])
        for phase in ("forward_backward", "optimizer"):
            m.count("grpo_trainer_step_seconds_total", values.get(f"seconds_{phase}", 0.0), phase=phase)
        for name in ("loss", "grad_norm", "learning_rate", "mismatch_kl", "entropy"):
            m.set(f"grpo_trainer_{name}", values.get(name, 0.0))
        for age in ("current", "older"):
            m.set("grpo_trainer_mismatch_abs", values.get(f"mismatch_abs_{age}", 0.0), weights=age)
        m.set("grpo_trainer_masked_fraction", values.get("masked_fraction", 0.0), cause="any")
        for cause in ("low", "high", "geo", "sequence"):
            m.set("grpo_trainer_masked_fraction", values.get(f"masked_fraction_{cause}", 0.0), cause=cause)
        log.info(
            "step trained",
            loss=round(values["loss"], 5),
            grad_norm=round(values["grad_norm"], 4),
            mismatch_kl=round(values.get("mismatch_kl", 0.0), 6),
            groups=len(batch.ordinals),
        )
