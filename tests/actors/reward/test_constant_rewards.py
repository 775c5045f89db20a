"""Functions that return one value for all completions are found; others are left alone."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.ops.screens.render import View, describe, render
from actors.reward.constant_rewards import GROUPS_UNTIL_SAID, ConstantRewards
from tests.actors.ops.screens.progresses import PROGRESS
from tests.ring.harness import own_reward, ring, ring_config, wait_until, watching

ZEROS = np.zeros((1, 4))


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_function_that_returns_one_value_for_all_is_named_once_with_the_hint_for_chat(is_chat):
    """After 20 groups, not before, and not again."""
    same = ConstantRewards()
    found = [same.note(["f"], ZEROS, is_chat) for _ in range(GROUPS_UNTIL_SAID + 5)]
    (words,) = found[GROUPS_UNTIL_SAID - 1]
    assert sum(map(len, found)) == 1
    assert words.startswith("f returned 0 for every completion of the first 20 groups")
    assert ("lists of messages, [{'role': 'assistant', 'content': TEXT}], not texts" in words) is is_chat
    assert same.words == [words]


def test_the_first_other_value_ends_it_for_good():
    """Within a group, or from group to group."""
    same = ConstantRewards()
    for _ in range(GROUPS_UNTIL_SAID):
        same.note(["f", "g"], np.zeros((2, 4)), is_chat=False)
    assert len(same.words) == 2
    same.note(["f", "g"], np.array([[0.0, 1.0], [2.0, 2.0]]), is_chat=False)
    assert same.words == []
    for _ in range(GROUPS_UNTIL_SAID):
        same.note(["f", "g"], np.zeros((2, 4)), is_chat=False)
    assert same.words == []


def test_groups_of_one_completion_and_rows_without_a_number_tell_nothing():
    """One completion is always equal to itself; a function that does not apply has not judged."""
    same = ConstantRewards()
    for _ in range(3 * GROUPS_UNTIL_SAID):
        same.note(["f"], np.zeros((1, 1)), is_chat=False)
        same.note(["f"], np.full((1, 4), np.nan), is_chat=False)
    assert same.words == []


@pytest.mark.slow
def test_a_run_names_such_a_function_in_the_log_and_on_its_screens(tmp_path):
    """The note comes to whoever watches, by the reward actor's heartbeat."""
    config = ring_config(tmp_path, "inproc", reward=own_reward("constant"), eval={"num_prompts": 0})
    with capture_logs() as logs, ring(config) as run:
        run.start()
        with watching(config) as watcher:
            notes = wait_until(lambda: watcher.progress().get("notes"), "the note")
        run.wait()
    assert notes == ["constant returned 1 for every completion of the first 20 groups"]
    assert [line["detail"] for line in logs if line["event"] == "reward function returns one value"] == notes


def test_a_note_is_shown_and_makes_no_run_unhealthy():
    """On a screen in lines of its own, elsewhere in the line."""
    view = View("quick", "/out", PROGRESS | {"notes": ["f returned 0 for every completion of the first 20 groups"]})
    assert "note       f returned 0 for every completion of the first 20 groups" in render(view)
    assert describe(view.progress, 0.0).endswith("f returned 0 for every completion of the first 20 groups")
    assert view.is_healthy
