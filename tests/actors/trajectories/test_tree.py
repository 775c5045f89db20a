"""Each sampled token is trained once, and each sample holds exactly the tokens that the model saw."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trajectories.tree import NO_POLICY, Origin, Sample, SampledTurn, TrajectoryTree
from schemas.routed import UNKNOWN


def turn(*ids: int, version: int = 1, trains: bool = True, temperature: float = 1.0) -> SampledTurn:
    """Tokens whose logprobs tell which they are."""
    return SampledTurn(ids, [-token / 100 for token in ids], [(0, 1, version)], temperature, trains)


def text_of(sample: Sample) -> str:
    """Trained tokens as they are, others in brackets."""
    return f"{sample.prompt_ids} " + " ".join(
        str(token) if mask else f"({token})" for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True)
    )


def test_a_conversation_is_one_sample() -> None:
    """Prompt 1 2, sampled 3 4, told 5, sampled 6 under the next policy at another temperature."""
    tree = TrajectoryTree()
    tree.add([1, 2], turn(3, 4))
    tree.add([1, 2, 3, 4, 5], turn(6, version=2, temperature=0.5))
    [sample] = tree.samples()
    assert text_of(sample) == "[1, 2] 3 4 (5) 6"
    assert sample.logprobs == [-0.03, -0.04, 0.0, -0.06]
    assert sample.temperatures == [1.0, 1.0, 1.0, 0.5]
    assert sample.segments == [
        (0, 1, 1, Origin.MODEL, 0),
        (2, NO_POLICY, NO_POLICY, Origin.ENVIRONMENT, 1),
        (3, 1, 2, Origin.MODEL, 1),
    ]
    assert (tree.num_turns, tree.num_branches, tree.num_sampled, sample.num_sampled) == (2, 0, 3, 3)


def test_a_single_turn_is_prompt_and_completion() -> None:
    """As the ring has always had it."""
    tree = TrajectoryTree()
    tree.add([1, 2], turn(3, 4))
    [sample] = tree.samples()
    assert (sample.prompt_ids, sample.token_ids, sample.loss_mask) == ([1, 2], [3, 4], [1, 1])
    assert sample.segments == [(0, 1, 1, Origin.MODEL, 0)]


def test_the_tokens_that_close_a_turn_are_told_apart() -> None:
    """A turn cut off before its end token 9."""
    tree = TrajectoryTree()
    tree.add([1], turn(3))
    tree.add([1, 3, 9, 5], turn(6), num_boundary=1)
    [sample] = tree.samples()
    assert text_of(sample) == "[1] 3 (9) (5) 6"
    assert [origin for _, _, _, origin, _ in sample.segments] == [
        Origin.MODEL,
        Origin.BOUNDARY,
        Origin.ENVIRONMENT,
        Origin.MODEL,
    ]


def test_an_edited_history_is_a_branch_that_trains_its_own_tokens_alone() -> None:
    """Two continuations of the first turn, and one that has nothing of it."""
    tree = TrajectoryTree()
    tree.add([1], turn(2))
    tree.add([1, 2, 3], turn(4))
    tree.add([1, 2, 5], turn(6))
    tree.add([1, 7], turn(8))
    assert [text_of(sample) for sample in tree.samples()] == ["[1] 2 (3) 4", "[1, 2, 5] 6", "[1, 7] 8"]
    assert tree.num_branches == 2


def test_the_longest_prefix_is_continued() -> None:
    """Not the first that fits."""
    tree = TrajectoryTree()
    tree.add([1], turn(2))
    tree.add([1, 2, 3], turn(4))
    assert tree.continued([1, 2, 3, 4, 5]) == 1
    assert tree.continued([1, 2, 3, 5]) == 0
    assert tree.continued([1, 3]) is None


def test_a_turn_that_does_not_train_is_seen_and_not_learned() -> None:
    """Cut off in the middle of a conversation, or at its start."""
    tree = TrajectoryTree()
    tree.add([1], turn(2, trains=False))
    tree.add([1, 2, 3], turn(4))
    tree.add([1, 2, 3, 4, 5], turn(6, trains=False))
    [sample] = tree.samples()
    assert text_of(sample) == "[1, 2, 3] 4 (5) (6)"
    assert sample.logprobs == [-0.04, 0.0, -0.06]


def test_a_trajectory_without_a_trained_token_has_one_sample_outside_the_loss() -> None:
    """An empty one has none; a second path without a trained token adds none."""
    tree = TrajectoryTree()
    assert tree.samples() == []
    tree.add([1], turn(2, trains=False))
    tree.add([3], turn(4, trains=False))
    [sample] = tree.samples()
    assert (sample.prompt_ids, sample.token_ids, sample.loss_mask) == ([1], [2], [0])


def test_each_token_has_the_experts_of_the_turn_that_computed_it_first() -> None:
    """Later turns tell of all tokens; kept are those from the last token of the turn before on, and none is told."""

    def told(count: int, value: int) -> np.ndarray:
        return np.full((count, 2, 3), value, np.int8)

    tree = TrajectoryTree()
    tree.add([1, 2], replace(turn(3, 4), routed_experts=told(3, 1)))
    tree.add([1, 2, 3, 4, 5], replace(turn(6, 7), routed_experts=told(6, 2)))
    branch = tree.add([1, 2, 8], replace(turn(9), routed_experts=told(3, 3)))
    first, second = tree.samples()
    assert first.experts is not None
    assert second.experts is not None
    # tokens 1 2 3 | 4 5 6 | 7, which no engine has computed
    assert first.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, UNKNOWN]
    assert second.experts[:, 1, 2].tolist() == [3, 3, 3, UNKNOWN]
    kept = [node.turn.routed_experts for node in tree._nodes]
    assert [len(experts) for experts in kept if experts is not None] == [3, 3, 3]
    assert kept[1].base is None  # the rest of what was told takes no memory
    # an engine that tells nothing, or not of all tokens, leaves the sample without
    tree.add([1, 2, 8, 9, 5], turn(6))
    assert [sample.experts is None for sample in tree.samples()] == [False, True]
    tree.add([1, 3], replace(turn(3, 4), routed_experts=told(9, 1)[:2]))
    assert [sample.experts is None for sample in tree.samples()] == [False, True, True]
    assert branch == 2


def test_policies_within_a_turn_stay_apart() -> None:
    """An update in the middle of a turn."""
    tree = TrajectoryTree()
    tree.add([1], turn(2))
    tree.add([1, 2, 3], SampledTurn([4, 5, 6], [-0.1] * 3, [(0, 1, 7), (2, 1, 8)]))
    [sample] = tree.samples()
    assert [segment[:3] for segment in sample.segments] == [(0, 1, 1), (1, -1, -1), (2, 1, 7), (4, 1, 8)]


@pytest.mark.parametrize(
    ("ids", "logprobs", "segments", "words"),
    [
        ([], [], [(0, 1, 1)], "token_ids: a turn has no tokens"),
        ([1], [], [(0, 1, 1)], "logprobs: 0 for 1 tokens"),
        ([1], [-1.0], [], r"segments: starts \[\]"),
        ([1, 2], [-1.0, -1.0], [(1, 1, 1)], r"starts \[1\]"),
        ([1, 2], [-1.0, -1.0], [(0, 1, 1), (2, 1, 2)], r"starts \[0, 2\]"),
        ([1, 2], [-1.0, -1.0], [(0, 1, 1), (0, 1, 2)], r"starts \[0, 0\]"),
    ],
)
def test_a_turn_that_does_not_add_up_is_refused(
    ids: list[int], logprobs: list[float], segments: list[tuple[int, int, int]], words: str
) -> None:
    """By the field."""
    with pytest.raises(ValueError, match=words):
        SampledTurn(ids, logprobs, segments)


Steps = list[tuple[int, list[int], int, bool]]
"""Each turn: the turn that it continues (modulo their number, −1: none), new tokens, number sampled, trains."""
STEPS = st.lists(
    st.tuples(st.integers(-1, 20), st.lists(st.integers(1, 3), max_size=3), st.integers(1, 4), st.booleans()),
    max_size=25,
)


@given(STEPS)
def test_any_tree_trains_each_sampled_token_once(steps: Steps) -> None:
    """Tokens are few, so that prompts share prefixes by chance; sampled ones have a logprob of their own."""
    tree, prompts, sampled = TrajectoryTree(), list[list[int]](), list[tuple[list[int], list[float], bool]]()
    serial = 0
    for continued, new, number, trains in steps:
        base = continued % len(prompts) if prompts and continued >= 0 else None
        prompt = [*(prompts[base] + sampled[base][0] if base is not None else [9]), *new]
        ids = [1 + (serial + i) % 3 for i in range(number)]
        logprobs = [-1e-3 * (serial + i + 1) for i in range(number)]
        serial += number
        number = tree.add(prompt, SampledTurn(ids, logprobs, [(0, 1, len(prompts))], trains=trains))
        prompts.append(prompt)
        sampled.append((ids, logprobs, trains))
        assert tree.ids(number) == prompt + ids
    trained = Counter[float]()
    for sample in tree.samples():
        sizes = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs), len(sample.temperatures)}
        assert len(sizes) == 1
        starts = [start for start, *_ in sample.segments]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        ends = [*starts[1:], len(sample.token_ids)]
        whole = sample.prompt_ids + sample.token_ids
        for (start, _, version, origin, number), end in zip(sample.segments, ends, strict=True):
            part = slice(start, end)
            if origin is Origin.MODEL:
                ids, logprobs, trains = sampled[number]
                assert (version, sample.token_ids[part], sample.logprobs[part]) == (number, ids, logprobs)
                assert set(sample.loss_mask[part]) == {int(trains)}
                # in front of sampled tokens stands exactly what the engine was given
                assert whole[: len(sample.prompt_ids) + start] == prompts[number]
            else:
                assert set(sample.loss_mask[part]) == {0}
                assert set(sample.logprobs[part]) == {0.0}
        pairs = zip(sample.logprobs, sample.loss_mask, strict=True)
        trained.update(logprob for logprob, mask in pairs if mask)
        assert sample.loss_mask[0] == 1 or not any(trains for *_, trains in sampled)
    assert trained == Counter(logprob for _, logprobs, trains in sampled for logprob in logprobs if trains)
    assert tree.num_sampled == serial
