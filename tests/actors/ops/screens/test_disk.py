"""A run from what it has left on disk."""

import json
import re
import time

import pytest

from actors.ops.resume import note_rewind
from actors.ops.screens.disk import has_ended_on_disk, view_on_disk
from actors.ops.screens.render import render
from schemas.errors import ConfigError
from tests.actors.ops.screens.progresses import PROGRESS
from tests.ring.harness import ring_config


@pytest.fixture
def left(tmp_path):
    """Write what a run has left; returns the view of it."""
    config = ring_config(tmp_path)
    (config.output / "logs").mkdir(parents=True)

    def leave(summary=None, progress=None, up_log=(), checkpoint=0):
        if summary:
            (config.output / "summary.json").write_text(json.dumps(summary))
        if progress:
            (config.output / "progress.json").write_text(json.dumps(progress))
        (config.output / "logs" / "up.log").write_text("".join(json.dumps(line) + "\n" for line in up_log))
        (config.output / "checkpoints" / f"step_{checkpoint}").mkdir(parents=True)
        return view_on_disk(config)

    leave.config = config
    return leave


def test_a_finished_run_is_healthy_whatever_the_packer_wrote_last(left):
    """Its summary counts, also where progress.json was written before the end, or is not there."""
    view = left({"steps": 8, "wall_seconds": 300.0}, PROGRESS | {"time": 0.0, "missing": ["reward"]})
    assert view.is_healthy
    assert view.ended == "done at step 8, after 5 min"
    assert render(view)[0].startswith("ring  done  step 8/8  01:05  ")


def test_a_run_without_a_word_of_its_end_says_when_its_packer_wrote_last(left):
    """And from which checkpoint the same command goes on."""
    view = left(progress=PROGRESS | {"time": time.time() - 7200}, up_log=[{"event": "started"}], checkpoint=6)
    assert not view.is_healthy
    assert "the packer does not answer at bus.control ipc; it wrote 2 h ago" in view.ended
    assert view.ended.endswith("the same command continues from step 6")
    assert view.progress["phase"] == "stopped"


def test_a_run_that_was_stopped_or_failed_says_so_in_the_words_of_up(left):
    """The last of what up.log says about the end counts."""
    stopping = {"event": "stopping", "signal": "SIGTERM"}
    assert left(progress=PROGRESS | {"time": 0.0}, up_log=[stopping]).ended.startswith("stopped by SIGTERM; ")


def test_a_failure_is_told_with_its_reason(left):
    """As `actors up` has written it down; an older stop is of no interest."""
    log = [{"event": "stopping", "signal": "SIGTERM"}, {"event": "run failed", "reason": "the judge is out of order"}]
    view = left(up_log=[*log, {"event": "ended"}])
    assert view.ended.startswith("failed: the judge is out of order; ")
    assert not view.is_healthy


def test_where_nothing_has_run_there_is_no_run(tmp_path):
    """Words that name the folder."""
    with pytest.raises(ConfigError, match="nothing has run there"):
        view_on_disk(ring_config(tmp_path))


@pytest.mark.parametrize(
    ("what", "ended"),
    [({}, False), ({"progress": {"phase": "running"}}, False), ({"progress": {"phase": "failed"}}, True),
     ({"progress": {"phase": "running"}, "summary": {"steps": 8, "wall_seconds": 1.0}}, True)],
)  # fmt: skip
def test_the_end_of_a_run_can_be_read_where_its_last_word_was_lost(left, tmp_path, what, ended):
    """A watcher is not waited for: when the packer is gone, what it has written down counts."""
    left(**{"progress": {"phase": "starting", "time": 0.0}} | what | _timed(what))
    assert has_ended_on_disk(ring_config(tmp_path)) is ended


def _timed(what):
    return {"progress": what["progress"] | {"time": 0.0, "step": 1, "max_steps": 8}} if "progress" in what else {}


def test_a_run_that_was_stopped_shows_one_step_the_one_that_it_goes_on_from(left):
    """The packer wrote step 21 and a checkpoint of 20; then the trainer saved step 26."""
    view = left(progress=PROGRESS | {"time": time.time(), "step": 21, "durable": 20}, checkpoint=26)
    lines = " ".join(render(view))
    assert "step 26/" in lines
    assert "26 in a checkpoint" in lines
    assert "continues from step 26" in lines
    # not the bare number, which may be in the folder's name
    assert not re.search(r"(step|version) 21\b", lines)


def test_a_run_that_was_rewound_shows_nothing_of_what_it_has_left(left):
    """Neither its failure nor the figures of later steps."""
    left(progress=PROGRESS | {"time": 0.0, "step": 60, "phase": "failed", "failure": "step 33 diverged"}, checkpoint=20)
    note_rewind(left.config, 20)
    view = view_on_disk(left.config)
    lines = " ".join(" ".join(render(view)).split())
    assert "stopped step 20/" in lines
    assert "actors rewind went back to step 20" in lines
    assert "diverged" not in lines
