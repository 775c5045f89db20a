"""Sampling, as a pure function of logits and of one random number per sequence.

The random number is a hash of (seed, position) and nothing else, so a completion depends on its seed and its logits and
not on what else is in the batch (P10).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFFFFFFFFFF


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per sequence: splitmix64 over seed and position."""
    with np.errstate(over="ignore"):
        z = _mix(seeds_B * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x1234567))
        z = _mix(z + positions_B * np.uint64(0x9E3779B97F4A7C15))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits_BV: Tensor,
    temperatures_B: NDArray[np.float32],
    top_p_B: NDArray[np.float32],
    uniforms_B: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per sequence.

    Returns:
        tokens (B,) and their logprobs (B,) under the distribution that they were drawn from: tempered and cut to the
        nucleus. Temperature 0 takes the most probable token and gives its untempered logprob.
    """
    device, greedy_B = logits_BV.device, temperatures_B == 0
    logits_BV = logits_BV.float()
    if (temperatures_B != 1).any():
        logits_BV = logits_BV / torch.from_numpy(np.where(greedy_B, 1, temperatures_B)).to(device)[:, None]
    log_p_BV = torch.log_softmax(logits_BV, -1)
    if (top_p_B < 1).any():
        log_p_BV = _cut_to_nucleus(log_p_BV, torch.from_numpy(top_p_B).to(device))
    cumulative_BV = log_p_BV.double().exp().cumsum(-1)
    # scaled by the last sum, which rounding leaves a little off 1, so that a token with probability 0 is never drawn
    targets_B = torch.from_numpy(uniforms_B).to(device) * cumulative_BV[:, -1]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    if greedy_B.any():
        tokens_B = torch.where(torch.from_numpy(greedy_B).to(device), log_p_BV.argmax(-1), tokens_B)
    logprobs_B = log_p_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()


def _cut_to_nucleus(log_p_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose probability reaches top_p, renormalised."""
    sorted_BV, order_BV = log_p_BV.sort(-1, descending=True)
    before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
    outside_BV = before_BV >= top_p_B[:, None]
    cut_BV = torch.zeros_like(outside_BV).scatter(1, order_BV, outside_BV)
    return torch.log_softmax(log_p_BV.masked_fill(cut_BV, float("-inf")), -1)
