"""Tensor parallelism: each rank has a part of the weights of attention and MLP (Megatron, arXiv:1909.08053).

Which weights are cut, and along which dimension, is transformers' plan of the architecture (`base_model_tp_plan`). The
t ranks compute each row together. Between the cut modules a rank has R / t neighbouring tokens of the row, as with
context parallelism (Megatron's sequence parallelism, arXiv:2205.05198):

    norms, residuals, experts      R / t tokens  ─▶  gathered  ─▶  R tokens
    colwise  (q, k, v, gate, up)   output features / t, of all R tokens: 1 / t of the heads
    rowwise  (o, down)             input features / t: a summand of the output of all R tokens
    norms, residuals, experts      R / t tokens  ◀─  summed    ◀─  R tokens

An adapter is cut with its layer: B of a colwise one, A of a rowwise one. What is not cut is on each rank, and each rank
computes a summand of its gradient. All weights of a layer become torch's DTensors, so that sharding, the optimizer and
checkpoints treat them alike; during the layer's forward they are this rank's plain tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from actors.models import loading, plans
from actors.models.attention.row_ranks import RowRanks, gathered_rows, summed_part
from actors.models.plans import COLWISE, ROWWISE
from schemas.errors import ConfigError

KEY = "trainer.tensor_parallel"


def check(model: Any, size: int) -> None:
    """Check that ranks can cut each layer of a model.

    Args:
        model: model with the whole weights, with its adapter if it has one; values are not read.
        size: number of ranks.

    Raises:
        ConfigError: transformers has no plan for the model's attention, or its sizes do not divide.
    """
    styles = plans.styles(model, "tp_plan")
    for layer in loading.layers_of(model):
        modules = _modules_without(layer, [block.experts for block in plans.blocks_in(layer)])
        for module, style in _cut_modules(model, modules, styles).items():
            _placements(module, style, size)


def cut(
    model: Any,
    layer: nn.Module,
    styles: Mapping[nn.Module, str],
    mesh: Any,
    ranks: RowRanks,
    apart: Sequence[nn.Module] = (),
) -> None:
    """Keep this rank's part of a layer's weights, in place, for rows that the ranks compute together.

    Args:
        model: model of the layer, for errors.
        layer: layer with the whole weights, with its adapter if it has one; not sharded yet.
        styles: style of each module that the model's plan names.
        mesh: the ranks as a DeviceMesh of one dimension.
        ranks: the same ranks.
        apart: modules inside the layer that are divided otherwise.

    Raises:
        ConfigError: transformers has no plan for the model's attention, or its sizes do not divide.
    """
    modules = _modules_without(layer, apart)
    cut_modules = _cut_modules(model, modules, styles)
    placed: dict[int, Placement] = {}
    for module, style in cut_modules.items():
        placed |= _placements(module, style, mesh.size())
    for parent in modules:
        children = [cut_modules[child] for child in parent.children() if child in cut_modules]
        if COLWISE in children:
            _gather_input(parent, ranks)
    for module, style in cut_modules.items():
        if style == ROWWISE:
            _sum_output(module, ranks)
    for module in modules:
        _place(module, placed, mesh)
    _use_local_weights(layer, modules)


def _modules_without(layer: nn.Module, apart: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {module for each in apart for module in each.modules()}
    return [module for module in layer.modules() if module not in inner]


def _cut_modules(model: Any, modules: Sequence[nn.Module], styles: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the modules of a layer that are cut, with their style: all those of a parent, or none of them."""
    found: dict[nn.Module, str] = {}
    has_attention = False
    for parent in modules:
        linear = [child for child in parent.children() if isinstance(_base(child), nn.Linear)]
        own = {child: styles.get(child, "") for child in linear}
        is_cut = {COLWISE, ROWWISE} == set(own.values())
        if is_cut:
            found |= own
        # of a module with attention, each rank needs its own heads alone: the row's tokens are all there
        if hasattr(parent, "is_causal"):
            has_attention = True
            if not is_cut or _has_weights_of_heads(parent, linear):
                raise ConfigError(_no_plan(model, type(parent).__name__))
    if not has_attention:
        raise ConfigError(_no_plan(model, type(modules[0]).__name__))
    return found


def _has_weights_of_heads(attention: Any, linear: Sequence[nn.Module]) -> bool:
    """Return whether an attention has weights for each head (sinks, norms over heads), which no plan cuts."""
    own = [*attention.parameters(recurse=False)]
    own += [p for child in attention.children() if child not in linear for p in child.parameters()]
    head_size = getattr(attention, "head_dim", None)
    # a norm within a head has its size, and is the same for all heads
    return any(parameter.shape != (head_size,) for parameter in own)


