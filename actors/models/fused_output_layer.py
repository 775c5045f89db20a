"""Triton kernels for a chunk of logits: one reads it, one overwrites it with its gradient.

Computed by torch, a logit is read and written some twenty times: the cast to float32, temperature, exponential, sums,
gradient. Here it is read once in the forward pass, and read and written once for the gradient, in the precision in
which the product with the output layer leaves it. All sums are float32 (float64 for float64 logits), in a fixed order:
a row of logits belongs to one program. The products before and behind stay torch's.

Runs on GPUs, and with TRITON_INTERPRET=1 in Triton's interpreter on a CPU. Imported only where it is used.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that a program holds at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _tempered(raw, divisor, scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return transformed and tempered logits, and the hyperbolic tangent inside a soft cap (0 without one)."""
    z = raw * scale
    tangent = z * 0
    if HAS_CAP:
        # by one exponential: for large values it is infinite or 0, and the tangent ±1
        tangent = 1 - 2 / (tl.exp(2 * z / cap) + 1)
        z = tangent * cap
    return z / divisor, tangent


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    logits, ids, divisors, logprobs, normalisers, entropies, V, scale, cap,
    HAS_CAP: tl.constexpr, HAS_DIVISORS: tl.constexpr, EXACT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute logprob, normaliser and entropy of one row."""
    row = tl.program_id(0).to(tl.int64)
    divisor = tl.load(divisors + row).to(EXACT) if HAS_DIVISORS else 1.0
    largest = tl.full((), float("-inf"), EXACT)
    # Σ exp(z − largest) and Σ exp(z − largest)·z so far; a larger logit rescales both
    total = tl.full((), 0, EXACT)
    weighted = tl.full((), 0, EXACT)
    for start in range(0, V, SIZE):
        columns = start + tl.arange(0, SIZE)
        inside = columns < V
        raw = tl.load(logits + row * V + columns, mask=inside, other=0).to(EXACT)
        z, _ = _tempered(raw, divisor, scale, cap, HAS_CAP)
        before = largest
        largest = tl.maximum(before, tl.max(tl.where(inside, z, float("-inf")), 0))
        shrunk = tl.exp(before - largest)
        weights = tl.where(inside, tl.exp(z - largest), 0)
        total = total * shrunk + tl.sum(weights, 0)
        weighted = weighted * shrunk + tl.sum(weights * z, 0)
    raw = tl.load(logits + row * V + tl.load(ids + row)).to(EXACT)
    chosen, _ = _tempered(raw, divisor, scale, cap, HAS_CAP)
    normaliser = largest + tl.log(total)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, normaliser - weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _overwrite(  # type: ignore[no-untyped-def]
    logits, ids, divisors, normalisers, entropies, of_logprobs, of_entropies, V, scale, cap,
    HAS_CAP: tl.constexpr, HAS_DIVISORS: tl.constexpr, HAS_ENTROPY: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Replace a block of logits of one row by their gradient: dz_i = [i chosen] − p_i, dH/dz_i = −p_i (log p_i + H)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < V
    divisor = tl.load(divisors + row).to(EXACT) if HAS_DIVISORS else 1.0
    at = logits + row * V + columns
    raw = tl.load(at, mask=inside, other=0)
    z, tangent = _tempered(raw.to(EXACT), divisor, scale, cap, HAS_CAP)
    log_p = z - tl.load(normalisers + row)
    of_logprob = tl.load(of_logprobs + row).to(EXACT)
    factor = of_logprob
    if HAS_ENTROPY:
        factor = factor + tl.load(of_entropies + row).to(EXACT) * (log_p + tl.load(entropies + row))
    gradient = tl.where(columns == tl.load(ids + row), of_logprob, 0) - tl.exp(log_p) * factor
    # the chain rule backwards: temperature, soft cap, scale
    gradient = gradient / divisor * scale
    if HAS_CAP:
        gradient = gradient * (1 - tangent * tangent)
    tl.store(at, gradient.to(raw.dtype), mask=inside)


def read(
    logits_CV: Tensor, ids_C: Tensor, divisors_C: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of the chosen tokens, normalisers and entropies, (C,) each.

    Args:
        logits_CV: output of the layer, neither transformed nor tempered; contiguous.
        ids_C: chosen tokens.
        divisors_C: temperatures; None: all are 1.
        scale: factor of the logits.
        cap: soft cap of the logits; infinity: none.
    """
    found = [torch.empty(len(logits_CV), dtype=_exact(logits_CV), device=logits_CV.device) for _ in range(3)]
    given = (logits_CV, ids_C, _pointer(divisors_C, ids_C), *found)
    _read[(len(logits_CV),)](*given, logits_CV.shape[1], scale, *_capped(cap), **_constants(logits_CV, divisors_C))
    return found[0], found[1], found[2]


def overwrite(
    logits_CV: Tensor,
    ids_C: Tensor,
    divisors_C: Tensor | None,
    found: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    scale: float,
    cap: float,
) -> Tensor:
    """Overwrite logits by their gradient, and return the tensor.

    Args:
        logits_CV: output of the layer, as for `read`.
        ids_C: chosen tokens.
        divisors_C: temperatures; None: all are 1.
        found: normalisers and entropies of `read`.
        gradients: gradients of logprobs and entropies; None for entropies without a gradient.
        scale: factor of the logits.
        cap: soft cap of the logits; infinity: none.
    """
    of_logprobs_C, of_entropies_C = gradients
    rows, columns = logits_CV.shape
    vectors = (*found, of_logprobs_C, _pointer(of_entropies_C, of_logprobs_C))
    given = (logits_CV, ids_C, _pointer(divisors_C, ids_C), *(vector.contiguous() for vector in vectors))
    constants = _constants(logits_CV, divisors_C)
    blocks = -(-columns // constants["SIZE"])
    constants["HAS_ENTROPY"] = of_entropies_C is not None
    _overwrite[(rows, blocks)](*given, columns, scale, *_capped(cap), **constants)
    return logits_CV


def _pointer(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """Return the tensor, or another one that is never read."""
    return instead if tensor is None else tensor


def _capped(cap: float) -> tuple[float, bool]:
    return (1.0, False) if cap == math.inf else (cap, True)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _constants(logits_CV: Tensor, divisors_C: Tensor | None) -> dict[str, Any]:
    """Return what the kernels are compiled for."""
    return {
        "HAS_DIVISORS": divisors_C is not None,
        "EXACT": tl.float64 if logits_CV.dtype is torch.float64 else tl.float32,
        "SIZE": min(BLOCK, triton.next_power_of_2(logits_CV.shape[1])),
    }
