"""The notation of splits, compared with `datasets` where both know it."""

import pytest

from schemas.config.splits import parse_split


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[3:]", range(3, 10)),
        ("train[-3:]", range(7, 10)),
        ("train[2:4]", range(2, 4)),
        ("train[:90%]", range(9)),
        ("train[90%:]", range(9, 10)),
        ("train[25%:75%]", range(2, 8)),
        ("train[:-20%]", range(8)),
        ("train[:100]", range(10)),
        ("train[8:4]", range(0)),
    ],
)
def test_a_part_names_rows(text: str, rows: range) -> None:
    """By number or percentage, from either end; what lies behind the end is no row."""
    (part,) = parse_split(text)
    assert part.name == "train"
    assert list(part.rows(10)) == list(rows)


def test_parts_are_joined_with_a_plus() -> None:
    """In the order given."""
    parts = parse_split("train[:2] + validation.x")
    assert [(part.name, list(part.rows(3))) for part in parts] == [("train", [0, 1]), ("validation.x", [0, 1, 2])]


@pytest.mark.parametrize("text", ["train[", "train[5]", "[:3]", "train[a:]", "train+", "", "train[:1.5]"])
def test_another_notation_is_refused_with_examples(text: str) -> None:
    """The text shows how to write one."""
    with pytest.raises(ValueError, match="is no split; write train"):
        parse_split(text)


def test_more_than_all_rows_is_refused() -> None:
    """A percentage above 100 is a mistake, while a number above the rows is a limit."""
    with pytest.raises(ValueError, match="120% is more than all rows"):
        parse_split("train[:120%]")


@pytest.mark.parametrize("num_rows", [1, 7, 10, 1319, 7473])
@pytest.mark.parametrize("text", ["train[:10%]", "train[10%:33%]", "train[-7%:]", "train[5:-1]", "train[:50%]"])
def test_percentages_are_rounded_as_in_datasets(text: str, num_rows: int) -> None:
    """A run on a slice of the hub has the rows that other trainers have."""
    from datasets import ReadInstruction

    (absolute,) = ReadInstruction.from_spec(text).to_absolute({"train": num_rows})
    (part,) = parse_split(text)
    rows = part.rows(num_rows)
    assert list(range(num_rows)[absolute.from_ : absolute.to]) == list(rows)
