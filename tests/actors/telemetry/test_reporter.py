"""The files that a run leaves behind."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.telemetry.reporter import Reporter, lines_from_the_end
from actors.telemetry.samples import show_samples
from actors.telemetry.targets import TargetsFile
from actors.telemetry.writer import WriteError, Writer
from tests.actors.packer.test_record import scored


def lines_of(path):
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_step_line_has_numbers_that_json_has(tmp_path):
    """NaN and infinity become null; a tiny number keeps its digits; sinks get the values as they are."""
    seen = []
    reporter = Reporter(tmp_path, sinks=(lambda step, values: seen.append((step, dict(values))),))
    returned = reporter.report_step(1, {"loss": math.nan, "grad_norm": math.inf, "mismatch_kl": 1.5e-12})
    assert lines_of(tmp_path / "metrics.jsonl") == [returned]
    assert returned == {"step": 1, "loss": None, "grad_norm": None, "mismatch_kl": 1.5e-12}
    assert seen[0][0] == 1
    assert seen[0][1]["grad_norm"] == math.inf


def test_begin_keeps_what_the_ledger_knows_and_nothing_else(tmp_path):
    """The ledger knows steps 1 and 2 and the evaluation of version 0; a crash has left more, and a cut-off line."""
    reporter = Reporter(tmp_path)
    for step in (1, 2, 3):
        reporter.report_step(step, {"loss": float(step)})
        reporter.report_samples(step, scored([0.0, 1.0], [-1, 1]))
    reporter.report_eval(0, {})
    reporter.report_eval(3, {})
    reporter.write_summary({"steps": 3})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    lines = []
    Reporter(tmp_path).begin(2, [0], lines.append)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines_of(tmp_path / "metrics.jsonl") == lines
    assert [line["step"] for line in lines_of(tmp_path / "samples.jsonl")] == [1, 2]
    assert [line["version"] for line in lines_of(tmp_path / "evals.jsonl")] == [0]
    assert not (tmp_path / "summary.json").exists(), "a run under way has no summary"


def test_new_run_in_the_same_directory_starts_with_empty_files(tmp_path):
    """Nothing of the run before is left, its samples of version 0 included."""
    reporter = Reporter(tmp_path)
    reporter.report_step(1, {"loss": 0.0})
    reporter.report_eval(0, {})
    reporter.report_samples(1, scored([0.0, 1.0], [-1, 1]))
    reporter.report_samples(0, scored([0.0, 1.0], [-1, 1]).model_copy(update={"purpose": "eval"}))
    reporter.write_summary({"steps": 1})
    lines = []
    reporter.begin(0, [], lines.append)
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_begin_leaves_files_alone_that_have_nothing_to_be_cut_off(tmp_path):
    """The same file as before, not a copy."""
    reporter = Reporter(tmp_path)
    reporter.report_step(1, {"loss": 0.5})
    reporter.report_eval(0, {})
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    lines = []
    reporter.begin(1, [0], lines.append)
    assert lines == [{"step": 1, "loss": 0.5}]
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_begin_cuts_the_end_off_without_a_second_file(tmp_path, monkeypatch):
    """A disk may be full when the packer starts again, and there must be no room needed to go back to step 2."""
    reporter, path = Reporter(tmp_path), tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        reporter.report_step(step, {"loss": float(step)})
    monkeypatch.setattr(Path, "replace", None)
    reporter.begin(2, [], lambda line: None)
    assert [line["step"] for line in lines_of(path)] == [1, 2]


def test_begin_drops_bad_lines_between_good_ones(tmp_path):
    """Half a line in the middle, and a good last line without its end: three lines, and the next is one of its own."""
    reporter, path = Reporter(tmp_path), tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo{"step": 2}\n{"step": 2}\n{"step": 7}\n{"step": 3}')
    lines = []
    reporter.begin(3, [], lines.append)
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3}]
    reporter.report_step(4, {})
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3, 4]
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_line_has_the_digest_of_the_weights_where_it_is_known(tmp_path):
    """A word among numbers."""
    reporter = Reporter(tmp_path)
    reporter.report_step(1, {"loss": 0.5}, "5e5e")
    reporter.report_step(2, {"loss": 0.5}, "")
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "weights": "5e5e"},
        {"step": 2, "loss": 0.5},
    ]


def test_full_disk_is_told_with_path_and_reason_and_the_next_attempt_writes(tmp_path):
    """Each file is /dev/full first, where every write fails with ENOSPC."""
    reporter = Reporter(tmp_path)
    writes = {
        "metrics.jsonl": lambda: reporter.report_step(1, {"loss": 0.5}),
        "evals.jsonl": lambda: reporter.report_eval(0, {}),
        "samples.jsonl": lambda: reporter.report_samples(1, scored([0.0, 1.0], [-1, 1])),
        "summary.json": lambda: reporter.write_summary({"steps": 1}),
    }
    for name, write in writes.items():
        written = tmp_path / (".summary.json" if name == "summary.json" else name)
        written.symlink_to("/dev/full")
        with pytest.raises(WriteError, match=rf"{name}: No space left on device"):
            write()
        written.unlink()
        write()
        assert isinstance(json.loads((tmp_path / name).read_text()), dict)


HALF_A_LINE = """
import resource, sys
from pathlib import Path
from actors.telemetry import writer
from actors.telemetry.reporter import Reporter
from actors.telemetry.writer import WriteError
writer.PATIENCE_SECONDS = 60.0
reporter, path = Reporter(Path(sys.argv[1])), Path(sys.argv[1], "metrics.jsonl")
reporter.report_step(1, {"loss": 0.25})
room = path.stat().st_size + 5
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
for attempt in range(3):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        reporter.report_step(2, {"loss": 0.5})
    except WriteError as error:
        print(path.stat().st_size - room, error)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
