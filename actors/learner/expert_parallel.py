"""Expert parallelism: each rank has some of a layer's experts, whole, and tokens travel to the experts they chose.

The e ranks of a group have different tokens. A layer of experts exchanges hidden states twice (all-to-all), by
transformers' own plan and code: each chosen pair of token and expert is sent to the expert's rank, computed there, and
sent back. The gradient of an expert is complete on its rank, but for the other groups of ranks.
"""

from typing import Any

from torch import nn

from actors.models import loading, plans
from actors.models.plans import DISPATCHED, EXPERTS
from schemas.errors import ConfigError

KEY = "trainer.expert_parallel"


def check(model: Any, size: int) -> None:
    """Check that ranks can divide the experts of a model.

    Args:
        model: model with the whole weights.
        size: number of ranks.

    Raises:
        ConfigError: transformers is too old, or has no such plan for the model; the experts do not divide, or have
            adapters.
    """
    _styles()
    named = {module for module, style in plans.styles(model, "ep_plan").items() if style == DISPATCHED}
    layers = [block.experts for layer in loading.layers_of(model) for block in plans.blocks_in(layer)]
    if not layers or not named.issuperset(layers):
        name = type(plans.base_of(model)).__name__
        raise ConfigError(f"{KEY}: transformers has no plan that sends tokens to the experts of {name}; set 1")
    for experts in layers:
        if any("lora_" in name for name, _ in experts.named_parameters()):
            raise ConfigError(f"{KEY}: experts with adapters are not divided; leave them out of model.lora")
        for parameter in experts.parameters():
            if parameter.shape[0] % size:
                raise ConfigError(
                    f"{KEY}: {size} ranks can't divide the {parameter.shape[0]} experts of a layer; set a divisor"
                )


def spread(experts: nn.Module, mesh: Any) -> None:
    """Keep this rank's experts of a layer, in place, and send tokens to those of other ranks.

    Args:
        experts: the module with a layer's experts, not sharded yet.
        mesh: the ranks of a group as a DeviceMesh of one dimension.
    """
    styles = _styles()
    for name, _ in list(experts.named_parameters(recurse=False)):
        styles[EXPERTS].shard_param(experts, name, mesh)
    styles[DISPATCHED].install_forward(experts, ep_mesh=mesh, tp_mesh=None)


def _styles() -> Any:
    """Return transformers' styles of division, by name.

    Raises:
        ConfigError: transformers is too old.
    """
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        raise ConfigError(f"{KEY}: needs a newer transformers, which sends tokens to experts; install 5.19") from None
    if DISPATCHED not in ALL_PARALLEL_STYLES:
        raise ConfigError(f"{KEY}: needs a newer transformers, which sends tokens to experts; install 5.19")
    return ALL_PARALLEL_STYLES
