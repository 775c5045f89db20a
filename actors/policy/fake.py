"""A learner without a model, for tests: its one weight is a running digest of what it was trained on."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from bus.weights import Weights
from schemas.messages import StepBatch


class FakeLearner:
    """Deterministic double of `TorchLearner`. `before_step` lets a test wait or fail inside a step."""

    def __init__(
        self, step_seconds: float = 0.0, before_step: Callable[[StepBatch], None] = lambda batch: None
    ) -> None:
        self._step_seconds, self._before_step = step_seconds, before_step
        self.digest = ""

    def step(self, batch: StepBatch) -> dict[str, float]:
        """Fold the batch into the digest."""
        self._before_step(batch)
        time.sleep(self._step_seconds)
        content = hashlib.sha256(self.digest.encode())
        for array in (batch.ordinals, batch.token_ids, batch.logprobs, batch.advantages):
            content.update(array.tobytes())
        self.digest = content.hexdigest()
        return {
            "loss": 0.0,
            "grad_norm": 1.0,
            "learning_rate": 0.0,
            "mismatch_kl": 0.0,
            "mismatch_max": 0.0,
            "masked_fraction": 0.0,
            "entropy": 0.0,
            "tokens": float(batch.loss_mask.sum()),
        }

    def weights(self) -> Weights:
        """The digest as a tensor of bytes."""
        import torch

        return Weights("full", {"digest": torch.tensor(list(self.digest.encode() or b"0"), dtype=torch.uint8)})

    def save(self, folder: Path) -> None:
        """The digest as JSON."""
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "fake.json").write_text(json.dumps(self.digest), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """What `save` wrote."""
        self.digest = json.loads((folder / "trainer" / "fake.json").read_text(encoding="utf-8"))
