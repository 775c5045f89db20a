"""Recorded calls of a group: what each turn of any tree was asked, and what it answered."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.recorded import NotRecordedError, RecordedCall, RecordedEngines, recorded_calls
from actors.trajectories.tree import SampledTurn, TrajectoryTree
from tests.actors.rollout.doubles import ticket
from tests.actors.rollout.test_trajectory_batches import a_step, scored


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_calls_have_the_tokens_of_their_turns(seed: int) -> None:
    """Of turns that continue, branch, are asked again or begin anew; each trained one once, in their order."""
    groups, trees, _ = a_step(seed)
    for group, members in zip(groups, trees, strict=True):
        for completion, tree in enumerate(members):
            calls = recorded_calls(group, completion)
            turns = [call.turn for call in calls]
            assert turns == sorted(set(turns))
            for call in calls:
                assert [*call.prompt_ids, *call.token_ids] == list(tree.ids(call.turn))
                assert len(call.logprobs) == len(call.token_ids)
                # all turns have the policies 3 and 4, the latter from a place within the turn
                assert [(one[1], one[2]) for one in call.segments] == [(1, 3), (1, 4)][: len(call.segments)]
                assert call.segments[0][0] == 0
        logprobs = [one for i in range(len(members)) for call in recorded_calls(group, i) for one in call.logprobs]
        assert len(set(logprobs)) == len(logprobs)
        assert np.isin(group.logprobs[group.loss_mask == 1], logprobs).all()


def decode(token_ids: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(chr(90 + token) for token in token_ids)


def engines() -> tuple[RecordedEngines, list[RecordedCall]]:
    """The engines of a group with several turns, all of them trained, and its calls."""
    for seed in range(100):
        for group, (tree, *_) in zip(*a_step(seed)[:2], strict=True):
            calls = recorded_calls(group, 0)
            if 1 < len(calls) == tree.num_turns:
                return RecordedEngines(group, {ticket(0).seed: 0}, decode, ["never"]), calls
    raise AssertionError("no seed has such a group")


async def test_each_recorded_answer_is_given_once() -> None:
    """To its own prompt, in any order, and to each trajectory its own."""
    recorded, calls = engines()
    affinity = object()
    for call in [calls[0], *reversed(calls[1:])]:
        [answer] = await recorded.ask(ticket(0), call.prompt_ids, affinity=affinity)
        assert answer.token_ids == call.token_ids
        assert answer.finish_reason == "length"
    assert recorded.num_calls(0) == (len(calls), len(calls))
    with pytest.raises(NotRecordedError, match=f"all {len(calls)} recorded calls have been asked"):
        await recorded.ask(ticket(0), calls[0].prompt_ids, affinity=affinity)


async def test_a_stop_text_ends_an_answer() -> None:
    """As the engine has said it."""
    recorded, calls = engines()
    first = chr(90 + calls[0].token_ids[-1])
    [answer] = await recorded.ask(ticket(0), calls[0].prompt_ids, stop=[first], affinity=object())
    assert answer.finish_reason == "stop"


async def test_a_stop_text_in_the_name_of_a_special_token_ends_nothing() -> None:
    """Engines look for it in the text without special tokens."""
    tree = TrajectoryTree()
    tree.add([8, 9], SampledTurn([7, 6], [-1.0] * 2, [(0, 1, 3)]))
    group = scored(0, [tree], random.Random(0))
    for special, reason in ((), "stop"), ({6}, "length"):
        recorded = RecordedEngines(group, {ticket(0).seed: 0}, decode, ["never"], special)
        [answer] = await recorded.ask(ticket(0), [8, 9], [decode([6])], object())
        assert answer.finish_reason == reason


async def test_an_untrained_turn_before_all_trained_ones_is_answered_up_to_its_end() -> None:
    """Samples have such a turn in their prompts: of an answer in a demanded form, say."""
    tree = TrajectoryTree()
    tree.add([8, 9], SampledTurn([7, 6, 5], [-1.0] * 3, [(0, 1, 3)], trains=False))
    tree.add([8, 9, 7, 6, 5, 11], SampledTurn([12], [-1.0], [(0, 1, 3)]))
    group = scored(0, [tree], random.Random(0))
    recorded, affinity = RecordedEngines(group, {ticket(0).seed: 0}, decode, [decode([5])]), object()
    for prompt, answer in (([8, 9], [7, 6, 5]), ([8, 9, 7, 6, 5, 11], [12])):
        [found] = await recorded.ask(ticket(0), prompt, affinity=affinity)
        assert found.token_ids == answer
    assert recorded.num_calls(0) == (2, 2)


@pytest.mark.parametrize("way", ["other", "longer", "shorter"])
async def test_a_prompt_that_is_not_recorded_is_refused_from_its_first_difference(way: str) -> None:
    """The words have the place and both texts."""
    recorded, calls = engines()
    prompt = list(calls[0].prompt_ids)
    place = {"other": 0, "longer": len(prompt), "shorter": len(prompt) - 1}[way]
    asked = {"other": [31, *prompt[1:]], "longer": [*prompt, 31], "shorter": prompt[:-1]}[way]
    with pytest.raises(NotRecordedError, match=f"call 1 is not in the record: from token {place} of the prompt on"):
        await recorded.ask(ticket(0), asked, affinity=object())
    assert len(recorded.differences(0)) == 1
