"""The timeline of a step on its page: spans of the step alone, at their times, and the file for Perfetto."""

from pathlib import Path

import pytest

from actors.ops.trace import files
from actors.ops.trace.files import Recorded, Span, SpanIndex
from actors.ops.trace.picture import trace_events
from actors.ops.trace.window import index_of, window_of
from actors.view.timeline import SHORTEST, TRACK_ROWS, NoTimelineError, timeline_of, trace_of
from tests.actors.ops.trace.timelines import all_spans, made, ten_steps, write_spans
from tests.actors.view.conftest import Make
from tests.actors.view.test_server import served, viewed
from tests.trace_format import problems_of


def test_each_row_has_the_spans_of_the_step_from_its_start_on(tmp_path: Path) -> None:
    """Step 4 of ten by hand: spans of other steps are absent, and spans that overlap its bounds are cut."""
    write_spans(tmp_path / "events", ten_steps())
    found = timeline_of(index_of(tmp_path), 4)
    assert (found["words"], found["seconds"], found["start"]) == ("", 1.0, 4.0)
    rows = {(one["actor"], row["title"]): row["spans"] for one in found["actors"] for row in one["rows"]}
    assert [one["actor"] for one in found["actors"]] == [
        "packer-0",
        "trainer-0",
        "inference-0",
        "rollout-0",
        "reward-0",
    ]
    assert [span[:5] for span in rows["trainer-0", "main"]] == [
        [0.0, 0.25, "wait for batch", True, 0], [0.25, 0.75, "step", False, 0],
        [0.25, 0.5, "forward and backward", False, 1], [0.75, 0.25, "publish weights", False, 1],
    ]  # fmt: skip
    assert [span[2] for span in rows["inference-0", "engine"]] == ["wait for requests", "decode"]
    assert rows["inference-0", "engine"][1][5] == "0.9 s, rounds 40"
    # the groups of step 5 are sampled meanwhile
    assert [span[:3] for span in rows["rollout-0", "groups 1"]] == [[0.0, 0.9, "group"], [0.1, 0.8, "request"]]
    assert "steps 4 to 4: 1.00 s" in found["said"]


def test_short_spans_and_further_rows_are_counted(tmp_path: Path) -> None:
    """So a page has a bounded number of spans, however many a step has."""
    step = made("trainer-0", "main", "step", 0, 1, step=1, ordinals=[])
    short = [made("packer-0", "main", "round", n / 1000, n / 1000 + SHORTEST / 2) for n in range(1000)]
    at_once = [made("rollout-0", "groups", "group", 0.1, 0.9, str(n), ordinal=n) for n in range(TRACK_ROWS + 30)]
    recorded = ten_steps()
    write_spans(tmp_path / "events", type(recorded)([step, *short, *at_once], [], {}))
    by_actor = {one["actor"]: one for one in timeline_of(index_of(tmp_path), 1)["actors"]}
    assert (by_actor["packer-0"]["short"], by_actor["packer-0"]["rows"][0]["spans"]) == (1000, [])
    assert (by_actor["rollout-0"]["hidden"], len(by_actor["rollout-0"]["rows"])) == (30, TRACK_ROWS)


@pytest.mark.parametrize("step", [1, 4, 10])
def test_the_file_is_that_of_the_command(tmp_path: Path, step: int) -> None:
    """Although only the spans of the step are kept while the files are read."""
    write_spans(tmp_path / "events", ten_steps())
    whole = all_spans(tmp_path / "events")
    assert trace_of(index_of(tmp_path), step) == trace_events(whole, window_of(whole.spans, step, step))
    assert problems_of(trace_of(index_of(tmp_path), step)) == []


