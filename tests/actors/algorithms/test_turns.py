"""Turns of branched trajectories: which one continues which, and whose rewards reach them."""

import random

import numpy as np
import pytest

from actors.algorithms.advantages.tokens import Turn, process
from actors.algorithms.turns import turn_trees
from actors.trajectories.tree import TrajectoryTree
from schemas.config.advantages import ProcessAdvantageConfig
from tests.actors.algorithms.test_trajectory_scoring import group, scored
from tests.actors.rollout.test_trajectory_batches import Tokens, a_tree
from tests.actors.rollout.test_trajectory_batches import scored as group_of

PLAIN = {"type": "process", "std": "population", "eps": 0.0, "discount": 0.5}


def expected_parents(tree: TrajectoryTree, present: list[int]) -> list[int | None]:
    """Of the turns that are in samples, by comparing all tokens: the place of the longest line that each continues."""
    found: list[int | None] = []
    for number in present:
        prompt = list(tree.prompt(number))
        before = [
            place
            for place, other in enumerate(present)
            if other < number and prompt[: len(tree.ids(other))] == tree.ids(other)
        ]
        found.append(max(before, key=lambda place: (len(tree.ids(present[place])), place), default=None))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_parents_are_those_of_the_recorded_tree(seed: int) -> None:
    """Of random conversations with branches, edits, retries and turns that are not trained."""
    tokens = Tokens(random.Random(seed))
    trees = [a_tree(tokens, [1, 2]) for _ in range(3)]
    taken = group_of(0, trees, tokens.rng)
    found = turn_trees(taken, "parents")
    num_samples = np.bincount(taken.sample_completions)
    sampled = taken.segments[taken.segments[:, 3] == 0]
    owners = np.searchsorted(taken.completion_offsets, sampled[:, 0], side="right") - 1
    for number, (tree, turns) in enumerate(zip(trees, found, strict=True)):
        assert bool(turns) == (num_samples[number] > 1)
        if turns:
            present = sorted(set(sampled[owners == number, 4].tolist()))
            assert [turn.parent for turn in turns] == expected_parents(tree, present)
            start = taken.completion_offsets[number]
            texts = [taken.token_ids[start + turn.start : start + turn.end].tolist() for turn in turns]
            assert texts == [tree.ids(one)[len(tree.prompt(one)) :] for one in present]


def test_along_parents_a_turn_that_begins_anew_gives_earlier_turns_nothing() -> None:
    """Turn 2 of the first trajectory continues no turn: half of its score reaches turn 0 along the turns only."""
    z = (np.array([0.5, 2.0, 1.0]) - 7 / 6) / np.std([0.5, 2.0, 1.0])
    others = [*[z[2]] * 4, 0.0]
    along_turns = scored(group(), [], {}, advantage=PLAIN, steps={})
    assert np.allclose(along_turns.token_advantages_N, [z[0] + z[1] / 2] * 2 + [0.0] * 3 + [z[1]] * 3 + others)
    along_parents = scored(group(), [], {}, advantage=PLAIN | {"discount_along": "parents"}, steps={})
    assert np.allclose(along_parents.token_advantages_N, [z[0]] * 2 + [0.0] * 4 + [z[1]] * 2 + others)


def test_a_turn_that_two_turns_continue_has_the_discounted_rewards_of_both() -> None:
    """Its helpers have nothing of each other; along the turns the first has what the second one earns."""
    steps, lengths = [[(2, 1.0), (3, 2.0), (5, 4.0)]], np.array([5])
    z = (np.array([1.0, 2.0, 4.0]) - 7 / 3) / np.std([1.0, 2.0, 4.0])
    config = ProcessAdvantageConfig(std="population", eps=0.0)
    both = [[Turn(0, 2, None), Turn(2, 3, 0), Turn(3, 5, 0)]]
    assert np.allclose(process(steps, lengths, config, 0.5, both), [z[0] + (z[1] + z[2]) / 2] * 2 + [z[1], z[2], z[2]])
    in_a_row = [[Turn(0, 2, None), Turn(2, 3, 0), Turn(3, 5, 1)]]
    found = process(steps, lengths, config, 0.5, in_a_row)
    assert np.allclose(found, process(steps, lengths, config, 0.5)), "a line is what it is without branches"


def test_along_the_turns_is_the_order_of_sampling_and_not_of_samples() -> None:
    """Turn 1 is the branch here, and turn 2 continues turn 0: turn 1 has the half of turn 2, which stands before it."""
    segments = group().segments.copy()
    segments[2, 4], segments[3, 4] = 2, 1
    taken = group(segments=segments, turn_rewards=np.array([[0, 1, 0.5], [0, 2, 2.0], [1, 0, 1.0]]))
    z = (np.array([0.5, 2.0, 1.0]) - 7 / 6) / np.std([0.5, 2.0, 1.0])
    found = scored(taken, [], {}, advantage=PLAIN, steps={}).token_advantages_N
    assert np.allclose(found[6:8], z[0] + z[1] / 2)
    assert np.allclose(found[5], z[1])
    assert np.allclose(found[:2], z[0] + z[1] / 2)
