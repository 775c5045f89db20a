"""A run as a screen of lines, and as one line."""

import pytest

from actors.ops.screens.render import MAX_ACTORS, View, describe, render
from tests.actors.ops.screens.progresses import PROGRESS


def shown(columns: int = 100, **changes: object) -> list[str]:
    """The screen of a run whose progress has these changes."""
    return render(View("quick", "/out", PROGRESS | changes), columns)


def test_a_screen_says_who_is_up_what_is_served_where_groups_are_and_what_limits() -> None:
    """The whole of it, for a run that is well."""
    assert shown() == [
        "quick  running  step 12/40  01:05  /out",
        "limit      sampling: the trainer waits 60% of the time, and most groups are being sampled: 14.8 on",
        "           average, of 16 slots",
        "change     up.inference, for more engines, or faster ones; up.rollout only if engines have room",
        "policy     version 12 trained, 12 served, 10 in a checkpoint",
        "step       reward 0.500  entropy 1.25  grad_norm 0.38  lag 1  mismatch_kl 1.0e-05  900 tokens/s",
        "           trainer idle 60%",
        "",
        "sampling     14 of 16   ##################..  groups, of the rollouts' slots",
        "scoring       0 of 8    ....................  groups, of those scored at once",
        "scored        2 of 16   ##..................  groups ready, of those admitted",
        "packed        0 of 16   ....................  groups in packed steps, of two",
        "batches       0 of 2    ....................  batches on the way to the trainer",
        "",
        "packer-0     heard 0.0 s ago  keeps the ledger",
        "trainer-0    heard 0.4 s ago  at step 13",
        "inference-0  heard 0.1 s ago  serves version 12, clean, 200 completions at once",
        "reward-0     heard 0.2 s ago  3 groups to score",
        "rollout-0    heard 0.3 s ago  holds 14 groups, 2 slots free",
    ]


def test_trouble_stands_above_all_figures_and_what_was_dealt_with_below_them() -> None:
    """Each in its own line, and ages go on while the packer is silent."""
    view = View("quick", "/out", PROGRESS | {"missing": ["reward"], "restarts": {"reward-0": 1}}, silent_seconds=20.0)
    lines = render(view)
    assert lines[1:3] == [
        "trouble    the packer has not been heard for 20 s",
        "           no reward actor is there: nothing is scored",
    ]
    assert "recovered  restarted reward-0 ×1" in lines
    assert "heard 20 s ago" in lines[-1]
    assert not view.is_healthy


