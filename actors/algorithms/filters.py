"""What is not fit to learn from: completions that are gibberish, loops or cut off, and groups without a lesson.

Completion filters work where a group is scored, group filters where it settles. By the settlement the payload, whose
digest the witness carries, is what will be trained, so replay needs no filter: a masked token is masked in the payload.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.config.actors import PackerConfig, RewardConfig
from schemas.config.filters import CompletionFilterConfig, GibberishFilterConfig, RepetitionFilterConfig
from schemas.messages import RolloutGroup

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def is_gibberish(
    token_ids_T: NDArray[np.int32], logprobs_T: NDArray[np.float32], config: GibberishFilterConfig, vocab_size: int
) -> bool:
    """Whether some rare token was less likely than chance.

    Vocabulary 152 000, offset 2: chance is ln(1/152 000) = −11.93, so a rare token counts below −13.93.
    """
    unlikely_T = logprobs_T < -np.log(vocab_size) - config.logprob_offset
    return bool((unlikely_T & (token_ids_T > config.token_id_threshold)).any())


def is_repetition(logprobs_T: NDArray[np.float32], config: RepetitionFilterConfig) -> bool:
    """Whether the policy was sure of `window` tokens in a row: the longest stretch between two that it was not."""
    unsure = np.flatnonzero(logprobs_T <= np.log(config.prob_threshold))
    bounds = np.concatenate([[-1], unsure, [logprobs_T.size]])
    return bool((np.diff(bounds) - 1).max() >= config.window)


def filter_completions(group: RolloutGroup, config: RewardConfig, vocab_size: int) -> tuple[dict[str, Bools], Bools]:
    """What the filters find in a group.

    Returns:
        by filter which completions it finds, (G,), truncated ones always; and which shall be masked, (G,).
    """
    found = {"truncated": np.array([reason == "length" for reason in group.finish_reasons], np.bool_)}
    masked_G = found["truncated"] & config.mask_truncated_completions
    for one in config.filters:
        found_G = np.array([_finds(one, vocab_size, *tokens) for tokens in _sampled(group)], np.bool_)
        found[one.type] = found.get(one.type, False) | found_G
        masked_G |= found_G & one.enforce
    return found, masked_G


def _finds(
    config: CompletionFilterConfig, vocab_size: int, token_ids_T: NDArray[np.int32], logprobs_T: NDArray[np.float32]
) -> bool:
    if isinstance(config, GibberishFilterConfig):
        return is_gibberish(token_ids_T, logprobs_T, config, vocab_size)
    return is_repetition(logprobs_T, config)


def _sampled(group: RolloutGroup) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Ids and logprobs of the tokens that the policy sampled, by completion: others end no row across turns."""
    for start, end in pairwise(group.completion_offsets.tolist()):
        sampled_T = group.loss_mask[start:end] > 0
        yield group.token_ids[start:end][sampled_T], group.logprobs[start:end][sampled_T]


def mask_completions(loss_mask_N: NDArray[np.uint8], offsets: NDArray[np.int64], masked_G: Bools) -> NDArray[np.uint8]:
    """The loss mask without these completions: [1, 1, 0, 1], offsets [0, 2, 4], the first masked → [0, 0, 0, 1]."""
    return np.where(np.repeat(masked_G, np.diff(offsets)), np.uint8(0), loss_mask_N)


def rejected_as(rewards_G: Floats, config: PackerConfig) -> str:
    """Why a group is not worth training on, in the words of the ledger; empty where it is.

    Rewards of completions that could not be scored (NaN) are left out; a group with none left has no variance.

        [1, 1]   too_easy (online_difficulty_filtering), else zero_variance (dynamic_sampling)
        [.5, .5] zero_variance      [1, 0] trained      [2, 0] too_easy: its mean is 1
    """
    scores: Sequence[float] = rewards_G[~np.isnan(rewards_G)].tolist()
    if scores and config.online_difficulty_filtering:
        mean = sum(scores) / len(scores)
        if mean in (0.0, 1.0):
            return "too_easy" if mean else "too_hard"
    return "zero_variance" if config.dynamic_sampling and len(set(scores)) < 2 else ""
