"""AdamW in 8 bits over weights that are spread over ranks: the kernels of bitsandbytes on each rank's part.

bitsandbytes' own optimizers know nothing of such weights. Needs `grpo-actors[bnb]`.
"""

from typing import Any

import torch
from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

from actors.learner.optimizer_states import spread_begun
from actors.learner.shards import part

NAME = "adam"
"""Name of the kernels, whose weight decay is decoupled."""


class SpreadAdamW8bit(torch.optim.Optimizer):
    """AdamW whose state is that of `optimizer_states.SPREAD_BLOCKS`, made at the first update.

    Args:
        groups: parameters, each with a `weight_decay`.
        betas, eps: of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        # lr 0 until the learner sets it
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this rank's part of each parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not (state := self.state[parameter]):
                    state |= spread_begun(parameter)
                local = part(parameter)
                weight = local.contiguous()  # kernels count numbers by their place in memory
                _update(weight, part(parameter.grad).contiguous(), state, group)
                if weight is not local:
                    local.copy_(weight)


def _update(weight: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["step"] += 1
    if not weight.numel():  # a rank without rows
        return
    (beta1, beta2), eps, rate, decay = (group[name] for name in ("betas", "eps", "lr", "weight_decay"))
    moments = state["state1"], state["state2"]
    if moments[0].dtype == torch.float32:
        optimizer_update_32bit(
            NAME, gradient, weight, moments[0], beta1, eps, state["step"], rate, moments[1], beta2, weight_decay=decay
        )
        return
    optimizer_update_8bit_blockwise(
        NAME, gradient, weight, *moments, beta1, beta2, beta3=0.0, alpha=0.0, eps=eps, step=state["step"], lr=rate,
        weight_decay=decay, **{name: state[name] for name in ("qmap1", "qmap2", "absmax1", "absmax2")},
    )  # fmt: skip
