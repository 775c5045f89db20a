"""The recorder of spans: nothing twice, bounded, cheap, and no harm from a disk, a kill or a fork."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.telemetry import spans
from actors.telemetry.spans import JoinedRounds, SpanRecorder, in_lane, record, span

PLENTY = 64 << 20


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanRecorder]:
    """Recorder of this process, which writes when a test says so."""
    made = SpanRecorder(tmp_path, "actor-0", PLENTY, lambda: True)
    monkeypatch.setattr(spans, "_recorder", made)
    return made


def lines(folder: Path) -> list[Any]:
    """Lines of both files that are whole, the older file first."""
    found = []
    for suffix in (".older.jsonl", ".jsonl"):
        path = folder / f"actor-0{suffix}"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def numbers(folder: Path) -> list[int]:
    """Numbers of the spans made by `add`."""
    return [line[6]["number"] for line in lines(folder) if isinstance(line, list)]


def lost(folder: Path) -> int:
    """Spans that the heads tell to be lost."""
    return sum(line["lost"] for line in lines(folder) if isinstance(line, dict))


def add(recorder: SpanRecorder, first: int, last: int) -> None:
    """Add spans with numbers."""
    for number in range(first, last):
        recorder.add(float(number), 0.5, ("main", ""), "work", False, {"number": number})


@pytest.mark.parametrize("size", [1, 1000, spans.RING_SPANS])
def test_every_span_is_written_once_and_in_order(recorder: SpanRecorder, tmp_path: Path, size: int) -> None:
    """Also over several writes."""
    add(recorder, 0, size // 2)
    recorder.flush()
    add(recorder, size // 2, size)
    recorder.flush()
    recorder.flush()
    assert numbers(tmp_path) == list(range(size))
    assert lost(tmp_path) == 0
    assert [line for line in lines(tmp_path) if isinstance(line, list)][-1] == [
        size - 1.0, 0.5, "main", "", "work", 0, {"number": size - 1},
    ]  # fmt: skip


def test_a_full_ring_forgets_the_oldest_spans_and_counts_them(recorder: SpanRecorder, tmp_path: Path) -> None:
    """While the writing thread is held up, for example by a disk."""
    add(recorder, 0, spans.RING_SPANS + 100)
    recorder.flush()
    assert numbers(tmp_path) == list(range(100, spans.RING_SPANS + 100))
    assert lost(tmp_path) == 100


@pytest.mark.parametrize("max_bytes", [4096, 65_536, 1 << 20])
def test_both_files_together_stay_below_the_limit_and_have_the_newest_spans(tmp_path: Path, max_bytes: int) -> None:
    """A file that is full becomes the older one: at least a third of the limit is kept, without a gap."""
    made = SpanRecorder(tmp_path, "actor-0", max_bytes, lambda: True)
    batch = max(1, max_bytes // 1000)
    number = 0
    for _ in range(120):
        add(made, number, number + batch)
        number += batch
        made.flush()
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) <= 2
        assert sum(sizes) <= max_bytes
    found = numbers(tmp_path)
    assert found == list(range(found[0], number))
    assert found[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > max_bytes // 3
    assert all(isinstance(json.loads(path.read_text().splitlines()[0]), dict) for path in tmp_path.iterdir())


def test_of_a_write_longer_than_a_file_the_newest_spans_are_kept(tmp_path: Path) -> None:
    """The others are counted."""
    made = SpanRecorder(tmp_path, "actor-0", 8192, lambda: True)
    add(made, 0, 1000)
    made.flush()
    found = numbers(tmp_path)
    assert found == list(range(1000 - len(found), 1000))
    assert lost(tmp_path) == 1000 - len(found) > 0


def test_a_process_that_was_killed_in_a_write_leaves_at_most_half_a_line(tmp_path: Path) -> None:
    """Cut at every byte of its last lines: the next process of that name appends, and all its spans can be read."""
    first = SpanRecorder(tmp_path, "actor-0", PLENTY, lambda: True)
    add(first, 0, 5)
    first.flush()
    path = tmp_path / "actor-0.jsonl"
    whole = path.read_bytes()
    last_lines = len(b"\n".join(whole.rsplit(b"\n", 3)[1:]))
    for cut in range(len(whole) - last_lines, len(whole) + 1):
        path.write_bytes(whole[:cut])
        second = SpanRecorder(tmp_path, "actor-0", PLENTY, lambda: True)
        add(second, 100, 103)
        second.flush()
        survived = whole[:cut].count(b"\n") - 1
        # the half line is whole without its line end
        is_whole = cut == len(whole) or whole[cut : cut + 1] == b"\n"
        survived += is_whole and not whole[:cut].endswith(b"\n")
        assert numbers(tmp_path) == [*range(survived), 100, 101, 102], cut


def test_a_disk_that_takes_nothing_costs_spans_and_no_more(recorder: SpanRecorder, tmp_path: Path) -> None:
    """Said once; counted in the first head after it."""
    recorder = SpanRecorder(tmp_path / "in the way" / "events", "actor-0", PLENTY, lambda: True)
    obstacle = tmp_path / "in the way"
    obstacle.touch()
    with capture_logs() as said:
        for number in range(3):
            add(recorder, number, number + 1)
            recorder.flush()
    assert [line["event"] for line in said] == ["events of the timeline are lost"]
    obstacle.unlink()
    add(recorder, 3, 4)
    recorder.flush()
    assert numbers(obstacle / "events") == [3]
    assert lost(obstacle / "events") == 3


def test_nothing_is_made_before_the_output_dir_is_there(tmp_path: Path) -> None:
    """Its spans wait in memory: on a machine that never has it, they are forgotten there."""
    is_there: list[bool] = []
    made = SpanRecorder(tmp_path / "out" / "events", "actor-0", PLENTY, lambda: bool(is_there))
    add(made, 0, 10)
    made.flush()
    assert list(tmp_path.iterdir()) == []
    is_there.append(True)
    made.flush()
    assert numbers(tmp_path / "out" / "events") == list(range(10))


def test_threads_record_without_a_lock_and_nothing_is_lost_or_doubled(recorder: SpanRecorder, tmp_path: Path) -> None:
    """Four threads, while a fifth writes."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            recorder.flush()

    def work(which: int) -> None:
        for number in range(2000):
            with span("work", number=which * 2000 + number):
                pass

    writing = threading.Thread(target=write)
    writing.start()
    workers = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    writing.join()
    recorder.flush()
    assert sorted(numbers(tmp_path)) == list(range(8000))
    assert lost(tmp_path) == 0


