"""What `actors up` ends with."""

from actors.ops.screens.render import View, describe, render
from actors.ops.screens.result import result
from tests.actors.ops.screens.progresses import PROGRESS

SUMMARY = {
    "steps": 600, "wall_seconds": 315.0, "reward_first": 0.43, "reward_last": 0.97,
    "eval_before": {"words": {"exact_match": 0.1, "mean_reward": 0.5}},
    "eval_after": {"words": {"exact_match": 0.9, "mean_reward": 0.99}},
}  # fmt: skip


def test_the_result_is_steps_time_rewards_and_evaluations_before_and_after():
    """What somebody wants to know who has not watched."""
    assert result(SUMMARY) == [
        "done: 600 steps in 5 min; sampled reward 0.430 in the first 5 steps, 0.970 in the last 5",
        "evaluation of words: exact match 0.100 → 0.900, reward 0.500 → 0.990",
    ]


def test_what_was_not_measured_is_said_or_left_out():
    """No evaluation at the start; no exact match at all; no rewards; nothing."""
    after = {"words": {"exact_match": None, "mean_reward": 0.99}}
    assert result(SUMMARY | {"eval_before": None, "eval_after": after})[1:] == [
        "evaluation of words: reward not measured → 0.990"
    ]
    bare = {"steps": 3, "wall_seconds": 1.0, "reward_first": None, "reward_last": None}
    assert result(bare | {"eval_before": None, "eval_after": None}) == ["done: 3 steps in 1 s"]


def test_screens_show_the_time_that_is_left_and_the_first_and_newest_evaluation():
    """28 steps of 30 s; versions 0 and 10."""
    evals = {"0": {"words": {"exact_match": 0.1, "mean_reward": 0.5}}, "10": {"words": {"exact_match": None}}}
    progress = PROGRESS | {"seconds_per_step": 30.0, "evals": evals}
    lines = render(View("quick", "/out", progress))
    assert lines[0] == "quick  running  step 12/40  01:05  about 14 min left  /out"
    said = "words: version 0: exact match 0.100, reward 0.500; version 10: nothing measured"
    assert f"eval       {said}" in lines
    line = describe(progress, 65.0)
    assert "  about 14 min left  " in line
    assert f"  eval {said}" in line
    assert "left" not in render(View("quick", "/out", progress | {"phase": "done"}))[0]
