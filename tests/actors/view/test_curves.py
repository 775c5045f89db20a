"""Curves: columns of metrics.jsonl as the file grows, is cut, and is thinned."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from actors.view.curves import Curves


def write(path: Path, lines: list[dict[str, Any]], mode: str = "w") -> None:
    """Write lines of metrics.jsonl."""
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def line(step: int, **values: Any) -> dict[str, Any]:
    """A step's line."""
    return {"step": step, "loss": step / 10, "weights": f"digest{step}"} | values


@pytest.mark.parametrize("steps", [0, 1, 1000])
def test_columns_are_those_of_the_file(tmp_path: Path, steps: int) -> None:
    """All steps, null where a line has no value; texts are no columns."""
    write(tmp_path / "m", [line(n, odd=n if n % 2 else None) for n in range(1, steps + 1)])
    curves = Curves(tmp_path / "m")
    curves.update()
    table = curves.table(["loss", "odd", "unknown"], 2000)
    assert table["steps"] == list(range(1, steps + 1))
    assert (table["last"], curves.names) == (steps, ["loss", "odd"][: 2 * bool(steps)])
    if steps:
        assert table["columns"]["loss"] == {"mean": [n / 10 for n in range(1, steps + 1)]}
        assert table["columns"]["odd"]["mean"] == [n if n % 2 else None for n in range(1, steps + 1)]
        assert curves.line(steps) == {"loss": steps / 10, "weights": f"digest{steps}"} | (
            {"odd": 1.0} if steps == 1 else {}
        )
    assert curves.line(steps + 1) == {}


def test_no_file_is_a_run_without_steps(tmp_path: Path) -> None:
    """As before the first step."""
    curves = Curves(tmp_path / "m")
    curves.update()
    assert curves.table(["loss"]) == {"steps": [], "columns": {}, "last": 0}
    assert curves.newest("loss", 5) is None


def test_new_lines_are_added_and_lines_cut_off_are_gone(tmp_path: Path) -> None:
    """A rewind cuts the file, and other lines follow."""
    write(tmp_path / "m", [line(n) for n in range(1, 6)])
    curves = Curves(tmp_path / "m")
    curves.update()
    write(tmp_path / "m", [line(6)], "a")
    curves.update()
    assert curves.last == 6
    write(tmp_path / "m", [line(1), line(2, loss=-1.0)])
    curves.update()
    assert curves.table(["loss"])["columns"]["loss"]["mean"] == [0.1, -1.0]


def test_thinned_curves_keep_means_and_extremes(tmp_path: Path) -> None:
    """1000 steps in 10 points of 100; an outlier is in the bounds, and null in no mean."""
    values = [1.0 if n % 100 else (50.0 if n == 300 else None) for n in range(1, 1001)]
    write(tmp_path / "m", [line(n + 1, x=value) for n, value in enumerate(values)])
    curves = Curves(tmp_path / "m")
    curves.update()
    table = curves.table(["x"], 10)
    assert table["steps"] == list(range(100, 1001, 100))
    column = table["columns"]["x"]
    assert column["low"] == [1.0] * 10
    assert column["high"] == [50.0 if n == 2 else 1.0 for n in range(10)]
    assert column["mean"][2] == pytest.approx((99 + 50) / 100)
    assert column["mean"][0] == 1.0


def test_a_column_that_starts_late_has_no_values_before(tmp_path: Path) -> None:
    """As an evaluation's or a new metric's; values of no number are left out."""
    write(tmp_path / "m", [line(1), line(2), line(3, late=7.0, text="x", flag=None), line(4)])
    curves = Curves(tmp_path / "m")
    curves.update()
    assert curves.table(["late"])["columns"]["late"]["mean"] == [None, None, 7.0, None]
    assert curves.newest("late", 2) == 7.0
    assert curves.newest("late", 1) is None
    assert not math.isnan(curves.line(3)["late"])