reporter.report_step(2, {"loss": 0.5})
reporter.report_step(3, {"loss": 0.75})
"""


@pytest.mark.slow
def test_half_a_line_is_cut_off_before_the_next_attempt(tmp_path):
    """The system itself takes five bytes of a line and refuses the rest, three times; then there is room."""
    command = [sys.executable, "-c", HALF_A_LINE, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [f"0 {tmp_path / 'metrics.jsonl'}: File too large"] * 3
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": s, "loss": s / 4} for s in (1, 2, 3)]


def test_half_a_line_is_cut_off_by_the_next_start(tmp_path):
    """The process ends before there is room again."""
    reporter, path = Reporter(tmp_path), tmp_path / "metrics.jsonl"
    reporter.report_step(1, {"loss": 0.25})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    Reporter(tmp_path).begin(1, [], lambda line: None)
    assert path.read_text() == '{"step": 1, "loss": 0.25}\n'


def test_error_of_a_sink_is_not_one_of_the_file(tmp_path):
    """The line is there, and must not be written a second time."""

    def unreachable(step, values):
        raise ConnectionError("no tracker")

    with pytest.raises(ConnectionError):
        Reporter(tmp_path, (unreachable,)).report_step(1, {})
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1


def test_samples_are_shown_with_rewards_and_advantages(tmp_path):
    """The last step by default; a completion without a reward shows none; a step without samples says which are."""
    reporter = Reporter(tmp_path)
    reporter.report_samples(1, scored([0.0, 1.0], [-1, 1]))
    reporter.report_samples(7, scored([0.5, np.nan], [0, 0], version=6))
    path = tmp_path / "samples.jsonl"
    assert show_samples(path, None, 4).splitlines() == [
        "step 7  train ordinal 0  e  versions [6]",
        "  prompt      'p'",
        "  reward  0.500  advantage   0.000  stop    'a'",
        "  reward   none  advantage   0.000  stop    'bb'",
    ]
    assert len(show_samples(path, 1, 1).splitlines()) == 3
    assert show_samples(path, 2, 4) == "no samples of step 2; there are some of 2 steps, from 1 to 7"


def test_samples_of_chat_prompts_say_what_reward_functions_receive(tmp_path):
    """The texts are shown as they are; functions get each as the content of a message."""
    prompt = [{"role": "user", "content": "p"}]
    Reporter(tmp_path).report_samples(1, scored([0.0, 1.0], [-1, 1]).model_copy(update={"prompt": prompt}))
    lines = show_samples(tmp_path / "samples.jsonl", None, 4).splitlines()
    assert "reward functions receive [{'role': 'assistant', 'content': TEXT}] for each text below" in lines[2]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_from_the_end_are_the_lines_of_the_file(tmp_path, monkeypatch, block):
    """With their offsets, whatever the size of a block, with and without an end of the last line."""
    monkeypatch.setattr("actors.telemetry.reporter.BLOCK_BYTES", block)
    path = tmp_path / "lines"
    for text in (b"", b"\n", b"a", b"a\nbb\n\nccc\n", b"first\n" + b"x" * 40 + b"\nhalf"):
        path.write_bytes(text)
        offsets = itertools.accumulate(map(len, text.splitlines(keepends=True)), initial=0)
        assert list(lines_from_the_end(path)) == list(zip(offsets, text.splitlines(keepends=True), strict=False))[::-1]


def test_begin_reads_no_more_of_the_samples_than_it_cuts_off(tmp_path, monkeypatch):
    """A run of weeks has gigabytes of them; the start reads from the end up to the first line that stays."""
    reporter, path = Reporter(tmp_path), tmp_path / "samples.jsonl"
    for step in range(1, 400):
        reporter.report_samples(step, scored([0.0, 1.0], [-1, 1]))
    parsed, parse = [], json.loads
    monkeypatch.setattr("actors.telemetry.reporter.json.loads", lambda raw: parsed.append(raw) or parse(raw))
    Reporter(tmp_path).begin(397, [], lambda line: None)
    assert len(parsed) == 3
    monkeypatch.undo()
    assert [line["step"] for line in lines_of(path)] == list(range(1, 398))


def test_begin_drops_samples_of_given_up_steps_before_those_of_an_evaluation_that_counts(tmp_path):
    """The evaluation of version 2 ended while step 4 was trained; the run goes back to step 2 and keeps it alone."""
    reporter, path = Reporter(tmp_path), tmp_path / "samples.jsonl"
    group = scored([0.0, 1.0], [-1, 1])
    for step, purpose in [(1, "train"), (2, "train"), (3, "train"), (2, "eval"), (4, "train"), (4, "eval")]:
        reporter.report_samples(step, group.model_copy(update={"purpose": purpose}))
    Reporter(tmp_path).begin(2, [2], lambda line: None)
    assert [(line["step"], line["purpose"]) for line in lines_of(path)] == [(1, "train"), (2, "train"), (2, "eval")]
    Reporter(tmp_path).begin(0, [2], lambda line: None)
    assert [(line["step"], line["purpose"]) for line in lines_of(path)] == [(2, "eval")]


def test_samples_are_bounded_and_shown_from_the_newest_two_files(tmp_path, monkeypatch):
    """A file that is full becomes the older one, in place of the one before; both are shown, and cut off at a start."""
    reporter, path = Reporter(tmp_path), tmp_path / "samples.jsonl"
    reporter.report_samples(1, scored([0.0, 1.0], [-1, 1]))
    line_bytes = path.stat().st_size
    monkeypatch.setattr("actors.telemetry.reporter.MAX_SAMPLES_BYTES", 10 * line_bytes)
    for step in range(2, 200):
        reporter.report_samples(step, scored([0.0, 1.0], [-1, 1]))
    older = tmp_path / "samples.older.jsonl"
    assert path.stat().st_size + older.stat().st_size <= 21 * (line_bytes + 4)
    kept = [line["step"] for line in lines_of(older) + lines_of(path)]
    assert kept == list(range(kept[0], 200))
    assert len(kept) >= 10
    assert show_samples(path, None, 1).startswith("step 199 ")
    assert show_samples(path, kept[0], 1).startswith(f"step {kept[0]} ")
    assert (
        show_samples(path, 1, 1) == f"no samples of step 1; there are some of {len(kept)} steps, from {kept[0]} to 199"
    )
    Reporter(tmp_path).begin(kept[2], [], lambda line: None)
    assert [line["step"] for line in lines_of(older)] == kept[:3]
    assert not path.exists()
    Reporter(tmp_path).begin(0, [], lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_targets_are_in_prometheus_form_and_written_on_change_only(tmp_path):
    """Two actors, one of which has no URL yet; then it has; the same again touches nothing."""
    targets, path = TargetsFile(tmp_path, "run7", Writer()), tmp_path / "metrics_targets.json"
    packer, rollout = ("packer", "packer-0", "http://127.0.0.1:9100/metrics"), ("rollout", "rollout-0", "")
    targets.follow([packer, rollout])
    entry = {
        "targets": ["127.0.0.1:9100"],
        "labels": {"run": "run7", "actor": "packer", "name": "packer-0"},
    }
    assert json.loads(path.read_text()) == [entry]
    written = path.stat().st_mtime_ns
    targets.follow([rollout, packer])
    assert path.stat().st_mtime_ns == written
    targets.follow([packer, (*rollout[:2], "http://[::1]:9101/metrics")])
    assert json.loads(path.read_text())[1]["targets"] == ["[::1]:9101"]
