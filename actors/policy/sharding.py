"""A learner that has a part of every weight, gradient and optimizer state (FSDP2), and gathers a layer while it runs.

All ranks load the model into their host's memory, restore it there, meet, and keep their parts on their devices. From
then on each forward, backward, norm and gather is a collective, so all ranks do as many of each: who has fewer
micro-batches with samples computes one of two made-up tokens for nothing. What rank 0 publishes and saves it asks the
others for, one tensor at a time (`assist`).

A collective waits inside torch. A rank that is gone ends it with an error; one that has stopped does not, so a thread
looks beside it whether the gang shall still wait.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn

from actors.algorithms.entropy import EntropyControl
from actors.policy import formats, loading
from actors.policy.attention import pack_row
from actors.policy.frozen import FixedLogprobs
from actors.policy.learner import TorchLearner
from actors.policy.micro_batches import filled, micro_batch
from actors.policy.optimizer import make_optimizer
from actors.policy.ranks import ALONE, GlooRanks, Ranks, RanksBrokenError
from actors.policy.shards import part
from actors.policy.snapshots import (
    Snapshot,
    control_snapshot,
    optimizer_snapshot,
    restore_optimizer,
    restored_control,
)
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.messages import StepBatch

log = structlog.get_logger("learner")

WATCH_SECONDS = 0.1
WEIGHTS, SNAPSHOT, NOTHING = b"weights", b"snapshot", b""
"""What rank 0 asks the others to assist in."""


class ShardedLearner(TorchLearner):
    """Full fine-tuning or LoRA, with all that is trained or frozen in the policy spread over the ranks.

    Args:
        config: of the run.
        rank: of this process; names its GPU where torchrun does not.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        super().__init__(config)
        self._folder: Path | None = None
        self._ranks: Ranks = ALONE
        self._watch = CollectiveWatch(lambda: None)

    def restore(self, folder: Path) -> None:
        """The weights, as long as they are whole; the optimizer follows when it has its parameters."""
        formats.restore(self.model, self._loaded_as(self._config.model), folder)
        self._entropy_control = restored_control(folder, EntropyControl(self._config.trainer.entropy_coef))
        self._folder = folder

    def enter(self, ranks: Ranks, shall_wait: Callable[[], object]) -> None:
        """Keep this rank's part; whoever comes late is waited for as `ranks` waits."""
        assert isinstance(ranks, GlooRanks)
        self._ranks, self._watch = ranks, CollectiveWatch(shall_wait)
        with self._watch.beside():
            shard(self.model, ranks.mesh(self._device))
            self._trainable = [p for p in self.model.parameters() if p.requires_grad]
            self._optimizer = make_optimizer(self.model, self._config.trainer)
            if self._folder is not None:
                restore_optimizer(self._folder, self._optimizer)
        log.info("weights shared out", parameters=sum(part(p).numel() for p in self.model.parameters()))

    def step(self, batch: StepBatch, ranks: Ranks = ALONE, before: Any = ()) -> dict[str, float]:
        """As `TorchLearner`, together with the ranks that this one has entered with.

        Raises:
            RanksBrokenError: another rank is gone.
        """
        with self._watch.beside():
            return super().step(batch, ranks, before)

    # --- publish and save ----------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Gathered by all ranks; on rank 0."""
        self._ranks.exchange(WEIGHTS)
        return self._gathered_weights(keep=True)

    def snapshot(self) -> Snapshot:
        """Gathered by all ranks; on rank 0. It fits any number of them, and one that shards nothing."""
        self._ranks.exchange(SNAPSHOT)
        return self._gathered_snapshot(keep=True)

    def assist(self) -> None:
        """Until rank 0 asks for nothing more."""
        while (asked := self._ranks.exchange(NOTHING)[0]) != NOTHING:
            if asked == WEIGHTS:
                self._gathered_weights(keep=False)
            else:
                self._gathered_snapshot(keep=False)

    def dismiss(self) -> None:
        """Let the other ranks go on."""
        self._ranks.exchange(NOTHING)

    def _gathered_weights(self, keep: bool) -> Weights:
        with self._watch.beside():
            return formats.weights(self.model, self._config.model, keep)

    def _gathered_snapshot(self, keep: bool) -> Snapshot:
        with self._watch.beside():
            model = formats.snapshot(self.model, self._config.model, keep)
            optimizer = optimizer_snapshot(self._optimizer, keep)
        return model.with_files(optimizer).with_files(control_snapshot(self._entropy_control))

    # --- what shards change in a step ----------------------------------------------------------------------------

    def _loaded_as(self, model: ModelConfig) -> ModelConfig:
        return model.model_copy(update={"device": "cpu"})

    def _fixed(self, batch: StepBatch, with_old: bool) -> Mapping[int, FixedLogprobs]:
        """On all ranks once again where they are not finite on one."""
        forwards = self._frozen.num_forwards(with_old)
        for _ in range(2):
            found = {
                number: self._frozen.of(micro_batch(batch, number, self._device), with_old)
                for number in filled(batch)
                if forwards or self._frozen.asked(with_old)
            }
            for _ in range(forwards * (batch.num_micro_batches - len(filled(batch)))):
                self._compute_nothing(gradient=False)
            finite = all(logprobs.finite for logprobs in found.values())
            if all(said == b"finite" for said in self._ranks.exchange(b"finite" if finite else b"")):
                break
            log.warning("logprobs computed again", step=batch.step)
        return found

    def _keep_pace(self, batch: StepBatch, minibatch: int) -> None:
        first, end = batch.minibatch_offsets[minibatch : minibatch + 2].tolist()
        for _ in range(end - first - len(filled(batch, minibatch))):
            self._compute_nothing(gradient=True)

    def _compute_nothing(self, gradient: bool) -> None:
        row = pack_row(np.zeros(2, np.int32), np.array([0, 2]), np.array([1]), [0], self._device)
        zeros_T, ones_T = torch.zeros(1, dtype=torch.long, device=self._device), torch.ones(1, device=self._device)
        with torch.set_grad_enabled(gradient), self._autocast():
            logprobs_T, _ = self._chosen.of(row, zeros_T, ones_T)
        if gradient:
            (logprobs_T.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _sum(self, ranks: Ranks, gradients: Any) -> None:
        """Done layer by layer in the backward pass."""


class CollectiveWatch:
    """A thread that looks, while its owner is inside a collective, whether that shall still be waited for.

    Args:
        shall_wait: raises when not. The error ends the process, since nothing else ends the collective: see
            `actors.runtime`, which knows the thread by its name.
    """

    def __init__(self, shall_wait: Callable[[], object]) -> None:
        self._shall_wait = shall_wait
        self._inside = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While the block runs.

        Raises:
            RanksBrokenError: a collective in it has failed.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
            self._thread.start()
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_collective(error):
                raise
            raise RanksBrokenError(f"a collective has failed: {error}") from error
        finally:
            self._inside = False

    def _run(self) -> None:
        while True:
            if self._inside:
                self._shall_wait()
            time.sleep(WATCH_SECONDS)


def shard(model: nn.Module, mesh: Any) -> None:
    """Spread the parameters of each decoder layer, and of all else together, over the ranks of a mesh, in place.

    Gradients are summed, as the loss is a share of that of all ranks, and they are summed in float32 where they are.
    """
    from torch.distributed.fsdp import fully_shard

    # what the model returns is a view that nobody changes: `ChosenLogprobs` has what it wants by then
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*loading.layers_of(model), model):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Gloo has no type of its own for it; a rank that is gone shows in the words of its transport."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
