"""Reward functions included in the package: `f(prompts, completions, **columns) -> list[float | None]`, as in TRL.

Prompts and completions are texts, or lists of messages for chat prompts. Each column has a value per completion.
Keyword-only arguments come from the function's `kwargs` in the configuration. Lengths are in tokens.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from actors.reward import judges
from actors.reward.library import mathematics, programs, texts
from actors.reward.library.completions import Completion, text_of

__all__ = ["BUILTIN", "EXTRAS", "NAMES_ELSEWHERE", "Completion", "text_of"]


def exact_match(prompts: list[Any], completions: list[Completion], answer: list[Any], **_: Any) -> list[float | None]:
    """Score 1 if the completion equals the answer, else 0. White space at both ends is ignored."""
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def characters_in_place(
    prompts: list[Any], completions: Sequence[Completion], answer: list[str], **_: Any
) -> list[float | None]:
    """Score the fraction of equal characters by position: matches ÷ the longer of answer and completion (0 to 1)."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        text = text_of(completion)
        # not strict: characters beyond the end of the shorter text match nothing
        matches = sum(a == b for a, b in zip(text, expected, strict=False))
        scores.append(matches / max(len(text), len(expected), 1))
    return scores


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(prompts: list[Any], completions: list[Completion], answer: list[Any], **_: Any) -> list[float | None]:
    """Score 1 if the last numbers of completion and answer are equal, else 0.

    For GSM8K the last number of the answer is the number after `####`. Score None if the answer has no number: the
    function does not apply to that row.
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        target = last_number(str(expected))
        found = last_number(text_of(completion))
        # numbers are equal below 1e-6, so "3.0" counts as "3"
        scores.append(None if target is None else float(found is not None and abs(found - target) < 1e-6))
    return scores


def last_number(text: str) -> float | None:
    """Return the last number in a text, None without any; 1234 for GSM8K's `... #### 1,234`."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def unmeasured(prompts: list[Any], completions: list[Completion], **_: Any) -> list[float | None]:
    """Score None for all completions: the function behind `eval.exact_match: null`."""
    return [None] * len(completions)


def overlong(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    max_tokens: int,
    overlong_tokens: int,
    factor: float = 1.0,
    **_: Any,
) -> list[float | None]:
    """Score 0 up to max_tokens − overlong_tokens, then less by factor ÷ overlong_tokens for each further token.

    The formula is min(−(length − (max_tokens − overlong_tokens)) ÷ overlong_tokens · factor, 0), without a lower limit
    (AReaL; ms-swift's soft_overlong with factor 1). Example: 90 tokens with max_tokens 100 and overlong_tokens 20 score
    −0.5.
    """
    allowed = max_tokens - overlong_tokens
    return [min(-(len(ids) - allowed) / overlong_tokens * factor, 0.0) for ids in completion_ids]


def soft_overlong(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    max_tokens: int,
    overlong_tokens: int,
    **_: Any,
) -> list[float | None]:
    """Score 0 up to max_tokens − overlong_tokens, then linearly down to −1 at max_tokens, then −1 (DAPO, TRL).

    With overlong_tokens 0, score −1 above max_tokens and 0 otherwise.
    """
    if not overlong_tokens:
        return [-float(len(ids) > max_tokens) for ids in completion_ids]
    penalties = overlong(prompts, completions, completion_ids, max_tokens=max_tokens, overlong_tokens=overlong_tokens)
    # `or`: the type allows None, which never comes
    return [max(penalty or 0.0, -1.0) for penalty in penalties]


def length_penalty(
    prompts: list[Any], completions: list[Completion], completion_ids: list[list[int]], *, max_tokens: int, **_: Any
) -> list[float | None]:
    """Score −length ÷ max_tokens: each token costs the same. Set the strength with the function's weight."""
    return [-len(ids) / max_tokens for ids in completion_ids]


def soft_overlong_punishment(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    max_completion_len: int,
    soft_punish_cache: int,
    **_: Any,
) -> list[float | None]:
    """Score as `soft_overlong`, with the keys of TRL's get_soft_overlong_punishment."""
    return soft_overlong(
        prompts, completions, completion_ids, max_tokens=max_completion_len, overlong_tokens=soft_punish_cache
    )


def soft_overlong_swift(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    soft_max_length: int,
    soft_cache_length: int,
    **_: Any,
) -> list[float | None]:
    """Score as `overlong` with factor 1, with the keys of ms-swift's soft_overlong, which has no lower limit."""
    return overlong(prompts, completions, completion_ids, max_tokens=soft_max_length, overlong_tokens=soft_cache_length)


_ALL: tuple[Callable[..., Any], ...] = (
    exact_match,
    characters_in_place,
    final_number,
    overlong,
    soft_overlong,
    soft_overlong_punishment,
    soft_overlong_swift,
    length_penalty,
    mathematics.accuracy,
    mathematics.accuracy_swift,
    mathematics.reasoning_accuracy,
    mathematics.cosine_scaled,
    mathematics.cosine_swift,
    texts.think_format,
    texts.format_swift,
    texts.react_format,
    texts.choice,
    texts.json_schema,
    texts.repetition_penalty,
    texts.repetition_swift,
    programs.code_tests,
    judges.llm_judge,
    judges.relative_judge,
)
BUILTIN: dict[str, Callable[..., Any]] = {function.__name__: function for function in _ALL}
EXTRAS = dict.fromkeys(
    ("accuracy", "accuracy_swift", "reasoning_accuracy", "cosine_scaled", "cosine_swift"), "math_verify"
) | {"json_schema": "jsonschema"}
"""Packages of the extra `rewards` that functions import, by the function's name."""
NAMES_ELSEWHERE = {
    "format": "think_format (TRL) or format_swift (ms-swift)",
    "cosine": "cosine_swift (ms-swift) or cosine_scaled (TRL)",
    "repetition": "repetition_swift (ms-swift) or repetition_penalty (TRL)",
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
    "get_cosine_scaled_reward": "cosine_scaled",
    "get_repetition_penalty_reward": "repetition_penalty",
    "get_soft_overlong_punishment": "soft_overlong_punishment",
}
"""Names of other libraries, with the names here: the same word means different formulas there."""
