"""Router replay: the trainer's routers take the experts that the engine's routers chose (R3, arXiv:2510.11370).

Engine and trainer round otherwise, so where two experts are about equal they may choose different ones, and a token's
logprob differs by far more than rounding. Here the choice is the engine's, and the weights of the chosen experts are
the trainer's own, with their gradient.

Routers differ by architecture, but each chooses by one `topk` over all experts. A layer's experts are the children of
the module that runs router and experts, and while this module runs, that call is answered with the given experts, or
its result is recorded (the embedded engine).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actors.models import loading, plans
from actors.models.attention.row_ranks import own_part
from actors.models.attention.rows import PackedRow
from schemas import routed
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import StepBatch
from schemas.routed import UNKNOWN, Experts, narrow

KEY = "trainer.router_replay"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "top_k", "moe_k", "moe_topk", "top_k_experts", "num_selected_experts")
"""Names in config.json of the experts of a layer, and of those that a token takes."""


class Routing:
    """Sizes of a model's routing.

    Args:
        model: model of transformers, with or without an adapter.

    Raises:
        ConfigError: the model has no experts, or config.json does not tell how many.
    """

    def __init__(self, model: Any) -> None:
        config = plans.base_of(model).config.get_text_config()
        self.layers = loading.layers_of(model)
        self.blocks: list[Any] = [next(iter(plans.blocks_in(layer)), None) for layer in self.layers]
        """Module with router and experts of each layer; None: a dense layer."""
        self.num_experts, self.num_chosen = (_first_of(config, names) for names in (COUNTS, CHOSEN))
        if not any(self.blocks) or not self.num_experts or not self.num_chosen:
            raise ConfigError(
                f"{KEY}: {type(plans.base_of(model)).__name__} has no layers with experts whose choice can be replayed"
            )


class _Choice(TorchFunctionMode):
    """The call that chooses experts, answered or recorded.

    Args:
        routing: sizes of the routing.
        given_TK: experts of each token, UNKNOWN: the model's own choice; None: all are its own.
    """

    def __init__(self, routing: Routing, given_TK: Tensor | None) -> None:
        super().__init__()
        self._routing, self._given_TK = routing, given_TK
        self.made: list[Tensor] = []
        """What each such call has returned: one, if all is well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; of a choice, return the given experts."""
        named = kwargs or {}
        found = func(*args, **named)
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, chosen = args[0] if args else named["input"], found[1]
        shape = (scores.ndim, scores.shape[-1], chosen.shape[-1])
        if shape != (2, self._routing.num_experts, self._routing.num_chosen):
            return found  # a choice of groups of experts, in front of it
        if self._given_TK is not None:
            given = self._given_TK.to(chosen.dtype).view(chosen.shape)
            chosen = torch.where(given == UNKNOWN, chosen, given)
        self.made.append(chosen)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def check(batch: StepBatch, routing: Routing) -> None:
    """Check that a batch's experts are experts of the model: on a GPU a wrong index would end the process.

    Raises:
        RunFailedError: they are not.
    """
    if not batch.routed_experts:
        return
    _, num_layers, num_chosen = batch.expert_layout
    if (num_layers, num_chosen) != (len(routing.layers), routing.num_chosen):
        raise RunFailedError(
            f"{KEY}: the engine tells {num_chosen} experts in {num_layers} layers, and the model chooses "
            f"{routing.num_chosen} in {len(routing.layers)}; do engine and trainer have the same model?"
        )
    least, most = routed.bounds(batch.routed_experts, batch.expert_layout)
    if least < UNKNOWN or most >= routing.num_experts:
        raise RunFailedError(
            f"{KEY}: the engine tells experts {least} to {most}, and layers of the model have {routing.num_experts}; "
            "do engine and trainer have the same model?"
        )


def install(model: Any) -> Routing:
    """Let the routers of a model choose what rows say (`PackedRow.experts_RLK`); without it, they choose themselves.

    Experts are checked before, by `check`.

    Layers that are computed again in a backward pass choose the same, since they get the same row.

    Raises:
        ConfigError: the model's choice can't be replayed.
    """
    routing = Routing(model)
    for number, (layer, block) in enumerate(zip(routing.layers, routing.blocks, strict=True)):
        if block is not None:
            _replay_in(layer, block, routing, number)
    return routing


@contextmanager
def recording(routing: Routing, into: list[Experts]) -> Iterator[None]:
    """Append the experts (tokens, layers, experts per token) of one forward pass of the model to a list."""
    running = [
        (number, block, _Choice(routing, None)) for number, block in enumerate(routing.blocks) if block is not None
    ]
    for _, block, mode in running:
        block.forward = _under(mode, block.forward)
    try:
        yield
    finally:
        for _, block, _ in running:
            del block.forward
    for number, _, mode in running:
        _check_one(mode, number)
    num_tokens = len(running[0][2].made[0])
    found = np.full((num_tokens, len(routing.layers), routing.num_chosen), UNKNOWN, np.int16)
    for number, _, mode in running:
        found[:, number] = mode.made[0].to("cpu", torch.int16).numpy()
    into.append(narrow(found))


def _replay_in(layer: Any, block: Any, routing: Routing, number: int) -> None:
    of_block = block.forward
    rows: list[PackedRow] = []
    """The row of the layer's forward pass that is under way."""

    def with_experts(*given: Any, **named: Any) -> Any:
        given_TK = _experts_of(rows[-1], routing, number)
        if given_TK is None:
            return of_block(*given, **named)
        mode = _Choice(routing, given_TK)
        found = _under(mode, of_block)(*given, **named)
        _check_one(mode, number)
        return found

    block.forward = with_experts
    # read behind it: a layer may run router and experts itself
    of_layer = layer.forward

    def with_row(*given: Any, packed_row: PackedRow, **named: Any) -> Any:
        rows.append(packed_row)
        try:
            return of_layer(*given, packed_row=packed_row, **named)
        finally:
            rows.pop()

    layer.forward = with_row


def _experts_of(row: PackedRow, routing: Routing, layer: int) -> Tensor | None:
    """Return the experts of the tokens that this rank has in a layer; None if the row has none."""
    if row.experts_RLK is None:
        return None
    experts_RK = row.experts_RLK[:, layer]
    return experts_RK if row.ranks is None else own_part(experts_RK, row.ranks)


def _under(mode: _Choice, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        with mode:
            return forward(*given, **named)

    return run


def _check_one(mode: _Choice, layer: int) -> None:
    if len(mode.made) != 1:
        raise RunFailedError(
            f"{KEY}: the router of layer {layer} chose experts {len(mode.made)} times, not once, so its choice can't "
            "be told; set trainer.router_replay: false"
        )


def _first_of(config: Any, names: tuple[str, ...]) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)
