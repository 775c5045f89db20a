"""From spans in files to a timeline: clocks, restarts, rows, shares of time."""

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from actors.ops.trace.files import Recorded, Span
from actors.ops.trace.picture import trace_events
from actors.ops.trace.rows import rows_of
from actors.ops.trace.shares import shares_of
from actors.ops.trace.window import index_of, steps_of, window_of
from actors.telemetry import spans as recording
from actors.telemetry.spans import FOLDER, SpanRecorder
from schemas.errors import ConfigError
from tests.actors.ops.trace.timelines import all_spans, made, ten_steps, write_file, write_spans

LINE = [1.0, 0.5, "main", "", "work", 0, {}]


def test_machines_have_clocks_of_their_own_and_meet_on_the_wall_clock(tmp_path: Path) -> None:
    """The monotonic clocks of two machines start at their boots."""
    write_file(tmp_path, "trainer-0", [LINE], machine="a", wall=1000.0)
    write_file(tmp_path, "rollout-0", [LINE], machine="b", wall=500.0)
    assert {span.actor: span.start for span in all_spans(tmp_path).spans} == {"trainer-0": 1001.0, "rollout-0": 501.0}


def test_a_wall_clock_that_was_set_moves_no_span_against_others_of_its_machine(tmp_path: Path) -> None:
    """The newest difference of the clocks holds for all processes of the machine, of any time."""
    write_file(tmp_path, "trainer-0", [LINE], wall=1000.0)
    path = tmp_path / "rollout-0.jsonl"
    path.write_text(
        '{"actor":"rollout-0","pid":1,"machine":"a","wall":2060.0,"monotonic":60.0,"lost":0}\n'
        '[1.0,0.5,"main","","work",0,{}]\n'
    )
    assert [span.start for span in all_spans(tmp_path).spans] == [2001.0, 2001.0]


def test_a_restarted_actor_goes_on_in_the_same_timeline(tmp_path: Path) -> None:
    """Its processes are told apart by their pids; half lines and lines of others are left out."""
    write_file(tmp_path, "reward-0", [LINE], pid=1)
    with (tmp_path / "reward-0.jsonl").open("a") as file:
        file.write('[2.0,0.5,"main","","wo')
        file.write('\n{"actor":"reward-0"}\n[1,2,3]\n"text"\nnull\n')
    write_file(tmp_path, "reward-0", [[5.0, *LINE[1:]]], pid=2)
    (tmp_path / "reward-0.older.jsonl").write_text("[0.5, 0.1]\n")
    found = all_spans(tmp_path)
    assert [span.start for span in found.spans] == [1001.0, 1005.0]
    assert [(actor, pid) for actor, pid, _ in found.processes] == [("reward-0", 1), ("reward-0", 2)]


def test_what_a_recorder_writes_is_what_is_read(tmp_path: Path) -> None:
    """With times of the wall clock."""
    import time

    made_now = SpanRecorder(tmp_path, "packer-0", 1 << 20, lambda: True)
    made_now.add(time.monotonic(), 0.25, ("main", ""), "commit", True, {"groups": 2})
    made_now.flush()
    (span,) = all_spans(tmp_path).spans
    assert span == Span("packer-0", "main", "", "commit", span.start, 0.25, True, {"groups": 2})
    assert abs(span.start - time.time()) < 60.0
    assert all_spans(tmp_path / "nothing").spans == []
    assert recording.FOLDER == "events"


def test_the_window_of_steps_begins_with_the_wait_for_the_first_and_ends_with_the_last() -> None:
    """Of a step that was trained again after a crash, its last time counts."""
    spans = ten_steps().spans
    window = window_of(spans, 3, 5)
    assert (window.start, window.end) == (3.0, 6.0)
    assert [step.args["step"] for step in window.steps] == [3, 4, 5]
    again = [
        made("trainer-0", "main", "wait for batch", 20, 21, step=4),
        made("trainer-0", "main", "step", 21, 22, step=4, ordinals=[6, 7]),
        made("trainer-0", "main", "step", 22, 23, step=5, ordinals=[8, 9]),
    ]
    assert (window_of([*again, *spans], 4, 5).start, window_of([*again, *spans], 4, 5).end) == (20.0, 23.0)


def test_steps_that_are_not_there_are_named_with_those_that_are() -> None:
    """And with the key."""
    with pytest.raises(ConfigError, match=r"step 11 .* has steps 1 to 10; .*telemetry\.events_bytes"):
        window_of(ten_steps().spans, 10, 12)
    with pytest.raises(ConfigError, match="has no step"):
        window_of([], 1, 1)


def test_groups_that_overlap_take_rows_below_each_other() -> None:
    """A lane keeps its row for its life; the next one takes the first row that is free."""
    spans = [
        made("r", "groups", "group", 0, 10, "17"),
        made("r", "groups", "request", 1, 9, "17"),
        made("r", "groups", "group", 5, 12, "18"),
        made("r", "groups", "group", 10, 14, "19"),
        made("r", "main", "round", 3, 4),
    ]
    found = [(row.track, row.index, [(s.lane, s.name) for s in row.spans]) for row in rows_of(spans)]
    assert found == [
        ("groups", 0, [("17", "group"), ("17", "request"), ("19", "group")]),
        ("groups", 1, [("18", "group")]),
        ("main", 0, [("", "round")]),
    ]


