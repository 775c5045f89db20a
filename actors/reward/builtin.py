"""Reward functions included in the package: `f(prompts, completions, **columns) -> list[float | None]`, as in TRL.

Prompts and completions are texts, or lists of messages for chat prompts. Each column has a value per completion.
Keyword-only arguments come from the function's `kwargs` in the configuration. Lengths are in tokens.
"""

import re
from collections.abc import Callable
from typing import Any

Completion = str | list[dict[str, Any]]


def text_of(completion: Completion) -> str:
    """Return the text written by the model; of a chat completion, the texts of all assistant messages, joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(turn.get("content") or "") for turn in completion if turn.get("role") == "assistant")


def exact_match(prompts: list[Any], completions: list[Completion], answer: list[Any], **_: Any) -> list[float | None]:
    """Score 1 if the completion equals the answer, else 0. White space at both ends is ignored."""
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def characters_in_place(
    prompts: list[Any], completions: list[Completion], answer: list[str], **_: Any
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


_ALL = (exact_match, characters_in_place, final_number, overlong, soft_overlong, length_penalty)
BUILTIN: dict[str, Callable[..., list[float | None]]] = {function.__name__: function for function in _ALL}
