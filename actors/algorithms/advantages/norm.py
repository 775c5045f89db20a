"""Normalisation (x − mean) ÷ (std + eps), mean and std each over the step, over the group, or absent.

Source: AReaL 1.0.4, `areal/utils/data.py` (Normalization) and `areal/trainer/ppo/actor.py` (reward_norm, adv_norm).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.config.advantages import NormConfig
from schemas.messages import ScoredGroup

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def normalised(values_N: Floats, group_of_N: Ints, config: NormConfig) -> Floats:
    """Return (value − mean) ÷ (std + eps), (N,); without a mean the std is taken about 0.

    [1, 0 | 4, 0] with group means and no division: [½, −½ | 2, −2]; with a std over the batch also ÷ √(8.5 / 3).

    Args:
        values_N: rewards or advantages.
        group_of_N: index of the group of each value.
        config: range of mean and std.
    """
    # labels of the values that share a mean or a std
    levels = {"batch": np.zeros_like(group_of_N), "group": group_of_N}
    centred_N = values_N
    if config.mean_level != "none":
        centred_N = values_N - _means(values_N, levels[config.mean_level], config.mean_leave1out)
    if config.std_level == "none":
        return centred_N
    return _divided(centred_N, _deviations(centred_N, levels[config.std_level], config.std_unbiased) + config.eps)


def _divided(values_N: Floats, divisors_N: Floats) -> Floats:
    """Return the quotients, 0 where the divisor is 0 (all values equal and eps 0)."""
    return np.divide(values_N, divisors_N, out=np.zeros_like(values_N), where=divisors_N > 0)


def with_adv_norm(groups: Sequence[ScoredGroup], scored: Sequence[Bools], config: NormConfig) -> list[ScoredGroup]:
    """Return the groups of a step with advantages per token, normalised over the loss tokens of the step.

    Tokens outside the loss and tokens of unscored completions get 0 and are left out of mean and deviation.

    Args:
        groups: all groups of the step.
        scored: a mask per group, (G,), of the completions with an advantage.
        config: range of mean and deviation.
    """
    sizes = [group.token_ids.size for group in groups]
    active = np.concatenate(
        [(g.loss_mask > 0) & np.repeat(scored_G, g.num_tokens_G) for g, scored_G in zip(groups, scored, strict=True)]
    )
    values = np.concatenate([group.advantages_N for group in groups]).astype(np.float64)
    advantages = np.zeros(values.size)
    advantages[active] = normalised(values[active], np.repeat(np.arange(len(groups)), sizes)[active], config)
    # float32, the dtype of the message, only after all arithmetic in float64
    parts = np.split(advantages.astype(np.float32), np.cumsum(sizes)[:-1])
    return [g.model_copy(update={"token_advantages": part}) for g, part in zip(groups, parts, strict=True)]


ROUNDING = 1e-8
"""Fraction of the mean below which a difference from the mean counts as rounding error. A sum of ten million times 0.1
is off by the fraction 1.6e-10; rewards and logprobs in float32 have a precision of 6e-8."""
Sums = dict[int, tuple[int, float]]
"""Number of values and their total, by label. A label is a group, or 0 for the whole batch."""


def normalised_over_ranks(
    parts: Sequence[tuple[Floats, Ints]], config: NormConfig, share: Callable[[list[Sums]], Sums]
) -> list[Floats]:
    """Normalise values that are spread over several ranks; return this process's parts, each (N,).

    The result equals `normalised` of all ranks' values together.

    Args:
        parts: values and groups of each rank that this process computes for.
        config: range of mean and std.
        share: exchanges sums: takes the sums of these parts, returns the sums over all ranks. Called for the mean,
            then for the deviation, so every rank must call it equally often.
    """
    # only two numbers per label cross the network, never the values
    values, groups = [part[0] for part in parts], [part[1] for part in parts]
    batches = [np.zeros_like(group_of_N) for group_of_N in groups]
    if config.mean_level != "none":
        labels = batches if config.mean_level == "batch" else groups
        sums = share([_sums(v, of) for v, of in zip(values, labels, strict=True)])
        values = [_centred(v, of, sums, config.mean_leave1out) for v, of in zip(values, labels, strict=True)]
    if config.std_level == "none":
        return values
    labels = batches if config.std_level == "batch" else groups
    # squares of centred values, so the std needs no further mean
    sums = share([_sums(v**2, of) for v, of in zip(values, labels, strict=True)])
    stds = []
    for label_of_N in labels:
        found, places_N = np.unique(label_of_N, return_inverse=True)
        by_label = [
            # a single value has no unbiased deviation; 1, as in `_deviations` below
            1.0 if config.std_unbiased and count == 1 else (squares / max(count - config.std_unbiased, 1)) ** 0.5
            for count, squares in (sums[label] for label in found.tolist())
        ]
        stds.append(np.array(by_label, np.float64)[places_N])
    return [_divided(v, std + config.eps) for v, std in zip(values, stds, strict=True)]


def merged(parts: Sequence[Sums]) -> Sums:
    """Add up the sums of all ranks, in the order given: float addition depends on the order, ranks must agree."""
    total: Sums = {}
    for part in parts:
        for label, (count, value) in part.items():
            before = total.get(label, (0, 0.0))
            total[label] = (before[0] + count, before[1] + value)
    return total


def _sums(values_N: Floats, label_of_N: Ints) -> Sums:
    labels, places_N = np.unique(label_of_N, return_inverse=True)
    counts, totals = np.bincount(places_N, minlength=labels.size), np.bincount(places_N, values_N, labels.size)
    return dict(zip(labels.tolist(), zip(counts.tolist(), totals.tolist(), strict=True), strict=True))


def _centred(values_N: Floats, label_of_N: Ints, sums: Sums, leave_one_out: bool) -> Floats:
    """Return value − mean, (N,), with rounding errors of equal values set to 0, or the std would be made of them."""
    labels, places_N = np.unique(label_of_N, return_inverse=True)
    counts_N = np.array([sums[label][0] for label in labels.tolist()], np.int64)[places_N]
    totals_N = np.array([sums[label][1] for label in labels.tolist()], np.float64)[places_N]
    mean_N = totals_N / counts_N
    if leave_one_out:
        # the mean of no other values is 0
        mean_N = np.where(counts_N > 1, (totals_N - values_N) / np.maximum(counts_N - 1, 1), 0.0)
    centred_N = values_N - mean_N
    return np.where(np.abs(centred_N) <= ROUNDING * np.abs(mean_N), 0.0, centred_N)


def _means(values_N: Floats, label_of_N: Ints, leave_one_out: bool) -> Floats:
    """Return the mean of the values with the same label, (N,); with `leave_one_out` without the value itself.

    The mean of no other values is 0. Sums are taken of differences from the first value of the label, so that the mean
    of equal values is exact.
    """
    if values_N.size == 0:  # unique has no first place in nothing
        return values_N
    _, first, label_of_N = np.unique(label_of_N, return_index=True, return_inverse=True)
    shift_N = values_N[first][label_of_N]
    totals_N = np.bincount(label_of_N, values_N - shift_N)[label_of_N]
    counts_N = np.bincount(label_of_N)[label_of_N]
    if not leave_one_out:
        return shift_N + totals_N / counts_N
    others_N = shift_N + (totals_N - (values_N - shift_N)) / np.maximum(counts_N - 1, 1)
    return np.where(counts_N > 1, others_N, 0.0)


def _deviations(centred_N: Floats, label_of_N: Ints, unbiased: bool) -> Floats:
    """Return the deviation of the centred values with the same label, (N,); 1 for a single value if unbiased."""
    if centred_N.size == 0:
        return centred_N
    counts = np.bincount(label_of_N)
    squares = np.bincount(label_of_N, centred_N**2)
    divisors = np.maximum(counts - 1, 1) if unbiased else np.maximum(counts, 1)
    deviations = np.sqrt(squares / divisors)
    return np.where(unbiased & (counts == 1), 1.0, deviations)[label_of_N]
