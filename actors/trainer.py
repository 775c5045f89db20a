"""The trainer actor: one rank of the gang.

Consumes StepBatches (a thread reads them, always) and orders from State. Emits published versions, step reports and
checkpoints in its beats. Waits for the gang's order and for the batch of its next step; both waits end with a State
that says exit, with a drain, or with `bus.peer_timeout`. Nothing is sent from here but beats, so nothing here can
block.

    order wait ──run──▶ restore, publish version c ──▶ step c+1 … max_steps ──▶ finish: wait until the run is done
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from actors.ledger.witness import START, next_chain
from actors.membership import Drain, Membership, StartOverError
from actors.policy.checkpoints import CheckpointFolder
from actors.policy.learner import Learner
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.weights import WeightPublisher
from schemas.config import RunConfig
from schemas.messages import Policy, StepBatch, StepReport, TrainerBeat, TrainerState

log = structlog.get_logger("trainer")

POLL_SECONDS = 0.5


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
        publisher: of weights.
        checkpoints: of this run.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_learner: Callable[[], Learner],
        publisher: WeightPublisher,
        checkpoints: CheckpointFolder,
        rank: int = 0,
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self._config, self._metrics, self._make_learner = config, metrics, make_learner
        self._publisher, self._checkpoints, self._rank = publisher, checkpoints, rank
        self.membership = Membership(config, TrainerBeat, name, lose=lose)
        self._inbox = Inbox("steps", self.membership.addresses, config.bus, name, self.membership.boot_id)
        self._batches = _Batches(self._inbox, rank, self._say_received)
        self._drain = Drain()
        self._reports: list[StepReport] = []
        self._chain, self._saved_step, self._witnessed = START, 0, list[dict[str, Any]]()
        self._incarnation = self._lineage = 0

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
        finally:
            self._batches.close()
            self.membership.close()

    def drain(self) -> None:
        """End after the step under way, with a checkpoint. From any thread."""
        self._drain.begin()

    def _say_received(self, steps: list[int]) -> None:
        """So that the packer does not send again what is here, however long the step under way takes."""
        self.membership.report(urgent=False, received=np.array(steps, np.int64))

    def _train(self) -> None:
        learner = self._make_learner()
        first = self._join(learner)
        if first is None:
            return
        self._publish(learner, first - 1)
        for step in range(first, self._config.trainer.max_steps + 1):
            batch, waited = self._wait_for(step)
            if batch is None:
                break
            self._step(learner, batch, waited)
        if self._saved_step < self._last_step:
            self._save(learner)
        while not self._drain and not self._done():
            self.membership.wait(POLL_SECONDS)
        if self._rank == 0 and self._done():
            self._publisher.close()

    @property
    def _last_step(self) -> int:
        return int(self._witnessed[-1]["step"]) if self._witnessed else self._saved_step

    def _join(self, learner: Learner) -> int | None:
        """Wait for the gang's incarnation and go to its checkpoint; returns the first step, None when drained."""
        state = self._state()
        while not (state and state.run):
            if self._drain:
                return None
            self.membership.wait(POLL_SECONDS)
            state = self._state()
        self.membership.report(checkpoints=self._checkpoints.good(state.run), phase="running")
        while state is None or state.order not in ("run", "finish") or state.incarnation == 0:
            if self._drain:
                return None
            self.membership.wait(POLL_SECONDS)
            state = self._state()
        if state.checkpoint:
            learner.restore(self._checkpoints.path(state.checkpoint))
            self._chain = self._checkpoints.witness(state.checkpoint)["chain"]
        self._saved_step = state.checkpoint
        self._incarnation, self._lineage = state.incarnation, state.lineage
        self._batches.accept(state.incarnation)
        log.info("gang runs", incarnation=state.incarnation, checkpoint=state.checkpoint)
        return state.checkpoint + 1

    def _wait_for(self, step: int) -> tuple[StepBatch | None, float]:
        """The batch of a step and the seconds waited; None when drained."""
        started = time.monotonic()
        while True:
            batch = self._batches.take(step, POLL_SECONDS)
            self._state()
            if self._drain:
                return None, 0.0
            if batch is not None:
                waited = time.monotonic() - started
                self._metrics.count("grpo_trainer_step_seconds_total", waited, phase="wait_batch")
                return batch, waited

    def _step(self, learner: Learner, batch: StepBatch, waited: float) -> None:
        bind_everywhere(step=batch.step)
        values = learner.step(batch)
        digests, dropped = batch.digests, batch.dropped
        self._chain = next_chain(self._chain, batch.step, batch.ordinals.tolist(), dropped, digests)
        self._witnessed.append(
            {
                "step": batch.step,
                "ordinals": batch.ordinals.tolist(),
                "digests": digests,
                "dropped": [[d.ordinal, d.reason] for d in dropped],
            }
        )
        values |= {"seconds_wait_batch": waited} | self._publish(learner, batch.step)
        # said before the checkpoint is written: engines need not wait for the disk
        self.membership.report(next_step=batch.step + 1, published=self._publisher.published())
        if (
            batch.step % self._config.trainer.checkpoint.every_steps == 0
            or batch.step == self._config.trainer.max_steps
        ):
            values["seconds_checkpoint"] = self._save(learner)
        self._reports.append(StepReport(step=batch.step, values=values))
        self.membership.report(reports=list(self._reports))
        self._show(batch, values)

    def _publish(self, learner: Learner, version: int) -> dict[str, float]:
        """Make the current weights available as this version; returns the seconds of the parts."""
        state = self._state()
        started = time.monotonic()
        weights = learner.weights()
        gathered = time.monotonic()
        if self._rank == 0:
            self._publisher.prune(state.keep_version if state else 0)
            self._publisher.publish(Policy(lineage=self._lineage, version=version), weights)
        seconds = {"seconds_gather": gathered - started, "seconds_publish": time.monotonic() - gathered}
        self._metrics.count("grpo_trainer_step_seconds_total", sum(seconds.values()), phase="publish")
        self._metrics.set("grpo_trainer_policy_version", version)
        if version == self._saved_step:  # the first of this incarnation: from now on the rank is part of it
            self.membership.report(
                incarnation=self._incarnation, next_step=version + 1, published=self._publisher.published()
            )
        return seconds

    def _save(self, learner: Learner) -> float:
        """Write a checkpoint of the newest step; returns the seconds."""
        started, step = time.monotonic(), self._last_step
        state = self._state()
        self._checkpoints.save(
            step, self._chain, self._saved_step, self._witnessed, state.run if state else "", learner.save
        )
        self._saved_step, self._witnessed = step, []
        seconds = time.monotonic() - started
        self._metrics.count("grpo_trainer_step_seconds_total", seconds, phase="checkpoint")
        self.membership.report(checkpoints=self._checkpoints.good(state.run if state else ""))
        log.info("checkpoint saved", checkpoint=str(self._checkpoints.path(step)), seconds=round(seconds, 2))
        return seconds

    def _state(self) -> TrainerState | None:
        """The newest State.

        Raises:
            StartOverError: the gang was told to exit.
        """
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
        state = self._state()
        return state is not None and state.phase == "done"

    def _show(self, batch: StepBatch, values: dict[str, float]) -> None:
        m = self._metrics
        m.count("grpo_trainer_steps_total")
        m.count("grpo_trainer_tokens_total", values["tokens"])
        for phase in ("forward_backward", "optimizer"):
            m.count("grpo_trainer_step_seconds_total", values.get(f"seconds_{phase}", 0.0), phase=phase)
        for name in ("loss", "grad_norm", "learning_rate", "mismatch_kl", "entropy"):
            m.set(f"grpo_trainer_{name}", values.get(name, 0.0))
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