@pytest.mark.parametrize("columns", [1, 20, 40, 80, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(columns):
    """Down to one column, with the longest words."""
    lines = shown(columns, missing=["reward"], last_failure="a very long word: " + "x" * 300)
    assert max(map(len, lines)) <= columns


def test_a_terminal_of_80_columns_shows_what_each_number_means() -> None:
    """No text about a stage or an actor is cut, and a name is not parted from its value."""
    wide, narrow = shown(200), shown(80)
    assert wide[-11:] == narrow[-11:]
    assert [line for line in narrow if "mismatch_kl 1.0e-05" in line]


def test_of_many_actors_those_that_are_silent_are_shown() -> None:
    """100 rollouts, one of them late: it is among the 16 that are shown, and the others are counted."""
    rollouts = [
        {"name": f"rollout-{i}", "kind": "rollout", "age": 30.0 if i == 77 else 0.5, "phase": "running", "holds": 0,
         "free_slots": 1}
        for i in range(100)
    ]  # fmt: skip
    lines = shown(actors=rollouts)
    assert sum(line.startswith("rollout-") for line in lines) == MAX_ACTORS
    assert any(line.startswith("rollout-77") and "heard 30 s ago" in line for line in lines)
    assert lines[-1] == f"and {101 - MAX_ACTORS} more, all heard within 0.5 s"


def test_an_engine_without_weights_and_an_actor_that_drains_say_so() -> None:
    """In words, where a version and an activity would stand."""
    engine = PROGRESS["actors"][0] | {"version": None, "engine": "starting", "load": 0}
    lines = shown(actors=[engine, PROGRESS["actors"][2] | {"phase": "draining"}], served=None)
    assert "serves nothing yet, starting, 0 completions at once" in lines[-2]
    assert lines[-1].endswith("draining; holds 14 groups, 2 slots free")
    assert "policy     version 12 trained, none served, 10 in a checkpoint" in lines


def test_a_run_that_has_ended_shows_no_queues_and_no_advice() -> None:
    """Nobody is expected to be there."""
    lines = render(View("quick", "/out", PROGRESS | {"phase": "done"}, 500.0, ended="done at step 40"))
    assert lines == [
        "quick  done  step 12/40  01:05  /out",
        "ended      done at step 40",
        "policy     version 12 trained, 12 served, 10 in a checkpoint",
        "step       reward 0.500  entropy 1.25  grad_norm 0.38  lag 1  mismatch_kl 1.0e-05  900 tokens/s",
        "           trainer idle 60%",
    ]
    assert render(View("quick", "/out", {}, elapsed_seconds=1.0)) == ["quick  00:01  /out", "waiting for the packer"]


LITTLE = {
    "phase": "running", "step": 1, "max_steps": 9, "reward": None, "issued": 4, "settled": 0, "composed": 0,
    "peers": {},
}  # fmt: skip


def test_progress_line_says_what_is_known_and_leaves_out_what_is_not() -> None:
    """Before the first step there is no reward to show; a restarted actor is named."""
    progress = LITTLE | {"phase": "starting", "step": 0, "peers": {"rollout": 1}, "restarts": {"rollout-0": 2}}
    assert describe(progress, 65.0) == (
        "01:05  starting  step 0/9  groups sampling 4 settled 0 packed 0  peers rollout 1  restarted rollout-0 ×2"
    )
    assert describe({}, 1.0) == "00:01  waiting for the packer"


def test_progress_line_shows_trouble_when_there_is_any() -> None:
    """Failed attempts, dropped groups by reason, and what went wrong last."""
    assert describe(LITTLE | {"dropped": {}, "failed_attempts": 0, "last_failure": ""}, 0.0).endswith("packed 0")
    line = describe(LITTLE | {"failed_attempts": 7, "dropped": {"poison": 2, "stale": 1}, "last_failure": "no"}, 0.0)
    assert line.endswith("  failed attempts 7  dropped 3 (2 poison, 1 stale)  last failure: no")


def test_progress_line_names_who_is_waited_for() -> None:
    """Which rank of a gang is not there, until the run has no use for it any more."""
    progress = LITTLE | {"missing": ["trainer-1", "reward"]}
    assert describe(progress, 0.0).endswith("packed 0  waits for trainer-1, reward")
    assert describe(progress | {"phase": "done"}, 0.0).endswith("packed 0")


def test_last_words_of_a_packer_that_refuses_everybody_have_no_figures() -> None:
    """Phase and step are all that it says."""
    assert describe({"phase": "failed", "step": 3, "max_steps": 9}, 0.0) == "00:00  failed  step 3/9"


def test_more_steps_than_are_asked_for_are_told_as_such() -> None:
    """trainer.max_steps was lowered to 10 when 40 were trained: 40/10 would be a riddle."""
    line = describe(PROGRESS | {"phase": "done", "step": 40, "max_steps": 10}, 1.0)
    assert "done  step 40 (trainer.max_steps 10)" in line


def test_a_running_evaluation_is_told_with_its_time_left() -> None:
    """On a screen as the limit of the run, and in a line."""
    known = {"eval_open": 30, "evaluation": {"version": 8, "done": 70, "total": 100, "seconds_left": 12.4}}
    words = "version 8, 70 of 100 prompts, about 12 s left"
    assert f"limit      sampling: an evaluation comes first: {words}" in render(View("r", "out", PROGRESS | known), 120)
    assert f"  evaluating: {words}" in describe(PROGRESS | known, 0.0)


def test_a_long_piece_of_work_is_in_front_of_its_actor() -> None:
    """With a bar and the time left, on the screen and in the log line."""
    task = {"name": "load model", "done": 30, "total": 120, "unit": "tensors", "seconds": 10.0}
    actors = [one | ({"task": task} if one["kind"] == "trainer" else {}) for one in PROGRESS["actors"]]
    words = "load model: 30 of 120 tensors, about 30 s left"
    lines = render(View("run", "/o", PROGRESS | {"actors": actors}), 160)
    assert [line for line in lines if words in line and "#####..............." in line and "trainer-0" in line]
    assert f"trainer-0: {words}" in describe(PROGRESS | {"actors": actors}, 5.0)
