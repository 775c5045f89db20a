"""CHORD: supervised examples beside what the policy samples, mixed by a weight μ on a schedule.

Source: CHORD (μ and φ), in ms-swift's conventions; the division of the supervised loss is that of prime-rl's ce.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from schemas.config.sft import SftConfig

STREAM = 0x53F7
"""Keeps the order of supervised examples apart from what else is drawn from the run's seed."""


def mu(steps_done: int, config: SftConfig) -> float:
    """Weight of the supervised loss in the step after `steps_done` ones: up to the peak, down to the valley.

    The first step after the warm-up has the peak; without decay, the valley.
    """
    if steps_done < config.mu_warmup_steps:
        return config.mu_peak * steps_done / config.mu_warmup_steps
    decayed = steps_done - config.mu_warmup_steps
    if decayed >= config.mu_decay_steps:
        return config.mu_valley
    left = (1 + math.cos(math.pi * decayed / config.mu_decay_steps)) / 2
    return config.mu_valley + (config.mu_peak - config.mu_valley) * left


def phi(nll_T: Tensor) -> Tensor:
    """(T,) p·(1 − p) with p = exp(−nll), no gradient: at most ¼, 0 where the policy is sure, either way."""
    probability_T = (-nll_T.detach()).exp()
    return probability_T * (1 - probability_T)


def sft_share(logprobs_T: Tensor, weights_T: Tensor, num_tokens: int, *, with_phi: bool) -> Tensor:
    """Scalar; the shares of all micro-batches and ranks add up to the supervised loss of the step.

    Args:
        logprobs_T: of the examples' own tokens, at temperature 1, with gradient.
        weights_T: 0 for tokens that are not learned (prompts).
        num_tokens: non-zero weights of the whole step; the divisor is their number, not their sum.
        with_phi: multiply by `phi`.
    """
    nll_T = -logprobs_T.masked_fill(weights_T == 0, 0.0)
    factor_T = weights_T * phi(nll_T) if with_phi else weights_T
    return (nll_T * factor_T).sum() / max(num_tokens, 1)


def mixed(policy_loss: Tensor, sft_loss: Tensor, weight: float) -> Tensor:
    """(1 − μ) · policy + μ · supervised; linear, so shares may be mixed before they are added up."""
    return (1 - weight) * policy_loss + weight * sft_loss


def sft_indices(size: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """(batch_size,) which of `size` examples step 1, 2, … learns: each once per pass, every pass in another order.

    A function of its arguments alone, so that a step can be trained again. A pass may end inside a step.
    """
    if size < 1:
        raise ValueError("trainer.sft.path: has no examples")
    places = (step - 1) * batch_size + np.arange(batch_size)
    orders = {p: np.random.default_rng([seed, STREAM, p]).permutation(size) for p in np.unique(places // size).tolist()}
    return np.array([orders[place // size][place % size] for place in places.tolist()], dtype=np.int64)