@pytest.mark.parametrize("size", [1, 30, 1000])
def test_rows_hold_every_span_once_and_nest(size: int) -> None:
    """Of random spans in random lanes, also of those that overlap within a lane."""
    random_numbers = random.Random(size)
    spans = []
    for number in range(size):
        start = random_numbers.uniform(0, size)
        lane = str(random_numbers.randrange(max(1, size // 5)))
        spans.append(made("r", "t", str(number), start, start + random_numbers.expovariate(0.5), lane))
    rows = rows_of(spans)
    assert sorted(span.name for row in rows for span in row.spans) == sorted(span.name for span in spans)
    for row in rows:
        ends: list[float] = []
        for span in row.spans:
            while ends and ends[-1] <= span.start + 2e-6:
                ends.pop()
            assert not ends or span.end <= ends[-1] + 4e-6
            ends.append(span.end)


def test_an_inner_span_counts_once_and_the_rest_is_its_outer_ones() -> None:
    """0.5 of 1 s of a step is forward and backward, 0.25 publishing, and nothing is left of the step itself."""
    spans = [span for span in ten_steps().spans if span.actor == "trainer-0"]
    (shares,) = shares_of(spans, [(1.0, 11.0)])
    assert shares.by_name == pytest.approx({"forward and backward": 5.0, "wait for batch": 2.5, "publish weights": 2.5})
    assert (shares.waited, shares.worked, shares.covered) == pytest.approx((2.5, 7.5, 10.0))
    inner = [made("p", "main", "round", 0, 10), made("p", "main", "commit", 2, 5), made("p", "main", "sync", 3, 4)]
    (shares,) = shares_of(inner, [(0.0, 10.0)])
    assert shares.by_name == pytest.approx({"round": 7.0, "commit": 2.0, "sync": 1.0})


def test_time_within_intervals_is_cut_at_their_ends() -> None:
    """Of the waits of the trainer the engine decodes in 0.15 s each."""
    spans = [span for span in ten_steps().spans if span.actor == "inference-0"]
    (shares,) = shares_of(spans, [(k, k + 0.25) for k in range(1, 11)])
    assert shares.seconds == pytest.approx(2.5)
    assert shares.by_name == pytest.approx({"decode": 1.5, "wait for requests": 1.0})


@pytest.mark.parametrize("size", [1, 20, 300])
def test_seconds_of_nested_spans_add_up_to_the_time_that_they_cover(size: int) -> None:
    """Random trees of spans in one thread: nothing counts twice."""
    random_numbers = random.Random(size)
    spans: list[Span] = []

    def grow(start: float, end: float, depth: int) -> None:
        spans.append(made("a", "main", f"depth {depth}", start, end))
        at = start
        while depth < 4 and len(spans) < size and (at := at + random_numbers.uniform(0, end - start)) < end:
            until = random_numbers.uniform(at, end)
            grow(at, until, depth + 1)
            at = until

    for number in range(5):
        grow(10.0 * number, 10.0 * number + 7, 0)
    (shares,) = shares_of(spans, [(0.0, 50.0)])
    assert shares.covered == pytest.approx(35.0, abs=1e-3)


def test_lanes_add_up() -> None:
    """Two groups at once for 0.9 of each second."""
    spans = [span for span in ten_steps().spans if span.actor == "rollout-0"]
    (shares,) = shares_of(spans, [(1.0, 10.0)])
    assert shares.lanes
    assert shares.covered / shares.seconds == pytest.approx(1.8)
    assert shares.by_name == pytest.approx({"request": 14.4, "group": 1.8})


def test_ten_steps_of_a_large_run_are_read_without_the_others(tmp_path: Path) -> None:
    """500 steps with 150 spans each: ten steps and the earlier spans of their groups, in a fraction of the memory."""
    short = [made("packer-0", "main", "round", 1 + n / 150, 1 + (n + 1) / 150) for n in range(1350)]
    recorded = [*ten_steps().spans, *short]
    for steps in range(0, 500, 10):
        write_spans(tmp_path / FOLDER, Recorded([_later(span, steps) for span in recorded], [], {}))
    size = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
    tracemalloc.start()
    found, window = steps_of(index_of(tmp_path), 311, 320)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 4e6
    assert peak < size / 3
    assert (window.start, window.end) == (311.0, 321.0)
    alone = Recorded([_later(span, 310) for span in recorded], [], {})
    expected = trace_events(alone, window_of(alone.spans, 311, 320))["traceEvents"]
    events = trace_events(found, window)["traceEvents"]
    for phases, more in (("stf", 0), ("X", 6)):  # the two groups of the next step are sampled and scored already
        counts = [sum(event["ph"] in phases for event in one) for one in (expected, events)]
        assert counts[1] == counts[0] + more


def _later(span: Span, steps: int) -> Span:
    """The same span so many steps of 1 s later."""
    args = dict(span.args)
    for name, number in (("step", steps), ("ordinal", 2 * steps)):
        if name in args:
            args[name] += number
    if "ordinals" in args:
        args["ordinals"] = [ordinal + 2 * steps for ordinal in args["ordinals"]]
    return replace(span, start=span.start + steps, args=args)
