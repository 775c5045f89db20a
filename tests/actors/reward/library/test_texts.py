"""Formats, choices, repetitions and lengths: values of TRL 1.16 and ms-swift 4.6, computed by their own functions."""

from typing import Any

import pytest

from actors.reward.builtin import BUILTIN, soft_overlong_punishment, soft_overlong_swift
from actors.reward.library.texts import chosen_letter, json_schema
from actors.reward.lookup import load_function
from schemas.errors import ConfigError

TEXTS = [
    "<think>a</think>b",
    "<think>a<think>b</think>c",
    "a<think>b</think>c",
    "<think>x</think>\n<answer>y</answer>",
    "<think>x</think><answer>y</answer>\n",
    "<think>x</think>\nAction: f\nAction Input: {}",
    "",
]
IDS = [[1, 2, 3, 4], [5] * 5, [], [1], [1, 2, 1, 2, 1]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("think_format", [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
        ("format_swift", [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        ("react_format", [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
    ],
)
def test_formats_are_those_of_the_origins(name: str, values: list[float]) -> None:
    """A text and a chat with the same text have the same value."""
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert BUILTIN[name](TEXTS, TEXTS) == values
    assert BUILTIN[name](TEXTS, chats) == values


def test_the_penalty_of_repeated_tokens_is_trls() -> None:
    """Pairs of tokens, with the default penalty −1 and with −0.5."""
    function = BUILTIN["repetition_penalty"]
    assert function([], [], IDS, ngram_size=2) == [0.0, -0.75, 0.0, 0.0, -0.5]
    assert function([], [], IDS, ngram_size=2, max_penalty=-0.5) == [0.0, -0.375, 0.0, 0.0, -0.25]


def test_the_penalty_of_repeated_words_is_ms_swifts() -> None:
    """Three words in a row, in lower case."""
    texts = ["a b c a b c a b", "", "a b", "A b c a B c"]
    assert BUILTIN["repetition_swift"](texts, texts) == [-0.5, 0.0, 0.0, -0.25]


def test_the_penalties_of_long_answers_have_the_origins_keys() -> None:
    """TRL's ends at −1; ms-swift's has no end."""
    ids = [[1] * length for length in (40, 50, 60, 70, 100)]
    trl = soft_overlong_punishment([], [], ids, max_completion_len=60, soft_punish_cache=20)
    swift = soft_overlong_swift([], [], ids, soft_max_length=60, soft_cache_length=20)
    assert trl == [0.0, -0.5, -1.0, -1.0, -1.0]
    assert swift == [0.0, -0.5, -1.0, -1.5, -3.0]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("I pick \\boxed{B}.", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("Answer: A? No, the answer is (D).", "D"),
        ("the correct option is **B**", "B"),
        ("some words\n(C)", "C"),
        ("B\nis not it", None),
        ("A cat has nine lives", None),
        ("the answer is Apple", None),
        ("", None),
    ],
)
def test_the_last_choice_named_counts(text: str, letter: str | None) -> None:
    """A box goes first, then words about an answer, then a letter alone on the last line."""
    assert chosen_letter(text, "ABCD") == letter


def test_a_choice_is_compared_with_the_answers_letter() -> None:
    """An answer that is no letter of the choice does not apply."""
    texts = ["Answer: B"] * 4
    assert BUILTIN["choice"](texts, texts, ["B", "(b)", "C", "Paris"]) == [1.0, 1.0, 0.0, None]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_json_is_held_against_its_schema() -> None:
    """The whole text or its last fenced block; NaN is no JSON; nesting without end is wrong, and no error."""
    pytest.importorskip("jsonschema")
    texts = ['{"n": 1}', '{"n": "1"}', "n: 1", 'So:\n```json\n{"n": 2}\n```', '{"n": NaN}', "[" * 100_000, '{"n": 1} x']
    assert json_schema(texts, texts, SCHEMA) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]  # type: ignore[arg-type]
    columns: list[Any] = [SCHEMA, '{"type": "string"}']
    assert json_schema(["", ""], ['{"n": 1}', '{"n": 1}'], columns) == [1.0, 0.0]


def test_a_schema_that_is_none_is_an_error_of_the_data() -> None:
    """Not of the answer, so it is not scored 0."""
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match="schema: is no JSON Schema"):
        json_schema(["p"], ["{}"], ['{"type": "nothing"}'])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("format", "here it is think_format (TRL) or format_swift (ms-swift)"),
        ("accuracy_reward", "here it is accuracy;"),
        ("cosine", "here it is cosine_swift (ms-swift) or cosine_scaled (TRL)"),
    ],
)
def test_names_of_other_libraries_lead_to_the_names_here(name: str, words: str) -> None:
    """The same word has another formula elsewhere."""
    with pytest.raises(ConfigError) as raised:
        load_function(name, "reward.functions.0.path")
    assert words in str(raised.value)


def test_a_missing_package_is_named_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra to install is in the error."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("accuracy", "json_schema"):
        with pytest.raises(ConfigError, match=r"needs the package \w+; install grpo-actors\[rewards\]"):
            load_function(name, "reward.functions.0.path")
