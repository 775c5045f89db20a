"""Filters: completions that are gibberish, repetitive or truncated, and groups without a learning signal.

Completion filters act in the reward actor and change the payload's loss mask; group filters act when the packer settles
the group. The settled payload (with its digest in the witness) is the data that is trained, so a replay needs no
filter.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.config.actors import PackerConfig, RewardConfig
from schemas.config.filters import GibberishFilterConfig, RepetitionFilterConfig
from schemas.messages import RolloutGroup

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def is_gibberish(
    token_ids_T: NDArray[np.int32], logprobs_T: NDArray[np.float32], config: GibberishFilterConfig, vocab_size: int
) -> bool:
    """Return whether a rare token (id above the threshold) was less likely than chance by more than the offset.

    Vocabulary 152 000, offset 2: chance is ln(1/152 000) = −11.93, so a rare token counts below a logprob of −13.93.
    Source: arXiv 2510.02387, §5.2; prime-rl.
    """
    # −ln(vocabulary) is the logprob of every token under a uniform distribution
    unlikely_T = logprobs_T < -np.log(vocab_size) - config.logprob_offset
    return bool((unlikely_T & (token_ids_T > config.token_id_threshold)).any())


def is_repetition(logprobs_T: NDArray[np.float32], config: RepetitionFilterConfig) -> bool:
    """Return whether `window` tokens in a row had a probability above the threshold, the mark of a loop.

    The longest such run is the greatest gap between two tokens at or below the threshold.
    """
    unsure = np.flatnonzero(logprobs_T <= np.log(config.prob_threshold))
    # both ends of the completion end a run too
    bounds = np.concatenate([[-1], unsure, [logprobs_T.size]])
    return bool((np.diff(bounds) - 1).max() >= config.window)


def filter_completions(group: RolloutGroup, config: RewardConfig, vocab_size: int) -> tuple[dict[str, Bools], Bools]:
    """Apply the completion filters to a group.

    Args:
        group: completions as sampled.
        config: filters, and mask_truncated_completions.
        vocab_size: size of the vocabulary, for the gibberish filter.

    Returns:
        Completions found by each filter, name → (G,) bool (`truncated` is always measured), and the completions to
        mask, (G,) bool.
    """
    found = {"truncated": group.truncated_G}
    masked_G = found["truncated"] & config.mask_truncated_completions
    # ids and logprobs of the tokens sampled by the policy: tool output must not interrupt a repetition across turns
    sampled, sampled_N = [], group.sampled_N
    for start, end in pairwise(group.completion_offsets.tolist()):
        sampled_T = sampled_N[start:end]
        sampled.append((group.token_ids[start:end][sampled_T], group.logprobs[start:end][sampled_T]))
    for one in config.filters:
        found_G = np.array(
            [
                is_gibberish(token_ids_T, logprobs_T, one, vocab_size)
                if isinstance(one, GibberishFilterConfig)
                else is_repetition(logprobs_T, one)
                for token_ids_T, logprobs_T in sampled
            ],
            np.bool_,
        )
        # with several filters of a type, a completion counts once
        found[one.type] = found.get(one.type, False) | found_G
        masked_G |= found_G & one.enforce
    return found, masked_G


def mask_completions(loss_mask_N: NDArray[np.uint8], offsets: NDArray[np.int64], masked_G: Bools) -> NDArray[np.uint8]:
    """Return the loss mask with some completions set to 0, (N,).

    Mask [1, 1, 0, 1], offsets [0, 2, 4], the first completion masked → [0, 0, 0, 1].
    """
    return np.where(np.repeat(masked_G, np.diff(offsets)), np.uint8(0), loss_mask_N)


def rejected_as(rewards_G: Floats, config: PackerConfig) -> str:
    """Return the reason for which a group filter drops a group, as the ledger stores it; empty: the group is kept.

    Unscorable completions (NaN) are left out; a group without any other has no variance.

        [1, 1]   too_easy (online_difficulty_filtering), else zero_variance (dynamic_sampling)
        [.5, .5] zero_variance      [1, 0] kept      [2, 0] too_easy: its mean is 1
    """
    scores: Sequence[float] = rewards_G[~np.isnan(rewards_G)].tolist()
    if scores and config.online_difficulty_filtering:
        mean = sum(scores) / len(scores)
        # exactly 0 or 1: for rewards of 0 and 1, all wrong or all right
        if mean in (0.0, 1.0):
            return "too_easy" if mean else "too_hard"
    return "zero_variance" if config.dynamic_sampling and len(set(scores)) < 2 else ""
