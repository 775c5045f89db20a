"""CHORD: a supervised loss mixed with the policy loss, with a weight μ on a schedule.

Source: CHORD (μ and φ), in ms-swift's conventions. The denominator of the supervised loss is that of prime-rl's ce: the
supervised tokens of the whole step.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from schemas.config.sft import SftConfig

STREAM = 0x53F7
"""Number of the random stream for the order of supervised examples; other draws from the run's seed do not use it."""


def mu(steps_done: int, config: SftConfig) -> float:
    """Return μ, the weight of the supervised loss, of the step that follows `steps_done` completed steps.

    Linear from 0 to mu_peak over mu_warmup_steps, half a cosine down to mu_valley over mu_decay_steps, then constant.
    The first step after the warm-up has mu_peak, or mu_valley if there is no decay.
    """
    if steps_done < config.mu_warmup_steps:
        return config.mu_peak * steps_done / config.mu_warmup_steps
    decayed = steps_done - config.mu_warmup_steps
    if decayed >= config.mu_decay_steps:
        return config.mu_valley
    # half a cosine: 1 after the warm-up, 0 at the end of the decay
    left = (1 + math.cos(math.pi * decayed / config.mu_decay_steps)) / 2
    return config.mu_valley + (config.mu_peak - config.mu_valley) * left


def phi(nll_T: Tensor) -> Tensor:
    """Return φ = p·(1 − p), p = exp(−nll), (T,), without gradient; at most ¼, near 0 for p near 0 or 1 (CHORD-φ)."""
    probability_T = (-nll_T.detach()).exp()
    return probability_T * (1 - probability_T)


def sft_share(logprobs_T: Tensor, weights_T: Tensor, num_tokens: int, *, with_phi: bool) -> Tensor:
    """Return a micro-batch's share of the supervised loss, Σ nll·weight ÷ num_tokens, a scalar.

    Shares of all micro-batches and ranks add up to the supervised loss of the step.

    Args:
        logprobs_T: logprobs of the examples' tokens, at temperature 1, with gradient.
        weights_T: factor of each token; 0 for tokens that are not learned (prompts).
        num_tokens: number of non-zero weights in the whole step (not their sum).
        with_phi: multiply each token's loss by `phi`.
    """
    # filled before the product: 0 · inf would be NaN, forward or backward
    nll_T = -logprobs_T.masked_fill(weights_T == 0, 0.0)
    factor_T = weights_T * phi(nll_T) if with_phi else weights_T
    return (nll_T * factor_T).sum() / max(num_tokens, 1)


def mixed(policy_loss: Tensor, sft_loss: Tensor, weight: float) -> Tensor:
    """Return (1 − μ)·policy + μ·supervised; linear, so shares of micro-batches may be mixed before their sum."""
    return (1 - weight) * policy_loss + weight * sft_loss


def sft_indices(size: int, batch_size: int, seed: int, step: int) -> NDArray[np.int64]:
    """Return the indices of the supervised examples of step 1, 2, …, (batch_size,).

    Each pass over the data has every example once, in its own shuffled order; a pass may end inside a step. The result
    depends on the arguments alone, so a step can be trained again after a restart.

    Args:
        size: number of examples.
        batch_size: examples per step.
        seed: of the run.
        step: number of the step, from 1.

    Raises:
        ValueError: there are no examples.
    """
    if size < 1:
        raise ValueError("trainer.sft.path: has no examples")
    # places in the sequence of all passes; a pass is shuffled whole, since any of its examples may be asked for
    places = (step - 1) * batch_size + np.arange(batch_size)
    orders = {p: np.random.default_rng([seed, STREAM, p]).permutation(size) for p in np.unique(places // size).tolist()}
    return np.array([orders[place // size][place % size] for place in places.tolist()], dtype=np.int64)
