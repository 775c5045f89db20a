"""Data that changes between two starts of a run (P23)."""

import json
from pathlib import Path

import pytest

from actors.datasets.identity import data_changes, identities
from actors.datasets.jsonl import Jsonl
from schemas.config.data import JsonlConfig

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def data(folder: Path, rows: list[dict[str, str]], blank: str = "") -> dict[str, Jsonl]:
    """An environment of these rows."""
    path = folder / "data.jsonl"
    path.write_text(blank.join(json.dumps(row) + "\n" for row in rows))
    return {"sums": Jsonl(JsonlConfig(type="jsonl", path=str(path)), "train", check=False)}


def test_the_same_rows_are_the_same_data(tmp_path: Path) -> None:
    """However many blank lines there are between them, and wherever the file lies."""
    before = identities(data(tmp_path, ROWS))
    (tmp_path / "elsewhere").mkdir()
    assert data_changes(before, data(tmp_path / "elsewhere", ROWS, blank="\n\n")) == ([], [])


@pytest.mark.parametrize(
    "rows",
    [ROWS[:4], ROWS[::-1], [*ROWS[:2], {"prompt": "2+1=", "answer": "4"}, *ROWS[3:]], [ROWS[4], *ROWS]],
    ids=["one less", "another order", "another answer", "one more in front"],
)
def test_rows_that_change_or_go_make_another_run(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    """Tickets name examples by number: an answer to one of them would be an answer to something else."""
    before = identities(data(tmp_path, ROWS))
    refused, told = data_changes(before, data(tmp_path, rows))
    assert told == []
    (text,) = refused
    assert f"{tmp_path / 'data.jsonl'} is not the data of this run: 5 rows so far, {len(rows)} now" in text
    assert "--fork, or another output_dir" in text


def test_rows_that_are_added_are_told_and_refuse_nothing(tmp_path: Path) -> None:
    """They come behind those that the run has."""
    before = identities(data(tmp_path, ROWS))
    refused, told = data_changes(before, data(tmp_path, [*ROWS, *ROWS]))
    assert refused == []
    assert "has 10 rows, 5 when the run was last started" in told[0]


def test_a_ledger_from_before_data_was_noted_refuses_nothing(tmp_path: Path) -> None:
    """It knows no digest."""
    assert data_changes({}, data(tmp_path, ROWS)) == ([], [])
