"""Reward functions that ship. Each is `f(prompts, completions, **columns) -> list[float | None]`, as TRL calls them.

Prompts and completions are text, or lists of messages for chat prompts; columns are one value per completion. What a
function takes by keyword alone comes from its `kwargs`; lengths are tokens.
"""

import re
from collections.abc import Callable
from typing import Any

Completion = str | list[dict[str, Any]]


def text_of(completion: Completion) -> str:
    """The text that the model wrote."""
    if isinstance(completion, str):
        return completion
    return "".join(str(turn.get("content") or "") for turn in completion if turn.get("role") == "assistant")


def exact_match(prompts: list[Any], completions: list[Completion], answer: list[Any], **_: Any) -> list[float | None]:
    """1 where the completion is the answer, else 0; surrounding white space aside."""
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def characters_in_place(
    prompts: list[Any], completions: list[Completion], answer: list[str], **_: Any
) -> list[float | None]:
    """Fraction of characters right in place: matches by position ÷ the longer of answer and completion."""
    return [_fraction_in_place(text_of(c), a) for c, a in zip(completions, answer, strict=True)]


def _fraction_in_place(text: str, answer: str) -> float:
    matches = sum(a == b for a, b in zip(text, answer, strict=False))
    return matches / max(len(text), len(answer), 1)


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(prompts: list[Any], completions: list[Completion], answer: list[Any], **_: Any) -> list[float | None]:
    """1 where the last number of the completion equals that of the answer (GSM8K: the one after `####`), else 0.

    None where the answer has no number: the function does not apply to that row.
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        target = last_number(str(expected))
        found = last_number(text_of(completion))
        scores.append(None if target is None else float(found is not None and abs(found - target) < 1e-6))
    return scores


def last_number(text: str) -> float | None:
    """The last number in a text; of GSM8K's `... #### 1,234` it is 1234."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def unmeasured(prompts: list[Any], completions: list[Completion], **_: Any) -> list[float | None]:
    """None for all: what `eval.exact_match: null` stands for."""
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
    """0 up to max_tokens − overlong_tokens, from there falling by factor ÷ overlong_tokens per token.

    min(−(length − (max_tokens − overlong_tokens)) ÷ overlong_tokens · factor, 0), without a floor (AReaL; ms-swift's
    soft_overlong has factor 1). 90 tokens of 100, 20 of them overlong: −0.5.
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
    """0 up to max_tokens − overlong_tokens, falling to −1 at max_tokens, −1 behind it (DAPO, TRL).

    Without overlong_tokens, −1 behind max_tokens and 0 else.
    """
    if not overlong_tokens:
        return [-float(len(ids) > max_tokens) for ids in completion_ids]
    penalties = overlong(prompts, completions, completion_ids, max_tokens=max_tokens, overlong_tokens=overlong_tokens)
    return [max(penalty or 0.0, -1.0) for penalty in penalties]


def length_penalty(
    prompts: list[Any], completions: list[Completion], completion_ids: list[list[int]], *, max_tokens: int, **_: Any
) -> list[float | None]:
    """−length ÷ max_tokens: each token costs the same, and its weight in the sum says how much."""
    return [-len(ids) / max_tokens for ids in completion_ids]


_ALL = (exact_match, characters_in_place, final_number, overlong, soft_overlong, length_penalty)
BUILTIN: dict[str, Callable[..., list[float | None]]] = {function.__name__: function for function in _ALL}