def test_spans_within_a_time_are_those_that_overlap_it(tmp_path: Path) -> None:
    """Lines of other programs are still left out."""
    write_spans(tmp_path, ten_steps())
    with (tmp_path / "packer-0.jsonl").open("a") as file:
        file.write('[1e400, "x"]\n[3.5]\nnonsense\n[null,1]\n')

    def key(span: Span) -> tuple[str, float, str]:
        return span.actor, span.start, span.name

    every = [span for span in all_spans(tmp_path).spans if span.start < 3.5 and span.end > 3.1]
    index = SpanIndex(tmp_path, "trainer-0", ("step",))
    assert sorted(index.within(3.1, 3.5).spans, key=key) == sorted(every, key=key) != []
    # groups of step 3, sampled and scored before
    whole = [span for span in all_spans(tmp_path).spans if span in every or span.args.get("ordinal") in (4, 5)]
    found = index.within(3.1, 3.5, (4, 5)).spans
    assert sorted(found, key=key) == sorted(whole, key=key)
    assert len(found) > len(every)


def test_a_step_is_read_from_its_own_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of other steps may be anything by then, and a look after more steps reads what is new."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 1)
    every = ten_steps().spans
    for k in range(1, 11):
        write_spans(tmp_path / "events", Recorded([one for one in every if k <= one.start < k + 1], [], {}))
    index = index_of(tmp_path)
    before = timeline_of(index, 4)
    inference = tmp_path / "events" / "inference-0.jsonl"
    whole = inference.read_bytes()
    later = whole.index(b"[7,")
    inference.write_bytes(whole[:later] + b"x" * (len(whole) - later))
    assert timeline_of(index, 4) == before
    assert before["actors"] == timeline_of(index_of(tmp_path), 4)["actors"]
    assert not [one for one in timeline_of(index, 8)["actors"] if one["actor"] == "inference-0"]
    write_spans(
        tmp_path / "events", Recorded([made("trainer-0", "main", "step", 11, 12, step=11, ordinals=[])], [], {})
    )
    assert timeline_of(index, 11)["seconds"] == 1.0


def test_a_file_that_becomes_the_older_one_stays_in_the_index(tmp_path: Path) -> None:
    """It keeps its inode; a file that is gone leaves."""
    folder = tmp_path / "events"
    write_spans(folder, ten_steps())
    index = index_of(tmp_path)
    before = timeline_of(index, 4)
    (folder / "trainer-0.jsonl").rename(folder / "trainer-0.older.jsonl")
    write_spans(folder, Recorded([made("trainer-0", "main", "step", 11, 12, step=11, ordinals=[])], [], {}))
    assert timeline_of(index, 4) == before
    assert timeline_of(index, 11)["seconds"] == 1.0
    (folder / "trainer-0.older.jsonl").unlink()
    assert timeline_of(index, 4)["words"].startswith("step 4 is not in the timeline, which has steps 11 to 11")


def test_a_step_without_spans_has_words_that_name_the_key(tmp_path: Path) -> None:
    """Of a run that records none, and of a step that is not among the newest ones."""
    assert "telemetry.events_bytes" in timeline_of(index_of(tmp_path), 4)["words"]
    write_spans(tmp_path / "events", ten_steps())
    assert timeline_of(index_of(tmp_path), 11)["words"].startswith(
        "step 11 is not in the timeline, which has steps 1 to 10"
    )
    with pytest.raises(NoTimelineError, match="step 11"):
        trace_of(index_of(tmp_path), 11)


async def test_the_server_answers_with_the_timeline_and_the_file(make: Make, tmp_path: Path) -> None:
    """The file is saved under a name with its step; without spans the answer says why."""
    run = make(1)
    write_spans(run.config.output / "events", ten_steps())
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            status, found = await client.get("runs/0/steps/4/timeline")
            assert (status, len(found["actors"])) == (200, 5)
            assert (await client.get("runs/0/steps/99/timeline"))[1]["words"]
            async with client.session.get(f"{client.base}/api/runs/0/steps/4/trace") as response:
                assert response.headers["Content-Disposition"] == 'attachment; filename="trace-4.json"'
                assert problems_of(await response.json()) == []
            status, value = await client.get("runs/0/steps/99/trace")
            assert (status, "step 99 is not in the timeline" in value["error"]) == (404, True)
