"""User functions that benchmarks.cases names by the path of this file: a loss, an advantage, step rewards."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.losses import LossInputs, LossOutput


def policy_gradient(inputs: LossInputs) -> LossOutput:
    """Return −A·logp averaged over the tokens of the step: the plain policy gradient."""
    return LossOutput(-inputs.masked(inputs.advantages_T * inputs.logprobs_T).sum() / inputs.loss_tokens, {})


def ranks(rewards_PG: NDArray[Any], lengths_PG: NDArray[Any]) -> NDArray[Any]:
    """Return each completion's share of lower rewards minus its share of higher rewards: [1, 0, .5] → [1, −1, 0]."""
    beats_PGG = np.sign(rewards_PG[:, :, None] - rewards_PG[:, None, :])
    return np.asarray(beats_PGG.sum(axis=2) / (rewards_PG.shape[1] - 1))


def letters(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[list[tuple[int, float]]]:
    """Return a step per letter, with reward 1 for the right letter; one character is one token.

    No letters: no steps.
    """
    return [
        [(end, float(text[end - 1 : end] == word[end - 1 : end])) for end in range(1, min(len(text), len(ids)) + 1)]
        for text, ids, word in zip(completions, completion_ids, answer, strict=True)
    ]
