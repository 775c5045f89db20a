"""Mathematics: comparison of formulas by math-verify, in processes with limits (TRL 1.16 and ms-swift 4.6)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from actors.reward.library.completions import Completion, text_of
from actors.reward.sandbox.verifiers import Verdict, verifiers

SECONDS = 20.0
"""Default limit for an answer. math-verify's own limits come first where they work: 10 s to parse, 5 s to compare."""
LogExtra = Callable[[str, list[Any]], None]


def accuracy(
    prompts: list[Any],
    completions: list[Completion],
    solution: list[str],
    *,
    seconds: float = SECONDS,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float | None]:
    """Score 1 if the answer equals the solution as a formula, else 0; None if the solution is no formula (TRL).

    An answer that takes longer than `seconds`, or that ends the process that reads it, scores 0.
    """
    pairs = [(str(gold), text_of(c)) for c, gold in zip(completions, solution, strict=True)]
    return _rewards(verifiers().verify(pairs, "trl", seconds), solution, log_extra)


def reasoning_accuracy(
    prompts: list[Any],
    completions: list[Completion],
    solution: list[str],
    *,
    reasoning_delimiters: Sequence[str] = ("</think>",),
    seconds: float = SECONDS,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> list[float | None]:
    """Score as `accuracy`, of the text after the last delimiter alone; 0 for an answer without one (TRL).

    The first delimiter of the list that an answer has is the one that counts.
    """
    verdicts: list[Verdict] = [Verdict(0.0, "[incomplete reasoning]", "[incomplete reasoning]")] * len(completions)
    pairs = {}
    for i, (completion, gold) in enumerate(zip(completions, solution, strict=True)):
        text = text_of(completion)
        delimiter = next((one for one in reasoning_delimiters if one in text), None)
        if delimiter is not None:
            pairs[i] = (str(gold), text.rpartition(delimiter)[2])
    for i, verdict in zip(pairs, verifiers().verify(list(pairs.values()), "trl", seconds), strict=True):
        verdicts[i] = verdict
    return _rewards(verdicts, solution, log_extra)


def accuracy_swift(
    prompts: list[Any], completions: list[Completion], solution: list[str], *, seconds: float = SECONDS, **_: Any
) -> list[float | None]:
    """Score 1 if the answer, or its part in `<answer>`, equals the solution as a formula, else 0 (ms-swift: accuracy).

    A solution that is no formula scores 0 too, unlike in `accuracy`.
    """
    pairs = [(str(gold), text_of(c)) for c, gold in zip(completions, solution, strict=True)]
    return [verdict.reward or 0.0 for verdict in verifiers().verify(pairs, "swift", seconds)]


def cosine_scaled(
    prompts: list[Any],
    completions: list[Completion],
    solution: list[str],
    completion_ids: list[list[int]],
    *,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    seconds: float = SECONDS,
    **_: Any,
) -> list[float | None]:
    """Score a right answer from max to min_value_correct, a wrong one from min to max_value_wrong, by length (TRL).

    The way between them is half a cosine over the length ÷ max_len, which stays at 1 beyond max_len. None where
    `accuracy` has None.
    """
    scores: list[float | None] = []
    found = accuracy(prompts, completions, solution, seconds=seconds)
    for correct, ids in zip(found, completion_ids, strict=True):
        at_start = max_value_correct if correct else min_value_wrong
        at_end = min_value_correct if correct else max_value_wrong
        score = _cosine(min(len(ids) / max_len, 1.0), at_start, at_end)
        scores.append(None if correct is None else score)
    return scores


def cosine_swift(
    prompts: list[Any],
    completions: list[Completion],
    solution: list[str],
    completion_ids: list[list[int]],
    *,
    cosine_max_len: int,
    cosine_min_len_value_wrong: float = -0.5,
    cosine_max_len_value_wrong: float = 0.0,
    cosine_min_len_value_correct: float = 1.0,
    cosine_max_len_value_correct: float = 0.5,
    seconds: float = SECONDS,
    **_: Any,
) -> list[float | None]:
    """Score by half a cosine over the length, from the value at length 0 to that at cosine_max_len (ms-swift: cosine).

    Right is what `accuracy_swift` says. Beyond cosine_max_len the cosine turns back.
    """
    found = accuracy_swift(prompts, completions, solution, seconds=seconds)
    scores: list[float | None] = []
    for correct, ids in zip(found, completion_ids, strict=True):
        at_start = cosine_min_len_value_correct if correct else cosine_min_len_value_wrong
        at_end = cosine_max_len_value_correct if correct else cosine_max_len_value_wrong
        scores.append(_cosine(len(ids) / cosine_max_len, at_start, at_end))
    return scores


def _cosine(progress: float, at_start: float, at_end: float) -> float:
    return at_end + 0.5 * (at_start - at_end) * (1.0 + math.cos(progress * math.pi))


def _rewards(verdicts: list[Verdict], solution: list[str], log_extra: LogExtra | None) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [verdict.reward for verdict in verdicts]
