"""What is wrong in words, and what was wrong and has been dealt with."""

import pytest

from actors.ops.screens.diagnostics import dealt_with, diagnose, learning
from actors.process.durations import seconds_in_words
from tests.actors.ops.screens.progresses import PROGRESS, settings


def late(name: str, age: float) -> dict[str, object]:
    """An actor that has not been heard for so long."""
    return {"actors": [{"name": name, "kind": "reward", "age": age, "phase": "running", "load": 0}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        (late("reward-0", 2.9), []),
        (late("reward-0", 12.0) | {"missing": ["reward"]},
         ["no reward actor is there: nothing is scored",
          "reward-0 has not been heard for 12 s (bus.lease 3 s): dead, frozen or cut off"]),
        ({"steps_without_variance": 2, "steps_without_gradient": 2}, []),
        ({"steps_without_variance": 20, "steps_without_gradient": 20},
         [("nothing is learned: no group of the last 20 steps had different rewards (`actors samples` shows "
           "completions and rewards)")]),
        ({"steps_without_variance": 10, "steps_without_gradient": 10} | settings(groups_per_step=1), []),
        ({"steps_without_gradient": 4},
         ["nothing is learned: the gradient of the last 4 steps was 0, though rewards differ"]),
        ({"reward_calls": 40, "late_reward_calls": 40, "settings": PROGRESS["settings"] | {"reward.timeout": 2.0}},
         ["reward functions are late: 40 of 40 calls took longer than reward.timeout 2 s"]),
        ({"reward_calls": 100, "late_reward_calls": 9}, []),
        ({"dropped": {"poison": 5, "stale": 1}, "num_issued": 27},
         ["data is lost: 5 of 11 groups, 45%, were dropped as poison after three failed attempts each"]),
        ({"dropped": {"poison": 5}, "num_issued": 1000}, []),
        ({"missing": ["trainer-1"]}, ["trainer-1 is not there: no step is trained"]),
        ({"missing": ["trainer-0"], "phase": "starting", "seconds": 59.0}, []),
        ({"missing": ["trainer-0"], "phase": "starting"}, ["trainer-0 is not there: no step is trained"]),
        ({"actors": [PROGRESS["actors"][0] | {"error": "no room"}]}, ["inference-0: no room"]),
        ({"actors": [PROGRESS["actors"][0] | {"engine": "quarantined"}]},
         ["inference-0 is quarantined: it could not take new weights, and gets no work"]),
        ({"unwritten": ["/out/metrics.jsonl: No space left on device"]},
         ["can't be written: /out/metrics.jsonl: No space left on device"]),
        ({"phase": "failed", "failure": "a judge is missing", "missing": ["reward"]},
         ["the run has failed: a judge is missing"]),
        ({"phase": "done", "missing": ["reward"]}, []),
    ],
)  # fmt: skip
def test_who_is_missing_and_what_is_broken_is_said_in_words(changes, words):
    """Nothing for a run that is well or over; a heartbeat may be late up to a lease."""
    assert diagnose(PROGRESS | changes, 0.5) == words


def test_a_run_with_equal_rewards_and_gradients_is_no_trouble():
    """Groups of one completion, distillation and a reference KL learn while no group has different rewards."""
    assert learning({"steps_without_variance": 20, "settings": {"packer.groups_per_step": 32}}) == []
    few = {"steps_without_variance": 20, "steps_without_gradient": 2, "settings": {"packer.groups_per_step": 32}}
    assert learning(few) == []


def test_a_packer_that_is_silent_is_named_first():
    """Its word is as old as that."""
    assert diagnose(PROGRESS, 200.0) == ["the packer has not been heard for 3 min"]


def test_what_has_been_dealt_with_is_counted_and_cut_to_a_readable_length():
    """Nothing in a run where all was well."""
    assert dealt_with(PROGRESS) == []
    bad = {"restarts": {"rollout-0": 2}, "failed_attempts": 7, "reissued": 3, "num_issued": 26,
           "dropped": {"poison": 2, "stale": 1}}  # fmt: skip
    *said, last = dealt_with(PROGRESS | bad | {"last_failure": "judge " * 99})
    assert said == [
        "restarted rollout-0 ×2",
        "failed attempts 7",
        "issued again 3",
        "dropped 3 of 10 groups, 30% (2 poison, 1 stale)",
    ]
    assert last.startswith("last failure: judge judge")
    assert last.endswith("judge…")
    assert len(last) < 120


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (119, "119 s"), (180, "3 min"), (7200, "2 h"), (400_000, "5 days")]
)
def test_ages_are_told_in_the_unit_that_fits(seconds, words):
    """Two of a unit before the next one is used."""
    assert seconds_in_words(seconds) == words
