"""Formats, choices and repetitions of texts."""

import functools
import importlib
import json
import re
from typing import Any

from actors.reward.library.completions import Completion, text_of

THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
THINK_AND_ANSWER = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL | re.MULTILINE)
REACT = re.compile(r"^<think>.*?</think>\s*Action:.*?Action Input:.*?$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
# "the answer is (B)", "Answer: C", "\boxed{D}", and a letter alone on the last line
ANNOUNCED = r"(?:answer|option|choice)\b(?:\s+is)?\s*[:=]?\s*[*(\[{{\"']*([{letters}])\b"
BOXED = r"\\boxed\{{\s*(?:\\text\{{)?\(?([{letters}])\b"
ALONE = r"^\W*([{letters}])\W*$"


def think_format(prompts: list[Any], completions: list[Completion], **_: Any) -> list[float | None]:
    """Score 1 if the text starts with a single `<think>` that is closed, else 0 (TRL: think_format_reward)."""
    return [float(THINK.match(text_of(c)) is not None) for c in completions]


def format_swift(prompts: list[Any], completions: list[Completion], **_: Any) -> list[float | None]:
    """Score 1 for `<think>…</think>`, `<answer>…</answer>` and nothing behind them, else 0 (ms-swift: format)."""
    return [float(THINK_AND_ANSWER.match(text_of(c)) is not None) for c in completions]


def react_format(prompts: list[Any], completions: list[Completion], **_: Any) -> list[float | None]:
    """Score 1 for `<think>…</think>`, `Action:` and `Action Input:` in this order, else 0 (ms-swift)."""
    return [float(REACT.match(text_of(c)) is not None) for c in completions]


def choice(
    prompts: list[Any], completions: list[Completion], answer: list[Any], *, letters: str = "ABCDEFGHIJ", **_: Any
) -> list[float | None]:
    r"""Score 1 if the last letter that the text names as its choice is the answer's, else 0.

    A choice is `\boxed{B}`, `answer is (B)`, `Answer: B`, or a letter alone on the last line. Score None if the answer
    is none of the letters.
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        target = str(expected).strip(" ().").upper()
        known = len(target) == 1 and target in letters
        scores.append(float(chosen_letter(text_of(completion), letters) == target) if known else None)
    return scores


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter that a text names as its choice, None without one."""
    boxed, announced, alone = _choice_patterns(letters)
    if found := boxed.findall(text):
        return str(found[-1])
    if found := announced.findall(text):
        return str(found[-1])
    lines = text.strip().splitlines()
    last = alone.match(lines[-1]) if lines else None
    return last[1] if last else None


@functools.cache
def _choice_patterns(letters: str) -> list[re.Pattern[str]]:
    inside = re.escape(letters)
    words = re.compile(ANNOUNCED.format(letters=inside).replace("answer|option|choice", "(?i:answer|option|choice)"))
    return [re.compile(BOXED.format(letters=inside)), words, re.compile(ALONE.format(letters=inside))]


def json_schema(prompts: list[Any], completions: list[Completion], schema: list[Any], **_: Any) -> list[float | None]:
    """Score 1 if the text, or its last fenced block, is JSON that fits the schema, else 0.

    A schema is a map, or its text. Set a schema for all rows with `kwargs`.

    Raises:
        ValueError: a schema is no JSON Schema.
    """
    # one schema in kwargs, or a column with one per completion
    schemas = schema if isinstance(schema, list) else [schema] * len(completions)
    return [float(_fits(text_of(c), one)) for c, one in zip(completions, schemas, strict=True)]


def _fits(text: str, schema: Any) -> bool:
    jsonschema = importlib.import_module("jsonschema")
    try:
        wanted = json.loads(schema) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(wanted, default=jsonschema.Draft202012Validator)
        kind.check_schema(wanted)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ValueError(f"schema: is no JSON Schema: {str(error).splitlines()[0]}") from error
    blocks = FENCE.findall(text)
    try:
        value = json.loads(blocks[-1] if blocks else text, parse_constant=_refuse)
        return bool(kind(wanted).is_valid(value))
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def repetition_penalty(
    prompts: list[Any],
    completions: list[Completion],
    completion_ids: list[list[int]],
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    **_: Any,
) -> list[float | None]:
    """Score max_penalty times the share of repeated n-grams of tokens; 0 below ngram_size tokens (TRL)."""
    return [_repetition(ids, ngram_size, max_penalty) for ids in completion_ids]


def repetition_swift(
    prompts: list[Any],
    completions: list[Completion],
    *,
    repetition_n_grams: int = 3,
    repetition_max_penalty: float = -1.0,
    **_: Any,
) -> list[float | None]:
    """Score repetition_max_penalty times the share of repeated n-grams of words, in lower case (ms-swift)."""
    words = [text_of(completion).lower().split() for completion in completions]
    return [_repetition(one, repetition_n_grams, repetition_max_penalty) for one in words]


def _repetition(items: list[Any], size: int, penalty: float) -> float:
    ngrams = list(zip(*(items[i:] for i in range(size)), strict=False))
    return (1 - len(set(ngrams)) / len(ngrams)) * penalty if ngrams else 0.0
