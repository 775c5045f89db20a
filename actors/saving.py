"""Checkpoints written beside training, one at a time, by a thread of its own."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog

from actors.ledger.witness import START, next_chain
from actors.policy.checkpoints import CheckpointFolder
from actors.policy.snapshots import Snapshot
from actors.telemetry.metrics import Metrics
from schemas.messages import StepBatch

log = structlog.get_logger("checkpoints")


class Witness:
    """The records of the steps trained since the last checkpoint that is on disk (P20)."""

    def __init__(self, step: int = 0, chain: str = START) -> None:
        self.saved_step, self.step, self.chain = step, step, chain
        self._records: list[dict[str, Any]] = []

    def add(self, batch: StepBatch) -> None:
        """This step has been trained."""
        ordinals = batch.ordinals.tolist()
        self.step, self.chain = batch.step, next_chain(self.chain, batch.step, ordinals, batch.dropped, batch.digests)
        dropped = [[d.ordinal, d.reason] for d in batch.dropped]
        record = {"step": batch.step, "ordinals": ordinals, "digests": batch.digests, "dropped": dropped}
        self._records.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """What the next checkpoint testifies."""
        return list(self._records)

    def saved(self, step: int) -> None:
        """The records up to this step are on disk."""
        self.saved_step = step
        self._records = [record for record in self._records if record["step"] > step]


class CheckpointSaver:
    """Saves snapshots in the background. `problem` says why the newest write failed; empty when it did not."""

    def __init__(self, folder: CheckpointFolder, metrics: Metrics) -> None:
        self._folder, self._metrics = folder, metrics
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[int] | None = None
        self.problem = ""

    def begin(self, witness: Witness, run: str, snapshot: Snapshot) -> None:
        """Save in the background; the write before must have been collected."""
        assert self._running is None
        facts = (witness.step, witness.chain, witness.saved_step, witness.records, run)
        self._running = self._pool.submit(self._save, *facts, snapshot)

    @property
    def busy(self) -> bool:
        """Whether a write is under way, or has ended and has not been collected."""
        return self._running is not None

    def collect(self) -> int | None:
        """The step of a write that has ended well since the last call."""
        if self._running is None or not self._running.done():
            return None
        ended, self._running = self._running, None
        try:
            step = ended.result()
        except OSError as error:
            self.problem = str(error)
            self._metrics.count("grpo_trainer_checkpoints_total", outcome="failed")
            log.error("checkpoint not saved; training goes on", detail=self.problem)
            return None
        self.problem = ""
        self._metrics.count("grpo_trainer_checkpoints_total", outcome="saved")
        return step

    def close(self) -> None:
        """Take no more; what is under way ends with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _save(
        self, step: int, chain: str, previous: int, records: list[dict[str, Any]], run: str, snapshot: Snapshot
    ) -> int:
        started = time.monotonic()
        self._folder.save(step, chain, previous, records, run, snapshot)
        seconds = time.monotonic() - started
        self._metrics.observe("grpo_trainer_checkpoint_write_seconds", seconds)
        log.info("checkpoint saved", checkpoint=str(self._folder.path(step)), seconds=round(seconds, 2))
        return step
