import pytest

from actors.reward.builtin import (
    characters_in_place,
    exact_match,
    final_number,
    last_number,
    length_penalty,
    overlong,
    soft_overlong,
    unmeasured,
)


def test_exact_match_ignores_surrounding_space_only() -> None:
    """' 42\\n' is 42; 42.0 is not."""
    assert exact_match(["p"] * 3, [" 42\n", "42.0", ""], answer=["42", "42", "42"]) == [1.0, 0.0, 0.0]


def test_characters_in_place_is_the_fraction_of_the_longer_text() -> None:
    """abcd against abxd: 3 of 4; abcdef against abcd: 4 of 6; nothing against abcd: 0."""
    scores = characters_in_place(["p"] * 4, ["abxd", "abcdef", "", "dcba"], answer=["abcd"] * 4)
    assert scores == [0.75, pytest.approx(4 / 6), 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("… so 5 + 7 = 12", 12),
        ("#### 1,234", 1234),
        ("it is -3.5.", -3.5),
        ("no number", None),
        ("12 apples, 3 pears", 3),
    ],
)
def test_last_number_reads_numbers_as_people_write_them(text: str, number: float | None) -> None:
    """Thousands separators, signs and decimals; a full stop ends a sentence, not a number."""
    assert last_number(text) == number


def test_final_number_scores_gsm8k_and_does_not_apply_without_a_number() -> None:
    """The answer's last number counts; an answer without one makes the function not applicable."""
    answers = ["16 - 3 = 13\n#### 13", "#### 1,000", "none"]
    assert final_number(["p"] * 3, ["13", "it is 1000 dollars", "1"], answer=answers) == [1.0, 1.0, None]


def test_chat_completions_are_read_by_their_text() -> None:
    """A list of messages counts as what the assistant said."""
    assert exact_match([[]], [[{"role": "assistant", "content": "42"}]], answer=["42"]) == [1.0]


def test_unmeasured_applies_to_nothing() -> None:
    """`eval.exact_match: null` gives no value for any completion, whatever the columns."""
    assert unmeasured(["p"] * 2, ["a", "b"], anything=[1, 2]) == [None, None]


IDS = [[0] * length for length in (79, 80, 90, 100, 110)]


def test_overlong_falls_from_where_the_tail_begins_and_has_no_floor() -> None:
    """20 overlong tokens of 100, factor 2: nothing up to 80, −2 · 10/20 at 90, −2 at 100, −3 at 110."""
    arguments = {"completion_ids": IDS, "max_tokens": 100, "overlong_tokens": 20}
    assert overlong([], [], factor=2.0, **arguments) == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert overlong([], [], **arguments) == [0.0, 0.0, -0.5, -1.0, -1.5]


def test_soft_overlong_ends_at_minus_one() -> None:
    """DAPO, equation 13: 90 of 100 tokens with a tail of 20 is −0.5; without a tail there is only too long."""
    assert soft_overlong([], [], IDS, max_tokens=100, overlong_tokens=20) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_overlong([], [], IDS, max_tokens=100, overlong_tokens=0) == [0.0, 0.0, 0.0, 0.0, -1.0]


def test_length_penalty_costs_the_same_for_each_token() -> None:
    """Relative to max_tokens."""
    assert length_penalty([], [], [[1, 2], []], max_tokens=4, answer=["x", "y"]) == [-0.5, 0.0]
