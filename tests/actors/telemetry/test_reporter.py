"""The files that a run leaves behind."""

import json
import math

import numpy as np

from actors.telemetry.reporter import Reporter
from actors.telemetry.samples import show_samples
from actors.telemetry.targets import TargetsFile
from tests.actors.test_record import scored


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
    lines = Reporter(tmp_path).begin(2, [0])
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
    assert reporter.begin(0, []) == []
    assert list(tmp_path.iterdir()) == []


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


def test_targets_are_in_prometheus_form_and_written_on_change_only(tmp_path):
    """Two actors, one of which has no URL yet; then it has; the same again touches nothing."""
    targets, path = TargetsFile(tmp_path, "run7"), tmp_path / "metrics_targets.json"
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
