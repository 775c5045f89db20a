"""Turns of trajectories as advantages need them: rewards at their ends, and which turn continues which.

A turn continues another one if its prompt begins with all tokens up to the end of the other (its parent). Most
trajectories are one line of turns. An agent that summarises its history, or that has helpers, makes a tree, or several.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import StepRewards, Turn
from schemas.messages import SEGMENT_ORIGIN, SEGMENT_START, SEGMENT_TURN, Origin, RolloutGroup


def turn_steps(group: RolloutGroup) -> list[StepRewards]:
    """Return the rewards of turns as steps (end, reward) of each completion; `end` is behind the turn's last token.

    A completion with a turn of 3 tokens, 2 tokens of the environment and a turn of 4, both rewarded: ends 3 and 9. The
    reward of a turn whose tokens are in no sample counts at the end of the turn before; of the first, not at all. A
    completion whose environment failed has no steps.
    """
    bounds = [_bounds(group, completion) for completion in range(group.num_completions)]
    steps: list[list[tuple[int, float]]] = [[] for _ in bounds]
    for completion, turn, reward in group.turn_rewards.tolist():
        completion = int(completion)
        known = [t for t in bounds[completion] if t <= turn]
        if known and not group.failed_G[completion]:
            steps[completion].append((bounds[completion][max(known)][1], reward))
    return list(steps)


def turn_trees(group: RolloutGroup, along: Literal["turns", "parents"]) -> list[Sequence[Turn]]:
    """Return the turns of each completion in the order in which they were sampled; nothing for a single line of turns.

    Turn 0, turn 1 that continues it, and turn 2 with the prompt of turn 0 and a summary, which continues no turn:
    parents None, 0, None.

    Args:
        along: `turns` takes the turn sampled before for the parent, whatever it continues.
    """
    num_samples_G = np.bincount(group.sample_completions, minlength=group.num_completions).tolist()
    return [_tree(group, g, along) if num_samples > 1 else [] for g, num_samples in enumerate(num_samples_G)]


def _bounds(group: RolloutGroup, completion: int) -> dict[int, tuple[int, int]]:
    """Return [start, end) of each turn in the tokens of a completion, by the number of the turn."""
    first, last = group.completion_offsets[completion : completion + 2].tolist()
    starts = group.segments[:, SEGMENT_START]
    ends = np.append(starts[1:], group.token_ids.size)
    found: dict[int, tuple[int, int]] = {}
    is_mine = (starts >= first) & (starts < last) & (group.segments[:, SEGMENT_ORIGIN] == Origin.MODEL)
    for turn, start, end in zip(
        group.segments[is_mine, SEGMENT_TURN].tolist(),
        (starts[is_mine] - first).tolist(),
        (ends[is_mine] - first).tolist(),
        strict=True,
    ):
        # a turn that was interrupted by an update has several segments
        found[turn] = (found[turn][0] if turn in found else start, end)
    return found


def _tree(group: RolloutGroup, completion: int, along: str) -> list[Turn]:
    bounds = sorted(_bounds(group, completion).items())
    if along == "turns":
        return [Turn(start, end, place - 1 if place else None) for place, (_, (start, end)) in enumerate(bounds)]
    lines = [_line(group, completion, end) for _, (_, end) in bounds]
    # of equal lines, which a retry makes, the newest is continued, as in the tree of the recorder
    longest_first = sorted(range(len(lines)), key=lambda place: (lines[place].size, place), reverse=True)

    def parent(place: int, prompt: NDArray[np.int32]) -> int | None:
        earlier = (one for one in longest_first if one < place and lines[one].size <= prompt.size)
        return next((one for one in earlier if np.array_equal(lines[one], prompt[: lines[one].size])), None)

    return [
        Turn(start, end, parent(place, lines[place][: start - end])) for place, (_, (start, end)) in enumerate(bounds)
    ]


def _line(group: RolloutGroup, completion: int, end: int) -> NDArray[np.int32]:
    """Return all tokens from the beginning of a sample's prompt to a place in the tokens of the completion."""
    last = int(group.completion_offsets[completion]) + end
    sample = int(np.searchsorted(group.sample_offsets, last)) - 1
    start, stop = group.prompt_offsets[group.sample_prompts[sample] :][:2].tolist()
    return np.concatenate([group.prompt_ids[start:stop], group.token_ids[group.sample_offsets[sample] : last]])
