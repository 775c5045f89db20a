"""Saving of checkpoints in the background of training, one at a time, in a separate thread."""

import time
from concurrent.futures import Future
from typing import Any

import structlog

from actors.learner.checkpoints import CheckpointFolder
from actors.learner.snapshots import Snapshot
from actors.ledger.witness import START, next_chain
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import span
from bus import threads
from schemas.messages import StepBatch

log = structlog.get_logger("checkpoints")


class Witness:
    """Records of the steps trained since the last checkpoint on disk (P20: each checkpoint has a witness file).

    Args:
        step: step of the last checkpoint, 0 without one.
        chain: digest that ends the chain of witnesses up to this step.
    """

    def __init__(self, step: int = 0, chain: str = START) -> None:
        self.saved_step, self.step, self.chain = step, step, chain
        self._records: list[dict[str, Any]] = []

    def add(self, batch: StepBatch) -> None:
        """Add the record of a trained step."""
        ordinals = batch.ordinals.tolist()
        self.step, self.chain = batch.step, next_chain(self.chain, batch.step, ordinals, batch.dropped, batch.digests)
        dropped = [[d.ordinal, d.reason] for d in batch.dropped]
        record = {"step": batch.step, "ordinals": ordinals, "digests": batch.digests, "dropped": dropped}
        self._records.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records for the next checkpoint's witness file, oldest first."""
        return list(self._records)

    def saved(self, step: int) -> None:
        """Drop the records up to a step whose checkpoint is on disk."""
        self.saved_step = step
        # steps trained during the save stay for the next witness
        self._records = [record for record in self._records if record["step"] > step]


class CheckpointSaver:
    """Saver of snapshots, in the background.

    Args:
        folder: folder with the run's checkpoints.
        metrics: destination of the checkpoint metrics.
    """

    def __init__(self, folder: CheckpointFolder, metrics: Metrics) -> None:
        self._folder, self._metrics = folder, metrics
        self._pool = threads.Workers(1, "checkpoint")
        self._running: Future[int] | None = None
        self.problem = ""
        """Reason why the newest save failed; empty if it did not."""

    def begin(self, witness: Witness, run: str, snapshot: Snapshot) -> None:
        """Start to save a snapshot in the background. The save before must have been collected."""
        assert self._running is None
        # copies of the witness's values, since training goes on and changes them
        facts = (witness.step, witness.chain, witness.saved_step, witness.records, run)
        self._running = self._pool.submit(self._save, *facts, snapshot)

    @property
    def busy(self) -> bool:
        """True while a save is under way, or has ended and is not collected yet."""
        return self._running is not None

    def collect(self) -> int | None:
        """Return the step of a save that has succeeded since the last call; None if there is none.

        A failed save is logged and leaves its reason in `problem`.

        Raises:
            FolderTakenError: another process writes the checkpoints now.
        """
        if self._running is None or not self._running.done():
            return None
        # before the result is read: a failed save must not keep the next one from starting
        ended, self._running = self._running, None
        try:
            step = ended.result()
        except Exception as error:
            # any other error is one of safetensors, torch or our own code, and is logged with its traceback
            known = isinstance(error, OSError)
            self.problem = str(error) if known else f"{type(error).__name__}: {error}"
            self._metrics.count("grpo_trainer_checkpoints_total", outcome="failed")
            log.error("checkpoint not saved; training goes on", detail=self.problem, exc_info=None if known else error)
            return None
        self.problem = ""
        self._metrics.count("grpo_trainer_checkpoints_total", outcome="saved")
        return step

    def close(self) -> None:
        """Accept no more saves. A save under way ends with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _save(
        self, step: int, chain: str, previous: int, records: list[dict[str, Any]], run: str, snapshot: Snapshot
    ) -> int:
        started = time.monotonic()
        with span("save checkpoint", step=step):
            self._folder.save(step, chain, previous, records, run, snapshot)
        seconds = time.monotonic() - started
        self._metrics.observe("grpo_trainer_checkpoint_write_seconds", seconds)
        log.info("checkpoint saved", checkpoint=str(self._folder.path(step)), seconds=round(seconds, 2))
        return step
