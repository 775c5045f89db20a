"""Learner without a model, for tests: the only weight is a running digest of all batches trained on."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.learner.snapshots import Snapshot
from actors.process.fault_points import point
from bus.weights import Weights
from schemas.messages import StepBatch

if TYPE_CHECKING:
    from actors.learner.ranks import Ranks


class FakeLearner:
    """Deterministic test double of `TorchLearner`.

    Args:
        step_seconds: duration of a step.
        before_step: lets a test wait or fail inside a step.
        ranks_per_row: ranks with the same rows, which count once.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        before_step: Callable[[StepBatch], None] = lambda batch: None,
        ranks_per_row: int = 1,
    ) -> None:
        self._step_seconds, self._before_step = step_seconds, before_step
        self._ranks_per_row = ranks_per_row
        self.digest = ""
        self.inexact = ""

    def warm_up(self) -> None:
        """Do nothing: there is no device."""

    def release_memory(self) -> None:
        """Do nothing: there is no device."""

    def step(self, batch: StepBatch, ranks: "Ranks", before: Sequence[StepBatch] = ()) -> dict[str, float]:
        """Fold the batches of all ranks into the digest; return made-up measurements."""
        self._before_step(batch)
        time.sleep(self._step_seconds)
        parts = []
        for each in (*before, batch):
            content = hashlib.sha256()
            for array in (each.ordinals, each.token_ids, each.logprobs, each.advantages):
                content.update(array.tobytes())
            # behind the digest 1 byte, 1 if an advantage is not 0, and 8 bytes, the number of tokens
            num_tokens = int(each.loss_mask.sum()).to_bytes(8, "little")
            parts.append(content.digest() + bytes([bool(each.advantages.any())]) + num_tokens)
        *others, own = parts
        point("trainer.gradients")
        parts = [*others, *ranks.exchange(own)[:: self._ranks_per_row]]
        self.digest = hashlib.sha256(self.digest.encode() + b"".join(parts)).hexdigest()
        return {
            "loss": 0.0,
            "grad_norm": float(any(part[-9] for part in parts)),
            "learning_rate": 0.0,
            "mismatch_kl": 0.0,
            "mismatch_max": 0.0,
            "masked_fraction": 0.0,
            "entropy": 0.0,
            "tokens": float(sum(int.from_bytes(part[-8:], "little") for part in parts)),
        }

    def weights(self) -> Weights:
        """Return the digest as a tensor of bytes."""
        import torch

        # empty before the first step
        return Weights("full", {"digest": torch.tensor(list(self.digest.encode() or b"0"), dtype=torch.uint8)})

    def snapshot(self) -> Snapshot:
        """Return the digest as JSON."""
        return Snapshot(texts={"trainer/fake.json": json.dumps(self.digest).encode()})

    def restore(self, folder: Path) -> None:
        """Restore the digest from a snapshot."""
        self.digest = json.loads((folder / "trainer" / "fake.json").read_text(encoding="utf-8"))

    def join(self, ranks: "Ranks", shall_wait: Callable[[], object]) -> None:
        """Do nothing: each rank has the whole digest."""

    def serve_gathers(self) -> None:
        """Do nothing: no shards are lent."""

    def release_ranks(self) -> None:
        """Do nothing: no rank assists."""
