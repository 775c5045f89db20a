"""Learner with a part of every weight, gradient and optimizer state per rank (FSDP2); layers are gathered as they run.

All ranks load and restore the model in host memory, meet, and keep a part each on their devices. From then on each
forward, backward, norm and gather is a collective, so all ranks must do equally many of each: a rank with fewer
micro-batches computes made-up rows of two tokens. For publishing and saving, the other ranks help rank 0 to gather one
tensor at a time (`assist`).

A collective waits inside torch. A lost rank ends the wait with an error, but a rank that no longer responds does not.
So a thread checks in the background if the gang shall still wait.
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
from actors.algorithms.losses import CustomLoss
from actors.learner import formats
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import filled, micro_batch
from actors.learner.optimizer import make_optimizer
from actors.learner.ranks import ALONE, GlooRanks, Ranks, RanksBrokenError
from actors.learner.reference_models import FixedLogprobs
from actors.learner.shards import part
from actors.learner.snapshots import (
    Snapshot,
    control_snapshot,
    optimizer_snapshot,
    restore_optimizer,
    restored_control,
)
from actors.models import loading
from actors.models.attention import pack_row
from bus import threads
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.messages import StepBatch

log = structlog.get_logger("learner")

WATCH_SECONDS = 0.1
"""Seconds between two checks during a collective."""
WEIGHTS, SNAPSHOT, NOTHING = b"weights", b"snapshot", b""
"""Requests of rank 0 to the other ranks; NOTHING ends the assistance."""


class ShardedLearner(TorchLearner):
    """Learner for full fine-tuning or LoRA, with all trained and frozen weights of the policy spread over the ranks.

    Args:
        config: configuration of the run.
        rank: rank of this process; also selects the GPU if torchrun has not set LOCAL_RANK.
        custom_loss: function at `trainer.loss.path`, for a loss of type `custom`.
    """

    def __init__(self, config: RunConfig, rank: int, custom_loss: CustomLoss | None = None) -> None:
        if torch.cuda.is_available():
            # before the model is loaded, so that each rank uses its own GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        super().__init__(config, custom_loss)
        self._folder: Path | None = None
        self._ranks: Ranks = ALONE
        self._watch = CollectiveWatch(lambda: None)

    def restore(self, folder: Path) -> None:
        """Restore the weights while still whole.

        The optimizer's state follows in `enter`, when the sharded parameters exist.
        """
        formats.restore(self.model, self._loaded_as(self._config.model), folder)
        self._entropy_control = restored_control(folder, EntropyControl(self._config.trainer.entropy_coef))
        self._folder = folder

    def enter(self, ranks: Ranks, shall_wait: Callable[[], object]) -> None:
        """Keep this rank's part of the weights, together with all ranks; waits for late ranks."""
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
        """Train one step together with the ranks given to `enter`.

        Raises:
            RanksBrokenError: another rank is gone.
            FloatingPointError: gradients are not finite, twice.
            RunFailedError: trainer and engine differ by more than `trainer.mismatch.stop`.
        """
        with self._watch.beside():
            return super().step(batch, ranks, before)

    # --- publish and save ----------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Return all weights, gathered from all ranks. For rank 0."""
        self._ranks.exchange(WEIGHTS)
        return self._gathered_weights(keep=True)

    def snapshot(self) -> Snapshot:
        """Return the content of a checkpoint, gathered from all ranks.

        The content fits any number of ranks, also without shards.
        """
        self._ranks.exchange(SNAPSHOT)
        return self._gathered_snapshot(keep=True)

    def assist(self) -> None:
        """Help rank 0 to gather, until rank 0 asks for nothing more."""
        while (asked := self._ranks.exchange(NOTHING)[0]) != NOTHING:
            if asked == WEIGHTS:
                self._gathered_weights(keep=False)
            else:
                self._gathered_snapshot(keep=False)

    def dismiss(self) -> None:
        """Release the other ranks from `assist`."""
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
        return model.model_copy(update={"device": "cpu"})  # the whole model may not fit on a GPU

    def _fixed(self, batch: StepBatch, with_old: bool) -> Mapping[int, FixedLogprobs]:
        """Return the step's fixed logprobs.

        If logprobs are not finite on a rank, all ranks compute again, as forwards are shared.
        """
        forwards = self._frozen.num_forwards(with_old)
        for _ in range(2):  # a second time after an error of the machine
            found = {
                number: self._frozen.of(micro_batch(batch, number, self._device), with_old)
                for number in filled(batch)
                if forwards or self._frozen.asked(with_old)
            }
            # as many forwards as the other ranks
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
        # two tokens: a prompt of one, a completion of one
        row = pack_row(np.zeros(2, np.int32), np.array([0, 2]), np.array([1]), [0], self._device)
        zeros_T, ones_T = torch.zeros(1, dtype=torch.long, device=self._device), torch.ones(1, device=self._device)
        with torch.set_grad_enabled(gradient), self._autocast():
            logprobs_T, _ = self._chosen.of(row, zeros_T, ones_T)
        if gradient:
            # × 0: takes part in the collectives and changes nothing
            (logprobs_T.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _sum(self, ranks: Ranks, gradients: Any) -> None:
        """Do nothing: gradients are summed layer by layer in the backward pass."""


class CollectiveWatch:
    """Thread for checks during a collective if the gang shall still wait.

    Args:
        shall_wait: raises if not. The error stops the process, since nothing else ends the collective: see
            `bus.threads`.
    """

    def __init__(self, shall_wait: Callable[[], object]) -> None:
        self._shall_wait = shall_wait
        self._inside = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Watch while the block runs.

        Raises:
            RanksBrokenError: a collective in the block has failed.
        """
        if self._thread is None:
            self._thread = threads.start("ranks", self._run)
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
            threads.pass_by("trainer.ranks")
            if self._inside:
                self._shall_wait()
            time.sleep(WATCH_SECONDS)


def shard(model: nn.Module, mesh: Any) -> None:
    """Spread the parameters over the ranks of a mesh, in place: each decoder layer, then everything else together.

    Gradients are summed over ranks, not averaged, as the loss of a rank is a share of the loss of all.
    """
    from torch.distributed.fsdp import fully_shard

    # the returned view is never changed in place: `ChosenLogprobs` has its values by then
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*loading.layers_of(model), model):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)  # summed, not averaged
        sharded.set_force_sum_reduction_for_comms(True)


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Return whether an error comes from a collective.

    Gloo has no error type; a lost rank shows in the message of the transport.
    """
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
