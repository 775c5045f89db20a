"""Logprobs of chosen tokens under a tempered distribution, and its entropy; in float32.

Temperature 0 stands for greedy sampling, whose logprobs are those of the untempered distribution.

`logprobs_and_entropy` takes logits. `chunked_logprobs_and_entropy` takes what a linear output layer would make them of,
and holds those of one chunk of tokens at a time, in the backward pass too: with a vocabulary of 128 000 the logits of
2 000 tokens, their float32 copy, their softmax and their gradient would be 4 GB. The price is that the backward pass
computes them again; where the layer is frozen it need not, since what a token's hidden state gets is one vector,
which the forward pass can already have, times the gradient of its logprob.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Logits in float32 that are held at a time, by kind of device; as much again for their gradient."""


@dataclass(frozen=True)
class Bend:
    """What a model does to its logits: logit → cap · tanh(scale · logit / cap) (Cohere, Granite; Gemma)."""

    scale: float = 1.0
    cap: float = math.inf

    def forward_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap == math.inf else logits.div_(self.cap).tanh_().mul_(self.cap)

    def backward_(self, gradient: Tensor, bent: Tensor) -> Tensor:
        """In place: the gradient of the logits from that of the bent ones, which are given."""
        if self.scale != 1:
            gradient.mul_(self.scale)
        return gradient if self.cap == math.inf else gradient.mul_(1 - (bent / self.cap) ** 2)


