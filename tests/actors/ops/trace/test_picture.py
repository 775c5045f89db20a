"""`actors trace`: the format of its file, arrows from sampling to the step, and shares of time in words."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops.trace.files import Recorded
from actors.ops.trace.picture import trace_events
from actors.ops.trace.window import window_of
from actors.ops.trace.words import words
from tests.actors.ops.trace.timelines import as_lines, made, ten_steps, write_file
from tests.trace_format import problems_of


def document(first: int = 3, last: int = 5) -> dict[str, Any]:
    """The file of some steps, as it is read again."""
    recorded = ten_steps()
    text = json.dumps(trace_events(recorded, window_of(recorded.spans, first, last)), allow_nan=False)
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (3, 5), (1, 10)])
def test_the_file_follows_the_rules_of_the_format(first: int, last: int) -> None:
    """One step, some, all."""
    assert problems_of(document(first, last)) == []


def test_the_checker_finds_each_kind_of_mistake() -> None:
    """Else it would prove nothing."""
    good = document()
    index = {phase: next(i for i, e in enumerate(good["traceEvents"]) if e["ph"] == phase) for phase in "XMisf"}

    def broken(phase: str, **changes: Any) -> list[str]:
        bad = copy.deepcopy(good)
        event = bad["traceEvents"][index[phase]]
        event.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del event[key]
        return problems_of(bad)

    assert broken("X", name="decode") == []
    for mistake in (
        broken("X", ph="Q"),
        broken("X", ts=None),
        broken("X", ts=float("nan")),
        broken("X", dur=-1),
        broken("X", cat=None),
        broken("X", pid="packer"),
        broken("X", tid=77),
        broken("X", dur=1.01e6),
        broken("X", args=[1]),
        broken("M", name="process_nam"),
        broken("i", s="q"),
        broken("s", ts=1e12),
        broken("s", id=99),
        broken("f", bp=None),
    ):
        assert mistake != []
    assert problems_of({"traceEvents": []}) != []
    assert problems_of([]) != []


def test_each_actor_is_a_process_and_each_row_a_thread() -> None:
    """From the packer at the top down; the window's restart is an instant of its process."""
    events = document()["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["packer-0", "trainer-0", "inference-0", "rollout-0", "reward-0"]
    threads = [(names[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [
        ("packer-0", "main"), ("trainer-0", "main"), ("inference-0", "engine"), ("rollout-0", "groups 1"),
        ("rollout-0", "groups 2"), ("reward-0", "score 1"), ("reward-0", "score 2"),
    ]  # fmt: skip
    assert [(names[e["pid"]], e["name"]) for e in events if e["ph"] == "i"] == [("trainer-0", "process 4712")]


def test_actors_are_sorted_by_number_and_unknown_kinds_come_last() -> None:
    """`rollout-10` behind `rollout-9`."""
    spans = [made(actor, "main", "work", 1, 2) for actor in ("tracker-0", "rollout-10", "rollout-9", "reward-host-abc")]
    recorded = Recorded([*ten_steps().spans, *spans], [], {})
    events = trace_events(recorded, window_of(recorded.spans, 1, 1))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[3:] == ["rollout-0", "rollout-9", "rollout-10", "reward-0", "reward-host-abc", "tracker-0"]


def test_arrows_lead_from_the_end_of_sampling_over_scoring_to_the_step() -> None:
    """Step 3 trains ordinals 4 and 5, sampled from 2.0 to 2.9 s, scored from 2.92 s on, trained from 3.25 s on."""
    found = document(3, 3)
    events, zero = found["traceEvents"], found["otherData"]["zero_in_seconds_since_1970"]
    assert zero == 2.0
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    flows = [(e["id"], e["ph"], names[e["pid"]], e["ts"]) for e in events if e["ph"] in "stf"]
    for ordinal in (4, 5):
        assert [(phase, actor) for flow, phase, actor, _ in flows if flow == ordinal] == [
            ("s", "rollout-0"),
            ("t", "reward-0"),
            ("f", "trainer-0"),
        ]
        times = [at for flow, _, _, at in flows if flow == ordinal]
        assert times == pytest.approx([0.9e6 - 1, 0.92e6, 1.25e6], abs=0.01)


def test_of_several_attempts_the_one_that_was_trained_has_the_arrow() -> None:
    """An attempt that failed and one that came too late have none."""
    recorded = ten_steps()
    others = [
        made("rollout-1", "groups", "group", 2.0, 2.95, "4.2", ordinal=4, error="TimeoutError"),
        made("rollout-1", "groups", "group", 2.0, 3.5, "4.3", ordinal=4),
    ]
    recorded = Recorded([*recorded.spans, *others], [], {})
    events = trace_events(recorded, window_of(recorded.spans, 3, 3))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[e["pid"]] for e in events if e["ph"] == "s" and e["id"] == 4] == ["rollout-0"]


def test_odd_values_of_arguments_are_strict_json() -> None:
    """A loss that is NaN would make the whole file unreadable."""
    recorded = Recorded([*ten_steps().spans, made("a-0", "main", "odd", 1, 2, loss=float("nan"))], [], {})
    made_file = trace_events(recorded, window_of(recorded.spans, 1, 1))
    assert '"loss": "nan"' in json.dumps(made_file, allow_nan=False)


def test_the_words_have_the_shares_and_say_who_worked_while_the_trainer_waited() -> None:
    """The values of `ten_steps`."""
    recorded = ten_steps()
    said = words(recorded, window_of(recorded.spans, 3, 5)).splitlines()
    assert said[0] == "steps 3 to 5: 3.00 s, 1.000 s a step"
    lines = {line[2:26].strip(): line[27:] for line in said if line.startswith("  ")}
    first = said[: said.index("")]
    (trainer,) = [line for line in first if "trainer-0 main" in line]
    assert trainer.endswith("works 75% (forward and backward 50%, publish weights 25%), waits 25% (for batch 25%)")
    (rollout,) = [line for line in first if "rollout-0 groups" in line]
    assert rollout.endswith("1.8 at once: works 11% (group 11%), waits 89% (request 89%)")
    assert said[said.index("") + 1] == "while trainer-0 waited for its batches (0.75 s, 25%):"
    assert lines["inference-0 engine"] == "works 60% (decode 60%), waits 40% (for requests 40%)"
    assert lines["packer-0 main"] == "works 8% (pack 8%), nothing recorded 92%"
    assert said[-1] == "lost spans of the whole run: packer-0 3"


def test_the_command_reads_a_folder_writes_the_file_and_says_the_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default into the current folder, with the steps in its name."""
    monkeypatch.chdir(tmp_path)
    spans = ten_steps().spans
    for actor in sorted({span.actor for span in spans}):
        lines = as_lines(span for span in spans if span.actor == actor)
        write_file(tmp_path / "out" / "events", actor, lines, wall=1.7e9)
    assert main(["trace", "out", "--step", "4..5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("steps 4 to 5: 2.00 s, 1.000 s a step\n")
    assert said.endswith("wrote trace-4-5.json: open it with https://ui.perfetto.dev or chrome://tracing\n")
    assert problems_of(json.loads((tmp_path / "trace-4-5.json").read_text())) == []
    assert main(["trace", "out", "--step", "7", "--out", "seven.json"]) == 0
    assert json.loads((tmp_path / "seven.json").read_text())["otherData"]["steps"] == "7..7"


@pytest.mark.parametrize(
    ("arguments", "words_of_it"),
    [
        (["trace", "nothing", "--step", "1"], "telemetry.events_bytes above 0"),
        (["trace", "out", "--step", "1"], "step 1 is not in the timeline, which has no step"),
        (["trace", "out", "--step", "5..4"], "give the steps as A..B"),
        (["trace", "out", "--step", "x"], "give the steps as A..B"),
        (["trace", "out", "--step", "3.."], "give the steps as A..B"),
    ],
)
def test_errors_name_the_key_or_the_option(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words_of_it: str,
) -> None:
    """Exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "events").mkdir(parents=True)
    try:
        code = main(arguments)
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert words_of_it in capsys.readouterr().err


def test_a_file_that_can_not_be_written_is_an_error_of_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is not made."""
    spans = [span for span in ten_steps().spans if span.actor == "trainer-0"]
    write_file(tmp_path / "events", "trainer-0", as_lines(spans))
    assert main(["trace", str(tmp_path), "--step", "1", "--out", str(tmp_path / "no" / "t.json")]) == 2
    assert "--out: " in capsys.readouterr().err
