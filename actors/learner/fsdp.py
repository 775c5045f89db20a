"""Parallelism with a part of every weight, gradient and optimizer state per rank (torch's FSDP2).

All ranks map the model's files, meet, and keep a part each on their devices. A layer is gathered while the layer runs,
and gradients are summed in the backward pass. From then on each forward, backward, norm and gather is a collective, so
all ranks must do equally many of each: a rank with fewer micro-batches computes made-up ones. For publishing and
saving, the other ranks help rank 0 to gather one tensor at a time (`serve`).
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from actors.learner import expert_parallel, tensor_parallel
from actors.learner.collective_watch import CollectiveWatch
from actors.learner.parallelism import Gathers
from actors.learner.ranks import SINGLE_RANK, GlooRanks, Ranks
from actors.learner.row_group import RowGroup
from actors.learner.shards import part
from actors.models import loading, plans
from actors.models.attention.row_ranks import RowRanks
from actors.models.vision.parts import vision_part
from schemas.config.model import ModelConfig
from schemas.config.trainer import TrainerConfig

log = structlog.get_logger("learner")

NOTHING = b""
"""Request of rank 0 that ends the service of the other ranks, and the value that these ranks exchange for it."""


@dataclass(frozen=True)
class Meshes:
    """The ranks as torch's DeviceMeshes."""

    ranks: Any
    """All ranks, in a line."""
    tensor: Any = None
    """Ranks with the same parts of weights ("data") × ranks that compute a row together ("tensor"). None: weights are
    not cut."""
    experts: Any = None
    """Ranks with the same experts ("copies") × ranks with different ones ("experts"). None: experts are not
    divided."""


