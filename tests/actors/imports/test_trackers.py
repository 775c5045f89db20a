"""Trackers of other systems' configurations."""

from typing import Any

import pytest

from actors.imports.job import Import, Options
from actors.imports.trackers import report_to, tracker_section


def job_of(**given: Any) -> Import:
    """An import of these keys."""
    return Import(given, {}, "test", Options())


def verdicts(job: Import) -> dict[str, str]:
    """Verdicts by key."""
    return {entry.key: entry.verdict.value for entry in job.report.entries}


def test_report_to_becomes_trackers_with_their_keys() -> None:
    """A key of a tracker that is not on changes nothing."""
    job = job_of(report_to=["wandb", "trackio"], project="mine", wandb_entity="team", swanlab_project="other")
    report_to(job, "trl")
    assert job.run.tree == {
        "telemetry": {
            "trackers": [{"type": "wandb", "entity": "team"}, {"type": "trackio", "project": "mine"}],
            "names": "trl",
        }
    }
    assert verdicts(job)["swanlab_project"] == "irrelevant"


@pytest.mark.parametrize("given", ["none", [], None, ["none"]])
def test_no_tracker_writes_nothing(given: Any) -> None:
    """As transformers takes these values."""
    job = job_of(report_to=given)
    report_to(job, "trl")
    assert job.run.tree == {}
    assert verdicts(job) == {"report_to": "irrelevant"}


@pytest.mark.parametrize("given", ["all", ["wandb", "comet_ml"]])
def test_a_tracker_that_is_not_built_is_refused_with_a_way_out(given: Any) -> None:
    """`all` stands for whatever is installed there."""
    job = job_of(report_to=given)
    report_to(job, "trl")
    (entry,) = job.report.entries
    assert entry.verdict.value == "refused"
    assert "telemetry.trackers" in entry.text


def test_a_section_of_a_tracker_is_written_with_the_keys_that_are_ours() -> None:
    """Others are settled, and a second tracker follows the first."""
    job = job_of(**{"a.project": "p", "a.log_extras": 3, "b.mode": "offline"})
    tracker_section(job, "wandb", "a", {"project": "project", "tags": "tags"}, "areal")
    tracker_section(job, "swanlab", "b", {"mode": "mode"}, "areal")
    assert job.run.tree["telemetry"]["trackers"] == [
        {"type": "wandb", "project": "p"},
        {"type": "swanlab", "mode": "offline"},
    ]
    assert set(verdicts(job)) == {"a.project", "a.log_extras", "b.mode"}
