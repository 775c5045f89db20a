"""Sum of several losses with their own tokens and weights: prime-rl's components rl, ce and ref_kl.

A weight scales a component's loss at a token. A token of weight 0 counts neither in the mask nor in the denominator of
the component. Each component is divided by the number of its own tokens in the step, so no component dilutes another.
Source: prime-rl, `src/prime_rl/trainer/rl/loss.py` (compute_loss, default and fixed losses).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.algorithms.losses import compute_loss
from actors.algorithms.losses.inputs import LossInputs, LossOutput
from schemas.config.losses import RefKlLossConfig
from schemas.config.objective import ObjectiveConfig


@dataclass(frozen=True)
class Component:
    """Weights and denominator of one component."""

    weights_T: Tensor
    """Factor of the component's loss at each token; 0: the token is not in the component."""
    tokens: float
    """Denominator: the component's tokens in the whole step, over all ranks."""


def mixed_loss(
    inputs: LossInputs,
    objective: ObjectiveConfig,
    rl: Component | None = None,
    ce: Component | None = None,
    ref_kl: Component | None = None,
) -> LossOutput:
    """Return one micro-batch's share of the objective on `rl` + NLL on `ce` + distillation on `ref_kl`.

    Args:
        inputs: arrays of the micro-batch. Weights outside the loss mask count for `ce` and `ref_kl`, not for `rl`.
        objective: objective of the component rl; its loss must be averaged over the tokens of the step.
        rl: policy tokens. None: all tokens of the loss mask, with weight 1.
        ce: supervised tokens. None: no tokens.
        ref_kl: tokens of distillation, for which the inputs must have a teacher's logprobs. None: no tokens.
    """
    policy = compute_loss(_on(inputs, rl) if rl is not None else inputs, objective)
    loss, sums = policy.loss, policy.sums
    if ce is not None:
        given_T = ce.weights_T != 0
        # filled before the product: 0 · inf would be NaN
        nll_T = -inputs.logprobs_T.masked_fill(~given_T, 0.0)
        loss = loss + (nll_T * ce.weights_T).sum() / max(ce.tokens, 1)
        sums = sums | {"sft_nll": nll_T.detach().sum(), "sft_tokens": given_T.sum()}
    if ref_kl is not None:
        # the component's own weights select its tokens, also those outside the policy's loss mask
        everywhere = replace(inputs, loss_mask_T=torch.ones_like(inputs.loss_mask_T))
        # sums of this component are dropped: metrics are those of the policy loss
        loss = loss + compute_loss(_on(everywhere, ref_kl), ObjectiveConfig(loss=RefKlLossConfig())).loss
    return LossOutput(loss, sums, policy.tokens)


def opd_weights(hindsight_T: Tensor, reference_T: Tensor, mask_T: Tensor, opd_tau: float, opd_beta: float) -> Tensor:
    """Return weights of hindsight tokens for `ce`, (T,): opd_tau·sigmoid(opd_beta·(hindsight − reference)).

    The component is divided by the loss-mask tokens of the step. Source: Surogate, `surogate/grpo/loss.py`
    (_compute_sample_grads).

    Args:
        hindsight_T: logprobs of a frozen scorer with the hindsight in its prompt.
        reference_T: logprobs of the same scorer without the hindsight.
        mask_T: bool, tokens with both logprobs; all others get weight 0.
        opd_tau: factor of the weights.
        opd_beta: steepness of the sigmoid.
    """
    gate_T = torch.sigmoid(opd_beta * (hindsight_T - reference_T).masked_fill(~mask_T, 0.0))
    return (opd_tau * gate_T).masked_fill(~mask_T, 0.0)


def replayed(
    inputs: LossInputs, replay_T: Tensor, replay_tau: float, weights_T: Tensor | None = None
) -> tuple[Component, Component]:
    """Return the components `rl` and `ce` of Surogate's replay: replayed tokens have NLL instead of the policy loss.

    Both are divided by all loss-mask tokens of the step, replayed tokens included. Source: Surogate,
    `surogate/grpo/loss.py` (_compute_sample_grads).

    Args:
        inputs: arrays of the micro-batch.
        replay_T: bool, replayed tokens.
        replay_tau: factor of the NLL.
        weights_T: further factors of replayed tokens. None: 1.
    """
    replay_T = replay_T & inputs.loss_mask_T
    ones_T = torch.ones_like(inputs.logprobs_T)
    given_T = ones_T if weights_T is None else weights_T
    return (
        Component((~replay_T).to(ones_T.dtype), inputs.loss_tokens),
        Component((replay_tau * given_T).masked_fill(~replay_T, 0.0), inputs.loss_tokens),
    )


def _on(inputs: LossInputs, component: Component) -> LossInputs:
    return replace(inputs, weights_T=component.weights_T, loss_tokens=component.tokens)