def logprobs_and_entropy(
    logits_TV: Tensor, token_ids_T: Tensor, temperatures_T: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of the chosen tokens, with gradient, and entropy of the distributions, with it where it is asked for."""
    with torch.autocast(logits_TV.device.type, enabled=False):  # it would have bfloat16 in the product below
        logits_TV, divisors_T = precise(logits_TV), _divisors(temperatures_T)
        if divisors_T is not None:
            logits_TV = logits_TV / divisors_T[:, None]
        normaliser_T = logits_TV.logsumexp(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities_TV = (logits_TV - normaliser_T[:, None]).exp_()
            entropy_T = normaliser_T - torch.linalg.vecdot(probabilities_TV, logits_TV)
        return _chosen(logits_TV, token_ids_T) - normaliser_T, entropy_T


def chunked_logprobs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    token_ids_T: Tensor,
    temperatures_T: Tensor,
    bend: Bend = Bend(),
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states and a linear output layer; gradients go to hidden states, weight and bias.

    Logits are computed in the dtype of the autocast that is on, else in that of the hidden states. The same arguments
    give the same bits. `chunk_bytes` is there for tests.
    """
    device = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
    learns_head = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    plan = _Plan(
        bend=bend,
        dtype=dtype,
        tokens=max(1, (chunk_bytes or CHUNK_BYTES[device]) // (4 * weight_VD.shape[0])),
        entropy_gradient=entropy_gradient,
        ahead=torch.is_grad_enabled() and hidden_TD.requires_grad and not learns_head and not entropy_gradient,
    )
    with torch.autocast(device, enabled=False):  # every dtype below is chosen by hand
        logprobs_T, entropy_T = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, bias_V, token_ids_T, _divisors(temperatures_T), plan
        )
    return logprobs_T, entropy_T


def precise(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _divisors(temperatures_T: Tensor) -> Tensor | None:
    """None where there is nothing to divide by."""
    if bool((temperatures_T == 1).all()):
        return None
    return torch.where(temperatures_T > 0, temperatures_T, torch.ones_like(temperatures_T))


def _chosen(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    return logits_TV.gather(1, token_ids_T[:, None])[:, 0]


@dataclass(frozen=True)
class _Plan:
    """How the chunks are computed; C tokens each."""

    bend: Bend
    dtype: torch.dtype
    tokens: int
    entropy_gradient: bool
    ahead: bool
    """Whether the forward pass computes what the hidden states will get."""

    def chunks(self, num_tokens: int) -> list[slice]:
        """Of like size: a remainder of a few rows would be computed by another kernel, and slowly."""
        number = math.ceil(num_tokens / self.tokens)
        return [slice(num_tokens * i // number, num_tokens * (i + 1) // number) for i in range(number)]

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Bent, untempered, float32, in memory of their own."""
        return self.bend.forward_(precise(linear(hidden_CD, weight_VD, bias_V)))

    def cast(self, *tensors: Tensor | None) -> list[Any]:
        """To the dtype of the logits."""
        return [tensor if tensor is None else tensor.to(self.dtype) for tensor in tensors]


class _Chunked(torch.autograd.Function):
    """See `chunked_logprobs_and_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        token_ids_T: Tensor,
        divisors_T: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        hidden, weight, bias = plan.cast(hidden_TD, weight_VD, bias_V)
        logprobs_T, normaliser_T, entropy_T = (precise(hidden_TD.new_empty(len(hidden_TD))) for _ in range(3))
        ahead_TD = torch.empty_like(hidden_TD) if plan.ahead else None
        for chunk in plan.chunks(len(hidden_TD)):
            divisors_C = None if divisors_T is None else divisors_T[chunk]
            found, ahead_CD = _computed(plan, hidden[chunk], weight, bias, token_ids_T[chunk], divisors_C)
            logprobs_T[chunk], normaliser_T[chunk], entropy_T[chunk] = found
            if ahead_TD is not None and ahead_CD is not None:
                ahead_TD[chunk] = ahead_CD
        ctx.plan = plan
        kept = (hidden_TD, weight_VD, bias_V, token_ids_T, divisors_T, normaliser_T, entropy_T)
        ctx.save_for_backward(*((ahead_TD,) if plan.ahead else kept))
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_T: Tensor, entropy_gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.plan.ahead:
            (ahead_TD,) = ctx.saved_tensors
            return ahead_TD * gradient_T[:, None].to(ahead_TD.dtype), None, None, None, None, None
        return *_gradients(ctx, gradient_T, entropy_gradient_T), None, None, None


def _computed(
    plan: _Plan, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids_C: Tensor, divisors_C: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Of one chunk: logprobs, normaliser, entropy, and what the hidden states get per unit of logprob.

    A function, as `_of_logits` is, so that nothing of a chunk is alive when the next one begins.
    """
    bent_CV = plan.logits(hidden_CD, weight_VD, bias_V)
    tempered_CV = bent_CV if divisors_C is None else bent_CV / divisors_C[:, None]
    largest_C = tempered_CV.amax(-1)
    weights_CV = (tempered_CV - largest_C[:, None]).exp_()
    sum_C = weights_CV.sum(-1)
    normaliser_C = largest_C + sum_C.log()
    entropy_C = normaliser_C - torch.linalg.vecdot(weights_CV, tempered_CV) / sum_C
    logprobs_C = _chosen(tempered_CV, ids_C) - normaliser_C
    if not plan.ahead:
        return (logprobs_C, normaliser_C, entropy_C), None
    gradient_CV = weights_CV.div_(sum_C[:, None]).neg_()
    gradient_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += 1
    ahead_CD = _untempered_(gradient_CV, bent_CV, divisors_C, plan) @ weight_VD
    return (logprobs_C, normaliser_C, entropy_C), ahead_CD


def _gradients(ctx: Any, gradient_T: Tensor, entropy_gradient_T: Tensor) -> tuple[Tensor | None, ...]:
    """Of hidden states, weight and bias, as far as they are asked for.

    For tempered logits z, probabilities p, entropy H: d logprob/dz_i = [i chosen] − p_i, dH/dz_i = −p_i (log p_i + H).
    """
    plan: _Plan = ctx.plan
    hidden_TD, weight_VD, bias_V, token_ids_T, divisors_T, normaliser_T, entropy_T = ctx.saved_tensors
    hidden, weight, bias = plan.cast(hidden_TD, weight_VD, bias_V)
    of_hidden, of_weight, of_bias = (
        torch.zeros_like(x) if wanted else None
        for x, wanted in zip((hidden_TD, weight_VD, bias_V), ctx.needs_input_grad[:3], strict=True)
    )
    for chunk in plan.chunks(len(hidden_TD)):
        of_logits = _of_logits(
            plan,
            plan.logits(hidden[chunk], weight, bias),
            token_ids_T[chunk],
            None if divisors_T is None else divisors_T[chunk],
            (normaliser_T[chunk], entropy_T[chunk]),
            (gradient_T[chunk], entropy_gradient_T[chunk]),
        )
        if of_hidden is not None:
            of_hidden[chunk] = of_logits @ weight
        if of_weight is not None:
            _add_product_(of_weight, of_logits, hidden[chunk])
        if of_bias is not None:
            of_bias += of_logits.sum(0)
        del of_logits  # before the next chunk's are made
    return of_hidden, of_weight, of_bias


def _of_logits(
    plan: _Plan,
    bent_CV: Tensor,
    ids_C: Tensor,
    divisors_C: Tensor | None,
    found: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> Tensor:
    """The gradient of one chunk's logits, from normaliser and entropy, and the gradients of logprobs and entropy."""
    (normaliser_C, entropy_C), (of_logprobs_C, of_entropy_C) = found, gradients
    tempered_CV = bent_CV if divisors_C is None else bent_CV / divisors_C[:, None]
    shifted_CV = tempered_CV - normaliser_C[:, None]
    if plan.entropy_gradient:
        factors_CV = (shifted_CV + entropy_C[:, None]).mul_(of_entropy_C[:, None]).add_(of_logprobs_C[:, None])
        gradient_CV = shifted_CV.exp_().mul_(factors_CV).neg_()
    else:
        gradient_CV = shifted_CV.exp_().mul_(-of_logprobs_C[:, None])
    gradient_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += of_logprobs_C
    return _untempered_(gradient_CV, bent_CV, divisors_C, plan)


def _untempered_(gradient_CV: Tensor, bent_CV: Tensor, divisors_C: Tensor | None, plan: _Plan) -> Tensor:
    """The gradient of the linear layer's output, in its dtype, from that of the tempered logits; in place."""
    if divisors_C is not None:
        gradient_CV.div_(divisors_C[:, None])
    return plan.bend.backward_(gradient_CV, bent_CV).to(plan.dtype)


def _add_product_(of_weight_VD: Tensor, of_logits_CV: Tensor, hidden_CD: Tensor) -> None:
    """Sums over chunks are float32 where the weight is, though each product may be bfloat16."""
    if of_weight_VD.dtype == of_logits_CV.dtype:
        of_weight_VD.addmm_(of_logits_CV.T, hidden_CD)
    else:
        of_weight_VD += of_logits_CV.T @ hidden_CD
