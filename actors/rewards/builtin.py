"""Reward functions that ship. Each is `f(prompts, completions, **columns) -> list[float | None]`, as TRL calls them.

Prompts and completions are text, or lists of messages for chat prompts; columns are one value per completion.
"""

import re
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


BUILTIN = {function.__name__: function for function in (exact_match, characters_in_place, final_number)}
