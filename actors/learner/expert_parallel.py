"""Expert parallelism: each rank has some of a layer's experts, whole, and tokens travel to the experts they chose.

The e ranks of a group have different tokens. A layer of experts exchanges hidden states twice (all-to-all), by
transformers' own plan and code: each chosen pair of token and expert is sent to the expert's rank, computed there, and
sent back. The gradient of an expert is complete on its rank, but for the other groups of ranks.
"""

from typing import Any

from torch import nn

from actors.models import plans
from actors.models.plans import DISPATCHED, EXPERTS
from schemas.errors import ConfigError

KEY = "trainer.expert_parallel"


def spread(model: Any, mesh: Any) -> list[nn.Module]:
    """Keep this rank's experts, in place; return the modules with the experts of each layer.

    Args:
        model: model with the whole weights, not sharded yet.
        mesh: the ranks of a group as a DeviceMesh of one dimension.

    Raises:
        ConfigError: transformers is too old, or has no such plan for the model; the experts do not divide, or have
            adapters.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_expert_parallelism
    except ImportError:
        raise ConfigError(f"{KEY}: needs a newer transformers, which sends tokens to experts; install 5.19") from None
    base = plans.base_of(model)
    plan = {name: style for name, style in base.ep_plan.items() if style in {DISPATCHED, EXPERTS}}
    layers = [module for module, style in plans.styles(model, "ep_plan").items() if style == DISPATCHED]
    if not layers:
        raise ConfigError(
            f"{KEY}: transformers has no plan that sends tokens to the experts of {type(base).__name__}; set 1"
        )
    for experts in layers:
        if any("lora_" in name for name, _ in experts.named_parameters()):
            raise ConfigError(f"{KEY}: experts with adapters are not divided; leave them out of model.lora")
        for parameter in experts.parameters():
            if parameter.shape[0] % mesh.size():
                raise ConfigError(
                    f"{KEY}: {mesh.size()} ranks can't divide the {parameter.shape[0]} experts of a layer; set a "
                    "divisor"
                )
    apply_expert_parallelism(base, mesh, None, plan)
    return layers