class FullySharded:
    """All trained and frozen weights of the policy spread over the ranks. Reference and teacher stay whole.

    Args:
        rank: rank of this process; also selects the GPU if torchrun has not set LOCAL_RANK.
        trainer: configuration of the ranks.
    """

    sharded = True

    def __init__(self, rank: int, trainer: TrainerConfig) -> None:
        self._trainer = trainer
        self.row_ranks: RowRanks | None = None
        self._row_group: RowGroup | None = None
        if torch.cuda.is_available():
            # before the model is loaded, so that each rank uses its own GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        self._ranks: Ranks = SINGLE_RANK
        self._watch = CollectiveWatch(lambda: None)

    @property
    def policy_row_ranks(self) -> RowRanks | None:
        """Return the ranks of a row; with `tensor_parallel`, each has the weights of its own heads."""
        if self._row_group is None or self._trainer.tensor_parallel == 1:
            return self._row_group
        return self._row_group.with_own_heads()

    def loaded_as(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration for host memory: the whole model may not fit on a GPU."""
        return model.model_copy(update={"device": "cpu"})

    def join(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks,
        shall_wait: Callable[[], object],
    ) -> None:
        """Keep this rank's part of the weights, together with all ranks; waits for late ranks."""
        assert isinstance(ranks, GlooRanks)
        # over gloo the exit of the process is enough
        self._ranks = ranks
        self._watch = CollectiveWatch(shall_wait, ranks.abort if device.type == "cuda" else None)
        trainer = self._trainer
        check_plans(model, trainer)
        with self._watch.watching():
            line = ranks.mesh(device)
        if trainer.ranks_per_row > 1:
            self.row_ranks = self._row_group = ranks.row_group(device, trainer.ranks_per_row)
        with self._watch.watching():
            meshes = Meshes(
                line,
                tensor=_grid(ranks, device, trainer.tensor_parallel, ("data", "tensor")),
                experts=_grid(ranks, device, trainer.expert_parallel, ("copies", "experts")),
            )
            shard(model, meshes, device, dtype, self.policy_row_ranks)
        log.info("weights shared out", parameters=sum(part(p).numel() for p in model.parameters()))

    def watched(self) -> AbstractContextManager[None]:
        """Return the context of the watch over collectives."""
        return self._watch.watching()

    def sum_gradients(self, ranks: Ranks, gradients: Sequence[Tensor]) -> None:
        """Do nothing: gradients are summed layer by layer in the backward pass."""

    def agree(self, good: bool) -> bool:
        """Return whether the result is good on all ranks: forwards are shared, so all ranks repeat or none."""
        return all(said == b"good" for said in self._ranks.exchange(b"good" if good else b""))

    @contextmanager
    def gathering(self, request: bytes) -> Iterator[None]:
        """Tell the other ranks what rank 0 gathers, then watch."""
        self._ranks.exchange(request)
        with self._watch.watching():
            yield

    def serve(self, gathers: Gathers) -> None:
        """Take part in each gather that rank 0 asks for. What is gathered here is dropped."""
        while (request := self._ranks.exchange(NOTHING)[0]) != NOTHING:
            with self._watch.watching():
                gathers[request]()

    def release(self) -> None:
        """End `serve` of the other ranks."""
        self._ranks.exchange(NOTHING)


def check_plans(model: nn.Module, trainer: TrainerConfig) -> None:
    """Check that ranks can divide a model's weights and experts as configured.

    Args:
        model: model with the whole weights, with its adapter if it has one; values are not read.
        trainer: configuration of the ranks.

    Raises:
        ConfigError: transformers has no plan for the model, or sizes do not divide.
    """
    if trainer.tensor_parallel > 1:
        tensor_parallel.check(model, trainer.tensor_parallel)
    if trainer.expert_parallel > 1:
        expert_parallel.check(model, trainer.expert_parallel)


def _grid(ranks: GlooRanks, device: torch.device, columns: int, names: tuple[str, str]) -> Any:
    return ranks.grid(device, columns, names) if columns > 1 else None


def shard(
    model: nn.Module, meshes: Meshes, device: torch.device, dtype: torch.dtype, row_ranks: RowRanks | None = None
) -> None:
    """Spread the parameters over the ranks, in place: each decoder layer, then everything else together.

    Before that, weights of attention and MLP are cut among `row_ranks`, and experts divided, where the meshes say so.

    A vision tower stays whole on each rank, in `dtype`: it is frozen, since the configuration refuses to train
    it with shards, and runs apart from the model's forward.

    Trained parameters become float32 masters: they are rounded to `dtype` when they are gathered. The gradients of a
    micro-batch are computed in `dtype`, but summed over ranks and micro-batches in float32. Gradients are summed over
    ranks, not averaged, as the loss of a rank is a share of the loss of all.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # the returned view is never changed in place: `TokenLogprobs` has its values by then
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # inputs are token ids, and layers pass their dtype on, so nothing is left to cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    tower = vision_part(model)
    whole = set(tower.to(device, dtype).parameters()) if tower is not None else None
    wrap = partial(_wrap, policy, whole)
    styles = plans.styles(model, "tp_plan")
    sharded: list[Any] = []
    # a layer at a time, since all of it is on the device before the rank keeps a part
    for layer in loading.layers_of(model):
        experts: list[nn.Module] = []
        if meshes.experts is not None or meshes.tensor is not None:
            experts = [block.experts for block in plans.blocks_in(layer)]
        for module in experts:
            if meshes.experts is not None:
                expert_parallel.spread(module, meshes.experts["experts"])
            # experts that are not divided are the larger part of a layer, and must not lie on each rank of a row
            wrap(module, meshes.ranks if meshes.experts is None else meshes.experts["copies"])
        if meshes.tensor is None:
            sharded.append(wrap(layer, meshes.ranks))
            continue
        assert row_ranks is not None
        tensor_parallel.cut(model, layer, styles, meshes.tensor["tensor"], row_ranks, apart=experts)
        sharded.append(wrap(layer, meshes.tensor["data"]))
    # embeddings and output layer are needed again as soon as the backward pass begins
    root = wrap(model, meshes.ranks, reshard=False)
    for before, after in pairwise([root, *sharded]):
        # the next layer is gathered while this one is computed
        before.set_modules_to_forward_prefetch([after])


def _wrap(policy: Any, whole: set[nn.Parameter] | None, module: nn.Module, mesh: Any, *, reshard: bool = True) -> Any:
    """Spread a module's parameters over the ranks of a mesh, without those of inner modules that are spread already."""
    from torch.distributed.fsdp import fully_shard

    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            # a layer at a time, and the rank keeps a part of it: the whole model in float32 is never there
            parameter.data = parameter.data.float()
    sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=whole)
    sharded.set_gradient_divide_factor(1.0)  # by default torch divides by the number of ranks
    # plain sums: for another factor torch takes NCCL's PREMUL_SUM, which gloo does not have
    sharded.set_force_sum_reduction_for_comms(True)
    return sharded
