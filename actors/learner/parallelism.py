"""Parallelism: how the ranks of a gang divide a model among them, behind one interface for the learner.

                          weights and optimizer   gradients are summed                    publishing and saving
    single process        whole                   not at all                              by itself
    data parallel         whole on each rank      after the backward passes, rank order   by rank 0, alone
    fully sharded (fsdp)  a part on each rank     in the backward passes, by layer        by rank 0, with parts of all

`DataParallel` is the first two rows: with the ranks `SINGLE_RANK` nothing is summed. `FullySharded` is the third.
With either, neighbouring ranks may compute their rows together (`actors.models.attention.row_ranks`). With the third,
they may also divide the computation of weights: attention and MLP by features (`tensor_parallel`), or experts
(`expert_parallel`).
Tensors know themselves if they are spread over ranks, so copies, norms and gathers of single tensors are in
`actors.learner.shards`, for all kinds alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from actors.learner.collective_watch import CollectiveWatch
from actors.learner.devices import gpu_name
from actors.learner.ranks import GlooRanks, Ranks
from actors.models.attention.row_ranks import RowRanks
from schemas.config.model import ModelConfig

Gathers = Mapping[bytes, Callable[[], object]]
"""Work of a rank that lends its parts, by request of rank 0."""


class Parallelism(Protocol):
    """Interface of the learner to the division of model and work."""

    sharded: bool
    """True if each rank holds a part of every weight. Then each forward and backward is a collective, which all ranks
    run equally often, and `join` replaces the model's parameters."""
    row_ranks: RowRanks | None
    """Ranks that compute rows together with this one, known after `join`; None: rows are whole."""

    @property
    def policy_row_ranks(self) -> RowRanks | None:
        """The same ranks, as they compute the policy: with `tensor_parallel` its weights are cut among them."""
        ...

    def loaded_as(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration with which a rank loads and restores the policy."""
        ...

    def join(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks,
        shall_wait: Callable[[], object],
    ) -> None:
        """Join the other ranks; if sharded, keep this rank's part of the model, in place.

        Args:
            model: the policy, as loaded or restored.
            device: device of computation.
            dtype: precision of computation.
            ranks: this rank's access to all ranks.
            shall_wait: called in a thread during waits for other ranks; raises when the gang shall not wait any more.
        """
        ...

    def watched(self) -> AbstractContextManager[None]:
        """Return a context for work that contains collectives, in which a lost rank raises RanksBrokenError."""
        ...

    def sum_gradients(self, ranks: Ranks, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by the sum over all ranks, in place, if the backward passes have not done so."""
        ...

    def agree(self, good: bool) -> bool:
        """Return whether the result is good on all ranks that must repeat a computation together."""
        ...

    def gathering(self, request: bytes) -> AbstractContextManager[None]:
        """Return a context in which rank 0 gathers weights or state, with parts that the other ranks lend.

        Args:
            request: key of the other ranks' work in `serve`.
        """
        ...

    def serve(self, gathers: Gathers) -> None:
        """Take part in rank 0's gathers until rank 0 calls `release`. For other ranks than 0."""
        ...

    def release(self) -> None:
        """End `serve` of the other ranks. For rank 0."""
        ...


class DataParallel:
    """Whole weights on each rank, or in a single process. Sums have the same bits on each rank (`Ranks.sum`).

    Args:
        context_parallel: number of neighbouring ranks that compute rows together.
    """

    sharded = False

    def __init__(self, context_parallel: int = 1) -> None:
        self._context_parallel = context_parallel
        self.row_ranks: RowRanks | None = None
        self._watch: CollectiveWatch | None = None

    @property
    def policy_row_ranks(self) -> RowRanks | None:
        """Return the same ranks: weights are whole."""
        return self.row_ranks

    def loaded_as(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration unchanged."""
        return model

    def join(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks,
        shall_wait: Callable[[], object],
    ) -> None:
        """Let the ranks sum gradients where they are computed. There are no parts to keep."""
        ranks.sum_on(device, gpu_name(device))
        if isinstance(ranks, GlooRanks) and self._context_parallel > 1:
            self.row_ranks = ranks.row_group(device, self._context_parallel)
            self._watch = CollectiveWatch(shall_wait, ranks.abort if device.type == "cuda" else None)

    def watched(self) -> AbstractContextManager[None]:
        """Return the watch over the exchanges of divided rows; if rows are whole, `Ranks` checks by itself."""
        return self._watch.watching() if self._watch is not None else nullcontext()

    def sum_gradients(self, ranks: Ranks, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by the sum over all ranks."""
        ranks.sum(gradients)

    def agree(self, good: bool) -> bool:
        """Return whether the result is good on the ranks that compute rows together; other ranks repeat their own."""
        if self.row_ranks is None:
            return good
        return bool(self.row_ranks.all_to_all(torch.full((self.row_ranks.size, 1), good)).all())

    def gathering(self, request: bytes) -> AbstractContextManager[None]:
        """Return an empty context: rank 0 has everything."""
        return nullcontext()

    def serve(self, gathers: Gathers) -> None:
        """Do nothing: rank 0 gathers nothing."""

    def release(self) -> None:
        """Do nothing: no rank serves."""
