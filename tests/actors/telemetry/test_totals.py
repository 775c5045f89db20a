"""Running totals are what the whole list of lines would give."""

import math
import random
import statistics

from actors.telemetry.totals import NUM_RECENT_LINES, NUM_RECENT_VALUES, Column, StepTotals


def lines(num):
    """Steps whose numbers differ in each, with some null."""
    draw = random.Random(0)
    return [
        {
            "step": step, "time": 10.0 + step, "reward_mean": draw.random() if step != 2 else None, "tokens": 100.0,
            "lag_mean": draw.random(), "lag_max": float(step % 4), "mismatch_kl": None if step == 3 else draw.random(),
            "num_completions": 8.0, "seconds_wait_batch": draw.random(), "seconds_gather": draw.random(),
            "weights": "5e" * 32,
        }
        for step in range(1, num + 1)
    ]  # fmt: skip


def totals_of(told):
    """After these lines."""
    totals = StepTotals()
    for line in told:
        totals.add(line)
    return totals


def test_totals_are_those_of_all_lines_to_the_last_bit():
    """200 lines: means as fmean has them, sums, the maximum, medians; null, missing and words count nowhere."""
    told = lines(200)
    totals = totals_of(told)
    known = [line["mismatch_kl"] for line in told if line["mismatch_kl"] is not None]
    assert totals["mismatch_kl"].mean == statistics.fmean(known)
    assert totals["lag_mean"].mean == statistics.fmean(line["lag_mean"] for line in told)
    assert totals["lag_max"].maximum == 3.0
    assert totals["num_completions"].sum == 1600.0
    assert totals.idle.sum == math.fsum(line["seconds_wait_batch"] for line in told[1:])
    assert totals["seconds_gather"].recent_median == statistics.median(line["seconds_gather"] for line in told)
    assert totals["seconds_publish"].recent_median is None
    assert totals.reward_first == statistics.fmean(told[i]["reward_mean"] for i in (0, 2, 3, 4))
    assert totals.reward_last == statistics.fmean(line["reward_mean"] for line in told[-5:])
    assert totals.newest == told[-1]
    assert totals.per_second("tokens") == 100.0


def test_totals_before_the_first_line_and_after_one_are_none():
    """A mean of nothing, and a rate over no time."""
    totals = StepTotals()
    assert totals.newest == {}
    assert (totals.reward_first, totals.reward_last, totals["lag_mean"].mean) == (None, None, None)
    assert (totals["lag_max"].maximum, totals["num_completions"].sum, totals.per_second("tokens")) == (None, 0.0, None)
    assert totals_of(lines(1)).per_second("tokens") is None
    assert totals_of(lines(1)).idle.sum == 0.0


def test_totals_keep_a_bounded_number_of_lines_and_values():
    """After 3 000 lines: five, twenty, and a thousand values a column; a median is that of the newest thousand."""
    totals = totals_of(lines(3000))
    assert len(totals.first) == 5
    assert len(totals.recent) == NUM_RECENT_LINES
    column = Column()
    for value in range(3 * NUM_RECENT_VALUES):
        column.add(value)
    assert column.recent_median == 2.5 * NUM_RECENT_VALUES - 0.5
    assert column.mean == (3 * NUM_RECENT_VALUES - 1) / 2


def test_column_takes_numbers_and_nothing_else():
    """Neither words nor null nor what JSON does not have."""
    column = Column()
    for value in ("abc", None, math.nan, math.inf, [1], 2, 0.5):
        column.add(value)
    assert (column.sum, column.mean, column.maximum) == (2.5, 1.25, 2)