def test_a_span_has_thread_name_waiting_arguments_and_the_error_that_ended_it(
    recorder: SpanRecorder, tmp_path: Path
) -> None:
    """Those shorter than asked for are left out."""

    def work() -> None:
        with span("outer", step=3) as outer:
            with span("inner", waits=True, least=0.005):
                time.sleep(0.01)
            with span("short", least=60.0):
                pass
            outer.args["found"] = 7

    thread = threading.Thread(target=work, name="engine")
    thread.start()
    thread.join()
    pooled = threading.Thread(target=lambda: record("scored", 1.0, 2.0), name="score_12")
    pooled.start()
    pooled.join()
    with pytest.raises(KeyError), span("fails"):
        raise KeyError
    recorder.flush()
    inner, outer, scored, fails = [line for line in lines(tmp_path) if isinstance(line, list)]
    assert inner[2:] == ["engine", "", "inner", 1, {}]
    assert outer[2:] == ["engine", "", "outer", 0, {"step": 3, "found": 7}]
    assert scored == [1.0, 1.0, "score", "12", "scored", 0, {}]
    assert fails[2:] == ["main", "", "fails", 0, {"error": "KeyError"}]
    assert outer[0] <= inner[0] <= inner[0] + inner[1] <= outer[0] + outer[1] + 2e-6
    assert inner[1] >= 0.01
    assert abs(outer[0] - time.monotonic()) < 60.0


async def test_tasks_have_lanes_which_their_own_tasks_share(recorder: SpanRecorder, tmp_path: Path) -> None:
    """And lose them at the end."""

    async def ask() -> None:
        with span("request"):
            await asyncio.sleep(0)

    async def group(name: str) -> None:
        with in_lane("groups", name), span("group"):
            await asyncio.gather(ask(), ask())

    await asyncio.gather(group("1.1"), group("2.1"))
    record("after", 1.0, 3.0)
    recorder.flush()
    found = sorted(line[2:5] for line in lines(tmp_path) if isinstance(line, list))
    expected = [["groups", lane, name] for lane in ("1.1", "2.1") for name in ("group", "request", "request")]
    assert found == sorted([*expected, ["main", "", "after"]])


def test_a_forked_child_writes_nothing_of_its_parent(recorder: SpanRecorder, tmp_path: Path) -> None:
    """Its copy of the ring would be written a second time."""
    add(recorder, 0, 3)
    pid = os.fork()
    if not pid:
        with span("child"):
            pass
        os._exit(spans.is_recording())
    assert os.waitpid(pid, 0)[1] == 0
    recorder.flush()
    assert numbers(tmp_path) == [0, 1, 2]


def test_the_last_spans_are_written_when_a_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` waits for the thread, and later spans go nowhere."""
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 3600.0)
    spans.start(SpanRecorder(tmp_path, "actor-0", PLENTY, lambda: True))
    with span("work", number=0):
        pass
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 60.0)
    spans.stop()
    with span("work", number=1):
        pass
    assert numbers(tmp_path) == [0]
    assert not spans.is_recording()


def test_an_error_that_nobody_expected_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged with its traceback, and spans are made as before."""
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(spans, "_line", lambda record: 1 // 0)
    made = SpanRecorder(tmp_path, "actor-0", PLENTY, lambda: True)
    with capture_logs() as said:
        add(made, 0, 1)
        made.start()
        assert made._thread is not None
        made._thread.join(60.0)
    assert [line["event"] for line in said] == ["events of the timeline are recorded no more"]
    assert said[0]["exc_info"]
    add(made, 1, 2)
    made.close()


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(1, [(1, 9)]), (10, [(10, 9)]), (60, [(25, 9), (25, 9), (10, 9)])],
    ids=["one", "some", "more than a span holds"],
)
def test_short_rounds_are_joined(
    recorder: SpanRecorder, tmp_path: Path, rounds: int, expected: list[tuple[int, int]]
) -> None:
    """Rounds of a millisecond: a span for 25 of them, with the completions of its first."""
    joined = JoinedRounds("decode")
    for number in range(rounds):
        joined.add(number / 1000, (number + 1) / 1000 + 1e-6, completions=9)
    joined.close()
    joined.close()
    recorder.flush()
    found = [line for line in lines(tmp_path) if isinstance(line, list)]
    assert [(line[6]["rounds"], line[6]["completions"]) for line in found] == expected
    assert sum(line[1] for line in found) == pytest.approx(rounds / 1000, rel=0.01)
