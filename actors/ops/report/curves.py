"""Curves of a report, the same for the page and for the pictures: evaluations by version, then columns by step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from actors.ops.compare.figures import Evaluated

CURVES = {
    "reward_mean": "sampled reward",
    "entropy": "entropy, nats per token",
    "completion_tokens_mean": "tokens of a completion",
    "lag_max": "lag, versions, largest of a step",
    "grad_norm": "norm of the gradient",
    "mismatch_kl": "mismatch of engine and trainer, KL",
    "seconds_wait_batch": "seconds of a step in which the trainer waits",
    "tokens": "tokens of a step",
}
"""Titles by column of metrics.jsonl, in the order of the page."""


@dataclass(frozen=True)
class Curve:
    """Curve of a report.

    Args:
        name: name for a file: letters, digits, `.`, `_` and `-`; another one for each curve of a run.
        title: heading; may quote a name of the user.
        values: value by step, or by version; at least one.
        is_evaluation: True if the values are few, and by version.
    """

    name: str
    title: str
    values: Mapping[int, float]
    is_evaluation: bool = False


def curves_of(evaluations: Mapping[str, Evaluated], columns: Mapping[str, Mapping[int, float]]) -> list[Curve]:
    """Return the curves that have values.

    Args:
        evaluations: results by name of the evaluation.
        columns: value by step of each column of CURVES.
    """
    found = []
    for number, (label, one) in enumerate(evaluations.items(), 1):
        # the number keeps names apart that differ in other letters alone
        name = f"eval-{number}-{re.sub('[^A-Za-z0-9._-]', '_', label)[:80]}"
        found.append(Curve(name, f"evaluation of {label}, {one.measure}", one.values, is_evaluation=True))
    return found + [Curve(column, CURVES[column], values) for column, values in columns.items() if values]
