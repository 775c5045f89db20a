"""How a run stands: living, done, failed, killed, and before its first step."""

import json
import time

from actors.packer.progress import ALIVE_SECONDS
from actors.view.curves import Curves
from actors.view.overview import evaluations, groups, overview
from actors.view.recorded import counts_of
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeRun


def seen(run: MadeRun) -> dict[str, object]:
    """The overview of a run."""
    curves = Curves(run.config.output / "metrics.jsonl")
    curves.update()
    found = overview(run.config, curves, counts_of(run.config))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_a_living_run_says_what_limits_it(make: Make) -> None:
    """With the figures behind the statement, the key to change, queues and actors."""
    run = make(3)
    run.report()
    found = seen(run)
    assert (found["state"], found["alive"], found["step"], found["max_steps"]) == ("running", True, 3, 40)
    limit = found["limit"]
    assert isinstance(limit, dict)
    assert limit["stage"] == "sampling"
    assert "the trainer waits 31% of the time" in limit["because"]
    assert found["queues"] == {
        "sampling": [14, 16],
        "scoring": [0, 8],
        "scored": [1, 12],
        "packed": [0, 6],
        "batches": [0, 2],
    }
    assert found["time_left"]
    assert found["trouble"] == []
    assert "failed attempts 1" in found["recovered"]  # type: ignore[operator]
    assert {"reward_mean", "entropy", "lag_mean"} <= {one["name"] for one in found["figures"]}  # type: ignore[attr-defined]


def test_an_actor_at_a_long_piece_of_work_says_so(make: Make) -> None:
    """In the words of the screens."""
    run = make(2)
    run.report()
    path = run.config.output / "progress.json"
    progress = json.loads(path.read_text())
    task = {"name": "load model", "done": 30, "total": 120, "unit": "tensors", "seconds": 10.0}
    progress["actors"][0]["task"] = task
    path.write_text(json.dumps(progress))
    first, *others = seen(run)["actors"]  # type: ignore[misc]
    assert first["doing"] == "load model: 30 of 120 tensors, about 30 s left"
    assert not any("doing" in one for one in others)


def test_a_run_that_was_killed_is_no_living_one(make: Make) -> None:
    """Its newest progress is old; the words say how long, and from where the same command continues."""
    run = make(2)
    run.report(age=ALIVE_SECONDS + 100)
    found = seen(run)
    assert (found["state"], found["alive"], found["queues"]) == ("stopped", False, {})
    assert "it has been killed, is frozen" in str(found["words"])
    assert "the same command continues from step" in str(found["words"])


def test_a_run_that_failed_says_why(make: Make) -> None:
    """From up.log, as `actors status`."""
    run = make(1)
    run.report(age=500.0, phase="failed", failure="reward function raised")
    (run.config.output / "logs").mkdir()
    (run.config.output / "logs" / "up.log").write_text(
        json.dumps({"event": "run failed", "reason": "no reward"}) + "\n"
    )
    found = seen(run)
    assert (found["state"], found["alive"]) == ("failed", False)
    assert "failed: no reward" in str(found["words"])
    assert "the run has failed: reward function raised" in found["trouble"]  # type: ignore[operator]


def test_a_folder_in_which_nothing_has_run_says_so(make: Make) -> None:
    """No progress, no summary, no log."""
    found = seen(make())
    assert (found["state"], found["step"]) == ("unknown", 0)
    assert "nothing has run there" in str(found["words"])


def test_a_progress_that_is_a_moment_old_is_of_a_living_run(make: Make) -> None:
    """The packer writes it every five seconds, and a clock may be a little ahead."""
    run = make(1)
    for age in (-2.0, 0.0, ALIVE_SECONDS - 2):
        run.report(age=age)
        assert seen(run)["alive"], age


def test_evaluations_have_a_row_per_version_and_environment(make: Make) -> None:
    """In the order of the file."""
    run = make(1)
    assert evaluations(run.config) == []
    for version in (0, 10):
        run.add_evaluation(version)
    found = evaluations(run.config)
    assert [(row["version"], row["environment"]) for row in found] == [(0, "sums"), (10, "sums")]
    assert set(found[0]) == {"version", "environment", "exact_match", "mean_reward", "reward/right"}


def test_waste_is_the_share_of_groups_that_were_dropped() -> None:
    """3 dropped, 7 trained; groups under way and evaluations do not count."""
    counts = {
        ("train", "durable", None): 5, ("train", "trained", None): 2, ("train", "dropped", "stale"): 2,
        ("train", "dropped", "poison"): 1, ("train", "issued", None): 40, ("eval", "dropped", "eval_void"): 9,
    }  # fmt: skip
    found = groups(counts)
    assert found["dropped"] == {"stale": 2, "poison": 1}
    assert found["dropped_share"] == 0.3
    assert groups({}) == {"states": {}, "dropped": {}, "dropped_share": None}


def test_an_overview_does_not_wait(make: Make) -> None:
    """No process of the run is asked: a run whose packer is frozen is shown as fast."""
    run = make(2)
    run.report(age=1000.0)
    started = time.monotonic()
    seen(run)
    assert time.monotonic() - started < 5.0
