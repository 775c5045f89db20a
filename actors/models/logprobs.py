"""Logprobs of chosen tokens under a tempered distribution, and the distribution's entropy, in float32.

Temperature 0 means greedy sampling; the logprobs then belong to the untempered distribution.

`logprobs_and_entropy` takes logits. `chunked_logprobs_and_entropy` takes the input of a linear output layer and holds
the logits of a single chunk of tokens at a time, in the backward pass too. With a vocabulary of 128 000, the logits of
2 000 tokens with float32 copy, softmax and gradient would be 4 GB. The price is that the backward pass recomputes the
logits. With a frozen layer this is not needed: the gradient of a token's hidden state is a vector, computed in the
forward pass already, times the gradient of the token's logprob.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes of float32 logits held at a time, by kind of device. The gradient of the logits takes the same again."""


@dataclass(frozen=True)
class LogitTransform:
    """Transform of a model's logits: logit → cap · tanh(scale · logit / cap) (Cohere, Granite; Gemma)."""

    scale: float = 1.0
    """Factor; 1 changes nothing."""
    cap: float = math.inf
    """Bound of the absolute value; infinity changes nothing."""

    def forward_(self, logits: Tensor) -> Tensor:
        """Transform logits in place, and return the tensor."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap == math.inf else logits.div_(self.cap).tanh_().mul_(self.cap)

    def backward_(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Turn the gradient of transformed logits into the gradient of the logits, in place, and return the tensor.

        Args:
            transformed: transformed logits.
        """
        # the derivative of cap · tanh(x / cap) is 1 − tanh², and tanh is the transformed logit ÷ cap
        if self.scale != 1:
            gradient.mul_(self.scale)
        return gradient if self.cap == math.inf else gradient.mul_(1 - (transformed / self.cap) ** 2)


