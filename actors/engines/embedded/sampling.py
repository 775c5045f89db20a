"""Sampling as a pure function of logits and one random number per sequence.

The random number is a hash of seed and position alone. So a completion depends on seed and logits alone, and not on
the rest of the batch: P10 (seeds follow from run seed, ordinal and completion).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms.losses.running_sums import running_sums


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per sequence: splitmix64 over seed and position."""
    # arithmetic modulo 2**64 is meant
    with np.errstate(over="ignore"):
        z = _mix(seeds_B * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x1234567))
        z = _mix(z + positions_B * np.uint64(0x9E3779B97F4A7C15))
    # the upper 53 bits, as many as a float64 holds: with more, rounding could give 1
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


TokenValues = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
"""Rows, token ids, and a value for each."""


@dataclass(frozen=True)
class Distribution:
    """Parameters for turning the logits of each sequence into the distribution of the next token."""

    temperatures_B: NDArray[np.float32]
    """0 takes the most probable token, and reports the logprob at temperature 1."""
    top_p_B: NDArray[np.float32]
    top_k_B: NDArray[np.int64]
    """Number of most probable tokens to keep; 0 keeps all."""
    min_p_B: NDArray[np.float32]
    bias: TokenValues | None = None
    """Values to add to the logits."""
    repetition: TokenValues | None = None
    """Divisors of positive, and factors of negative logits, after the bias."""
    penalties: TokenValues | None = None
    """Values to subtract from the logits, after the repetition penalty."""


@dataclass(frozen=True)
class Drawn:
    """Token and logprob per sequence, (B,), and tokens and logprobs of the K most probable, (B, K)."""

    tokens_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float32]
    top_tokens_BK: NDArray[np.int64]
    top_logprobs_BK: NDArray[np.float32]


def sample(
    logits_BV: Tensor, distribution: Distribution, uniforms_B: NDArray[np.float64], num_top_logprobs: int = 0
) -> Drawn:
    """Draw one token per sequence. All returned logprobs include bias, temperature and cuts."""
    log_p_BV = processed_logprobs(logits_BV, distribution)
    device, greedy_B = log_p_BV.device, distribution.temperatures_B == 0
    # float64: in float32 a sum over a large vocabulary loses the tokens of small probability
    cumulative_BV = running_sums(log_p_BV.double().exp())
    # scaled by the last sum, which rounding leaves slightly off 1: a token of probability 0 is never drawn
    targets_B = torch.from_numpy(uniforms_B).to(device) * cumulative_BV[:, -1]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True)[:, 0].clamp(max=log_p_BV.shape[1] - 1)
    if greedy_B.any():
        tokens_B = torch.where(torch.from_numpy(greedy_B).to(device), log_p_BV.argmax(-1), tokens_B)
    logprobs_B = log_p_BV.gather(1, tokens_B[:, None])[:, 0]
    top = log_p_BV[:, :0].sort() if num_top_logprobs == 0 else log_p_BV.topk(min(num_top_logprobs, log_p_BV.shape[1]))
    return Drawn(*(tensor.cpu().numpy() for tensor in (tokens_B, logprobs_B, top.indices, top.values)))


def processed_logprobs(logits_BV: Tensor, distribution: Distribution) -> Tensor:
    """Return logprobs (B, V) after bias, penalties, temperature, min_p, top_k and top_p, in vLLM's order.

    Each cut gives probability 0 to the removed tokens and renormalises the rest before the next cut. (vLLM:
    `v1/sample/sampler.py`, `logprobs_mode processed_logprobs`.)
    """
    d, device = distribution, logits_BV.device
    logits_BV = logits_BV.float()
    # each step is skipped if no row asks for it: most runs sample at temperature 1 without cuts
    if d.bias is not None:
        rows, tokens, values = _on(device, d.bias)
        logits_BV = logits_BV.index_put((rows, tokens), values, accumulate=True)
    if d.repetition is not None:
        rows, tokens, values = _on(device, d.repetition)
        before = logits_BV[rows, tokens]
        logits_BV = logits_BV.index_put((rows, tokens), torch.where(before > 0, before / values, before * values))
    if d.penalties is not None:
        rows, tokens, values = _on(device, d.penalties)
        logits_BV = logits_BV.index_put((rows, tokens), -values, accumulate=True)
    if (d.temperatures_B != 1).any():
        divisor_B = np.where(d.temperatures_B == 0, np.float32(1), d.temperatures_B)
        logits_BV = logits_BV / torch.from_numpy(divisor_B).to(device)[:, None]
    log_p_BV = torch.log_softmax(logits_BV, -1)
    if d.min_p_B.any():
        # relative to the most probable token; log 0 is −∞, so that a min_p of 0 cuts nothing
        least_B = torch.from_numpy(d.min_p_B).to(device).log()
        log_p_BV = _cut(log_p_BV, log_p_BV < log_p_BV.amax(-1, keepdim=True) + least_B[:, None])
    if d.top_k_B.any():
        top_k_B, last = torch.from_numpy(d.top_k_B).to(device), log_p_BV.shape[1] - 1
        ranked_BK = log_p_BV.topk(min(int(top_k_B.max()) - 1, last) + 1).values
        kth_B1 = ranked_BK.gather(1, (top_k_B - 1).clamp(0, last)[:, None])
        # tokens as probable as the k-th stay, so more than k may stay
        log_p_BV = _cut(log_p_BV, (log_p_BV < kth_B1) & (top_k_B > 0)[:, None])
    if (d.top_p_B < 1).any():
        top_p_B = torch.from_numpy(d.top_p_B).to(device)
        sorted_BV, order_BV = log_p_BV.sort(-1, descending=True)
        before_BV = running_sums(sorted_BV.exp()) - sorted_BV.exp()
        # with top_p 1 nothing is cut, even if rounding sums up to 1 before the last token
        outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
        log_p_BV = _cut(log_p_BV, torch.zeros_like(outside_BV).scatter(1, order_BV, outside_BV))
    return log_p_BV


def _on(device: torch.device, entries: TokenValues) -> Iterator[Tensor]:
    return (torch.from_numpy(array).to(device) for array in entries)


def _cut(log_p_BV: Tensor, gone_BV: Tensor) -> Tensor:
    return torch.log_softmax(log_p_BV.masked_fill(gone_BV, float("-inf")), -1)
