"""Plans of transformers for dividing a model among ranks: the style of division of each module, by architecture."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

COLWISE, ROWWISE = "colwise", "rowwise"
"""Styles of linear layers: output features, or input features, are divided."""
DISPATCHED, EXPERTS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of the module with a layer's experts, to which tokens are sent, and of its weights."""


def base_of(model: Any) -> Any:
    """Return the model under an adapter of peft, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def styles(model: Any, plan: Literal["tp_plan", "ep_plan"]) -> dict[nn.Module, str]:
    """Return the style of each module that a plan names; empty if transformers has no such plan for the model."""
    base = base_of(model)
    named: Mapping[str, str] = getattr(base, plan, None) or {}
    return {module: named[key] for name, module in base.named_modules() if (key := generic(name)) in named}


def blocks_in(layer: nn.Module) -> list[Any]:
    """Return the modules of a layer that run router and experts, the experts being their child `experts`."""
    return [module for module in layer.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


def generic(name: str) -> str:
    """Return the name of a module in plans: with a star for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