def _no_plan(model: Any, module: str) -> str:
    return (
        f"{KEY}: transformers has no plan that cuts {module} of {type(plans.base_of(model)).__name__} by heads; use "
        "trainer.context_parallel in its place"
    )


def _base(module: Any) -> Any:
    """Return the layer under an adapter, or the layer itself."""
    return module.base_layer if hasattr(module, "base_layer") else module


def _placements(module: Any, style: str, size: int) -> dict[int, Placement]:
    """Return how a cut module's parameters lie on the ranks, by id; those that are not there are on each rank."""
    dim = 0 if style == COLWISE else 1
    base = _base(module)
    if base.weight.shape[dim] % size:
        raise ConfigError(
            f"{KEY}: {size} ranks can't divide the {base.weight.shape[dim]} features of a layer {type(base).__name__}; "
            "set a divisor"
        )
    placed: dict[int, Placement] = {id(base.weight): Shard(dim)}
    if style == COLWISE and base.bias is not None:
        placed[id(base.bias)] = Shard(0)
    if module is not base:
        if any(getattr(module, "use_dora", {}).values()):
            raise ConfigError(f"{KEY}: not with model.lora.dora, which needs norms of whole weights")
        part = module.lora_B if style == COLWISE else module.lora_A
        placed |= {id(one.weight): Shard(dim) for one in part.values()}
    return placed


def _gather_input(module: Any, ranks: RowRanks) -> None:
    """Give a module the hidden states of all tokens, from those of each rank's tokens."""
    forward = module.forward

    def of_all_tokens(*given: Any, **named: Any) -> Any:
        if given:
            given = (_in_two_axes(given[0], gathered_rows, ranks), *given[1:])
        else:
            named["hidden_states"] = _in_two_axes(named["hidden_states"], gathered_rows, ranks)
        return forward(*given, **named)

    module.forward = of_all_tokens


def _sum_output(module: Any, ranks: RowRanks) -> None:
    """Return from a module the outputs for this rank's tokens: sums over ranks."""
    forward, base = module.forward, _base(module)

    def of_own_tokens(x: Tensor) -> Tensor:
        with _bias_of_first(base, ranks):
            return _in_two_axes(forward(x), summed_part, ranks)

    module.forward = of_own_tokens


def _in_two_axes(x: Tensor, exchange: Callable[[Tensor, RowRanks], Tensor], ranks: RowRanks) -> Tensor:
    """Exchange the tokens of a tensor (…, tokens, features) whose other axes have the length 1."""
    return exchange(x.flatten(0, -2), ranks).reshape(*x.shape[:-2], -1, x.shape[-1])


@contextmanager
def _bias_of_first(linear: nn.Linear, ranks: RowRanks) -> Iterator[None]:
    """Add the bias on the first rank alone, since outputs are summed; elsewhere its gradient is 0."""
    bias: Any = linear.bias
    if bias is None or ranks.place == 0:
        yield
        return
    linear._parameters["bias"] = bias * 0
    try:
        yield
    finally:
        linear._parameters["bias"] = bias


def _place(module: nn.Module, placed: Mapping[int, Placement], mesh: Any) -> None:
    """Replace a module's parameters by this rank's parts of them."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placed.get(id(parameter), Replicate())
        # no broadcast (src_data_rank): each rank has the whole weight
        spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _use_local_weights(layer: Any, modules: Sequence[nn.Module]) -> None:
    """Let a layer compute with plain tensors: this rank's parts."""
    forward: Callable[..., Any] = layer.forward
    owners = [module for module in modules if next(module.parameters(recurse=False), None) is not None]

    def with_local_weights(*given: Any, **named: Any) -> Any:
        with _local_weights(owners):
            return forward(*given, **named)

    layer.forward = with_local_weights


@contextmanager
def _local_weights(modules: Sequence[nn.Module]) -> Iterator[None]:
    # of modules, not of the layer once: sharding puts other tensors in their place before each forward
    spread = [dict(module._parameters) for module in modules]
    try:
        for module, parameters in zip(modules, spread, strict=True):
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    module._parameters[name] = _local(parameter)
        yield
    finally:
        for module, parameters in zip(modules, spread, strict=True):
            module._parameters.update(parameters)


def _local(parameter: DTensor) -> Tensor:
    """Return this rank's part. The gradient of a weight that is on each rank is the sum of what the ranks compute."""
    (placement,) = parameter.placements
    local: Tensor = parameter.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])
    return local