def logprobs_and_entropy(
    logits_TV: Tensor, token_ids_T: Tensor, temperatures_T: Tensor | None, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logprobs of the chosen tokens, and entropies; (T,) each.

    Logprobs have a gradient, entropies if `entropy_gradient`. Temperatures None: all are 1.
    """
    with torch.autocast(logits_TV.device.type, enabled=False):  # autocast would compute the product below in bfloat16
        logits_TV, divisors_T = precise(logits_TV), _divisors(temperatures_T)
        if divisors_T is not None:
            logits_TV = logits_TV / divisors_T[:, None]
        normaliser_T = logits_TV.logsumexp(-1)
        # entropy is a metric in most runs: without gradient nothing of it is kept for the backward pass
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities_TV = (logits_TV - normaliser_T[:, None]).exp_()
            entropy_T = normaliser_T - torch.linalg.vecdot(probabilities_TV, logits_TV)
        return _chosen(logits_TV, token_ids_T) - normaliser_T, entropy_T


def chunked_logprobs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    token_ids_T: Tensor,
    temperatures_T: Tensor | None,
    transform: LogitTransform = LogitTransform(),
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
    fused: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies from hidden states and a linear output layer; (T,) each.

    Gradients go to hidden states, weight and bias; entropies have a gradient if `entropy_gradient`. Equal arguments
    give equal bits.

    Args:
        temperatures_T: sampling temperature of each token; None: all are 1, which saves passes over the logits.
        transform: transform of the logits.
        chunk_bytes: bytes of logits per chunk, for tests; by default CHUNK_BYTES.
        fused: True for the kernels of Triton, which leave logits in the dtype of the product.
        dtype: precision of the products; None: that of an active autocast, otherwise of the hidden states.
    """
    device = hidden_TD.device.type
    dtype = dtype or _dtype_of(hidden_TD)
    learns_head = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    plan = _Plan(
        transform=transform,
        dtype=dtype,
        tokens=max(1, (chunk_bytes or CHUNK_BYTES[device]) // (4 * weight_VD.shape[0])),  # 4 bytes per float32 logit
        entropy_gradient=entropy_gradient,
        fused=fused,
        ahead=torch.is_grad_enabled() and hidden_TD.requires_grad and not learns_head and not entropy_gradient,
    )
    with torch.autocast(device, enabled=False):  # every dtype below is explicit
        logprobs_T, entropy_T = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, bias_V, token_ids_T, _divisors(temperatures_T), plan
        )
    return logprobs_T, entropy_T


def _dtype_of(hidden_TD: Tensor) -> torch.dtype:
    device = hidden_TD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype


def precise(values: Tensor) -> Tensor:
    """Return values in float32, or unchanged if the dtype is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _divisors(temperatures_T: Tensor | None) -> Tensor | None:
    """Return temperatures as divisors of logits, 1 for greedy sampling; None if all are 1."""
    if temperatures_T is None:
        return None
    return torch.where(temperatures_T > 0, temperatures_T, torch.ones_like(temperatures_T))


def _chosen(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    return logits_TV.gather(1, token_ids_T[:, None])[:, 0]


@dataclass(frozen=True)
class _Plan:
    """Computation of the chunks, of C tokens each."""

    transform: LogitTransform
    dtype: torch.dtype
    tokens: int
    """Largest number of tokens in a chunk."""
    entropy_gradient: bool
    fused: bool
    ahead: bool
    """True if the forward pass computes the gradient of the hidden states per unit of logprob."""

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return chunks of similar size. A remainder of a few rows would be computed by another kernel, and slowly."""
        number = math.ceil(num_tokens / self.tokens)
        return [slice(num_tokens * i // number, num_tokens * (i + 1) // number) for i in range(number)]

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return logits in newly allocated memory: transformed and in float32, unless kernels do that later."""
        product = linear(hidden_CD, weight_VD, bias_V)
        return product if self.fused else self.transform.forward_(precise(product))

    def cast(self, *tensors: Tensor | None) -> list[Any]:
        """Return the tensors in the dtype of the logits."""
        return [tensor if tensor is None else tensor.to(self.dtype) for tensor in tensors]


class _Chunked(torch.autograd.Function):
    """Autograd function of `chunked_logprobs_and_entropy`."""

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
        # with the gradient known, neither logits nor weights are needed again
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
        plan: _Plan = ctx.plan
        hidden_TD, weight_VD, bias_V, token_ids_T, divisors_T, normaliser_T, entropy_T = ctx.saved_tensors
        hidden, weight, bias = plan.cast(hidden_TD, weight_VD, bias_V)
        of_hidden = torch.zeros_like(hidden_TD) if ctx.needs_input_grad[0] else None
        # sums over chunks are float32 even if weights, and thus products, are bfloat16
        of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if wanted else None
            for x, wanted in zip((weight_VD, bias_V), ctx.needs_input_grad[1:3], strict=True)
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
                if of_weight.dtype == of_logits.dtype:
                    of_weight.addmm_(of_logits.T, hidden[chunk])
                else:
                    of_weight += of_logits.T @ hidden[chunk]
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del of_logits  # freed before the next chunk
        return of_hidden, _as(of_weight, weight_VD), _as(of_bias, bias_V), None, None, None


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Return a gradient in the dtype of its tensor."""
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


def _computed(
    plan: _Plan, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, ids_C: Tensor, divisors_C: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return logprobs, normaliser and entropy of a chunk, and the gradient of its hidden states per unit of logprob.

    A function of its own, like `_of_logits`, so that all tensors of a chunk are freed before the next chunk.
    """
    transformed_CV = plan.logits(hidden_CD, weight_VD, bias_V)
    if plan.fused:
        return _computed_fused(plan, transformed_CV, weight_VD, ids_C, divisors_C)
    tempered_CV = transformed_CV if divisors_C is None else transformed_CV / divisors_C[:, None]
    # softmax by hand: the same exponentials serve normaliser, entropy and gradient. Less the largest logit, so that no
    # exponential overflows
    largest_C = tempered_CV.amax(-1)
    weights_CV = (tempered_CV - largest_C[:, None]).exp_()
    sum_C = weights_CV.sum(-1)
    normaliser_C = largest_C + sum_C.log()
    entropy_C = normaliser_C - torch.linalg.vecdot(weights_CV, tempered_CV) / sum_C
    logprobs_C = _chosen(tempered_CV, ids_C) - normaliser_C
    if not plan.ahead:
        return (logprobs_C, normaliser_C, entropy_C), None
    # d logprob / d logits = [chosen] − p
    gradient_CV = weights_CV.div_(sum_C[:, None]).neg_()
    gradient_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += 1
    ahead_CD = _untempered_(gradient_CV, transformed_CV, divisors_C, plan) @ weight_VD
    return (logprobs_C, normaliser_C, entropy_C), ahead_CD


def _computed_fused(
    plan: _Plan, logits_CV: Tensor, weight_VD: Tensor, ids_C: Tensor, divisors_C: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return what `_computed` returns, by kernels."""
    from actors.models import fused_output_layer  # here, since it needs Triton

    transform = plan.transform
    logprobs_C, *found = fused_output_layer.read(logits_CV, ids_C, divisors_C, transform.scale, transform.cap)
    normaliser_C, entropy_C = found
    if not plan.ahead:
        return (logprobs_C, normaliser_C, entropy_C), None
    per_logprob = (torch.ones_like(logprobs_C), None)
    gradient_CV = _overwritten(plan, logits_CV, ids_C, divisors_C, (normaliser_C, entropy_C), per_logprob)
    return (logprobs_C, normaliser_C, entropy_C), gradient_CV @ weight_VD


def _overwritten(
    plan: _Plan,
    logits_CV: Tensor,
    ids_C: Tensor,
    divisors_C: Tensor | None,
    found: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
) -> Tensor:
    from actors.models import fused_output_layer  # here, since it needs Triton

    transform = plan.transform
    given = (logits_CV, ids_C, divisors_C, found, gradients, transform.scale, transform.cap)
    return fused_output_layer.overwrite(*given)


def _of_logits(
    plan: _Plan,
    transformed_CV: Tensor,
    ids_C: Tensor,
    divisors_C: Tensor | None,
    found: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the gradient of a chunk's logits.

    For tempered logits z, probabilities p, entropy H: d logprob/dz_i = [i chosen] − p_i, dH/dz_i = −p_i (log p_i + H).

    Args:
        found: normaliser and entropy from the forward pass.
        gradients: gradients of logprobs and entropy.
    """
    (normaliser_C, entropy_C), (of_logprobs_C, of_entropy_C) = found, gradients
    if plan.fused:
        of_both = (of_logprobs_C, of_entropy_C if plan.entropy_gradient else None)
        return _overwritten(plan, transformed_CV, ids_C, divisors_C, found, of_both)
    tempered_CV = transformed_CV if divisors_C is None else transformed_CV / divisors_C[:, None]
    # log p: the normaliser of the forward pass, so that both passes have the same probabilities
    shifted_CV = tempered_CV - normaliser_C[:, None]
    if plan.entropy_gradient:
        factors_CV = (shifted_CV + entropy_C[:, None]).mul_(of_entropy_C[:, None]).add_(of_logprobs_C[:, None])
        gradient_CV = shifted_CV.exp_().mul_(factors_CV).neg_()
    else:
        gradient_CV = shifted_CV.exp_().mul_(-of_logprobs_C[:, None])
    gradient_CV[torch.arange(len(ids_C), device=ids_C.device), ids_C] += of_logprobs_C
    return _untempered_(gradient_CV, transformed_CV, divisors_C, plan)


def _untempered_(gradient_CV: Tensor, transformed_CV: Tensor, divisors_C: Tensor | None, plan: _Plan) -> Tensor:
    """Return the gradient of the linear layer's output from the tempered logits' gradient, which is overwritten."""
    # the chain rule backwards: temperature last, transform before, linear layer first
    if divisors_C is not None:
        gradient_CV.div_(divisors_C[:, None])
    return plan.transform.backward_(gradient_CV, transformed_CV).to(plan.dtype)
