"""The thread that writes checkpoints: whatever ends a write is told, and training goes on."""

import pytest

from actors.telemetry.metrics import Metrics
from actors.trainer.checkpoint_saver import CheckpointSaver, Witness
from tests.ring.harness import wait_until


class Folder:
    """Raises once, then saves."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self.saved: list[int] = []

    def save(self, step, *facts):
        """Take the next turn."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.saved.append(step)

    def path(self, step):
        """Of a checkpoint."""
        return f"step_{step}"


class SafetensorError(Exception):
    """As safetensors raises it, which is no OSError."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (SafetensorError("I/O error: no space"), "SafetensorError: I/O error: no space"),
        (RuntimeError("unexpected"), "RuntimeError: unexpected"),
    ],
)
def test_training_goes_on_when_a_checkpoint_fails_for_a_reason_of_its_own(error, told):
    """The write that failed is named and counted, the next one is a new attempt."""
    metrics, folder = Metrics("trainer"), Folder(error)
    saver = CheckpointSaver(folder, metrics)

    def save(step: int) -> int | None:
        saver.begin(Witness(step), "r", None)
        collected = []
        wait_until(lambda: collected.append(saver.collect()) or not saver.busy, "the write has ended")
        return collected[-1]

    assert save(5) is None
    assert saver.problem == told
    assert metrics.registry.get_sample_value("grpo_trainer_checkpoints_total", {"outcome": "failed"}) == 1
    assert save(10) == 10
    assert saver.problem == ""
    saver.close()
