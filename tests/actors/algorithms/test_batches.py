"""From scored groups to the batches of all ranks: every token once, and the same bits from stored payloads (P18)."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from actors.algorithms.batches import batches_of_step, build_batches, prompts_count_once, split
from bus import codec
from schemas.messages import DroppedOrdinal, ScoredGroup, StepBatch, drop_fields, single_turn
from tests.schemas.config.test_resume import config

HEADER = {
    "run": "run",
    "term": 2,
    "incarnation": 3,
    "step": 4,
    **drop_fields([DroppedOrdinal(ordinal=9, reason="stale")]),
    "digests": ["d0", "d1", "d2"],
}


def a_group(ordinal: int, lengths: list[int], prompt: int = 2, masked: int = 0) -> ScoredGroup:
    """Completions of these lengths; token ids, logprobs and advantages tell group, completion and place.

    Each completion of two tokens or more is interrupted after its first by an update from version 5 to 6, at a new
    temperature. The first `masked` tokens of the group are not in the loss.
    """
    size, group_size = sum(lengths), len(lengths)
    offsets = np.cumsum([0, *lengths])
    starts, rows, temperatures = [], [], []
    for start, length in zip(offsets[:-1].tolist(), lengths, strict=True):
        for shift in range(min(2, length)):
            starts.append(start + shift)
            rows.append((start + shift, 1, 5 + shift))
            temperatures.append(0.5 + shift)
    return ScoredGroup(
        run="run",
        sender="a",
        ordinal=ordinal,
        attempt=1,
        purpose="train",
        environment="words",
        example_key="key",
        prompt="hello",
        columns={"answer": "x"},
        completions=["text"] * group_size,
        stop_conditions=["stop"] * group_size,
        token_ids=(1000 * (ordinal + 1) + np.arange(size)).astype(np.int32),
        loss_mask=(np.arange(size) >= masked).astype(np.uint8),
        logprobs=(-(ordinal + 1) - np.arange(size) / 64).astype(np.float32),
        **single_turn(np.arange(prompt, dtype=np.int32) + 1, offsets, np.array(rows, np.int64).reshape(-1, 3)),
        segment_temperatures=np.array(temperatures, np.float32),
        scorer="r",
        reward_names=["f"],
        rewards_FG=np.array([np.arange(group_size, dtype=np.float64)]),
        rewards_G=np.arange(group_size, dtype=np.float64),
        advantages_G=(np.arange(group_size) + 10 * ordinal).astype(np.float32),
    )


GROUPS = [a_group(0, [3, 1]), a_group(2, [4, 2, 5], prompt=1, masked=2), a_group(3, [1, 1], prompt=1)]
"""17 completion tokens, 15 in the loss, 7 completions."""


def build(
    num_ranks: int = 1, sequence_len: int = 8, groups: list[ScoredGroup] = GROUPS, num_minibatches: int = 1
) -> list[StepBatch]:
    """The batches of all ranks."""
    return build_batches(groups, num_ranks, sequence_len, num_minibatches, **HEADER)


def samples(batches: list[StepBatch]) -> list[dict[str, list[float]]]:
    """All samples of all ranks: per-token values without the prompt, and prompt ids."""
    found = []
    for batch in batches:
        for b in range(batch.prompt_lengths.size):
            start, end = batch.sample_offsets[b : b + 2]
            body = start + batch.prompt_lengths[b]
            names = ("token_ids", "loss_mask", "logprobs", "advantages", "temperatures", "versions")
            sample = {name: getattr(batch, name)[body:end].tolist() for name in names}
            prompt = {f"prompt_{name}": getattr(batch, name)[start:body].tolist() for name in names}
            sample |= prompt | {"ordinal": [int(batch.sample_ordinals[b])]}
            found.append(sample)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_completion_token_is_in_exactly_one_sample_of_one_rank(num_ranks: int) -> None:
    """Token ids are unique here, so counting them is enough."""
    tokens = Counter(token for sample in samples(build(num_ranks)) for token in sample["token_ids"])
    assert tokens == Counter(int(token) for group in GROUPS for token in group.token_ids)
    assert set(tokens.values()) == {1}


def test_a_sample_carries_the_values_of_its_own_tokens() -> None:
    """The second completion of ordinal 2, by hand: tokens 4 and 5 of the group, advantage 21."""
    (sample,) = [s for s in samples(build(2)) if s["token_ids"][0] == 3004]
    assert sample == {
        "token_ids": [3004, 3005],
        "loss_mask": [1, 1],
        "logprobs": [-3 - 4 / 64, -3 - 5 / 64],
        "advantages": [21.0, 21.0],
        "temperatures": [0.5, 1.5],
        "versions": [5, 6],
        "prompt_token_ids": [1],
        "prompt_loss_mask": [0],
        "prompt_logprobs": [0.0],
        "prompt_advantages": [0.0],
        "prompt_temperatures": [1.0],
        "prompt_versions": [0],
        "ordinal": [2],
    }


def test_advantages_of_tokens_are_kept_apart() -> None:
    """Where a group has them they count, not those of its completions; the other groups keep theirs."""
    tokens = np.arange(4, dtype=np.float32)
    groups = [GROUPS[0].model_copy(update={"token_advantages": tokens}), *GROUPS[1:]]
    by_first_token = {s["token_ids"][0]: s["advantages"] for s in samples(build(groups=groups))}
    assert (by_first_token[1000], by_first_token[1003]) == ([0.0, 1.0, 2.0], [3.0])
    assert by_first_token[3004] == [21.0, 21.0]


def test_the_loss_mask_of_the_group_is_kept() -> None:
    """Its first two tokens were not written by the policy."""
    (sample,) = [s for s in samples(build()) if s["token_ids"][0] == 3000]
    assert sample["loss_mask"] == [0, 0, 1, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_knows_the_loss_tokens_and_completions_of_the_whole_step(num_ranks: int) -> None:
    """15 and 7, whatever its share; the shares of loss tokens add up."""
    batches = build(num_ranks)
    assert {(*batch.loss_tokens.tolist(), *batch.num_completions.tolist()) for batch in batches} == {(15, 7)}
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == 15
    assert sum(batch.prompt_lengths.size for batch in batches) == 7


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_micro_batches_are_as_many_on_every_rank_and_none_is_too_long(num_ranks: int) -> None:
    """Ranks run in lockstep; sequence_len bounds memory."""
    batches = build(num_ranks)
    assert len({batch.num_micro_batches for batch in batches}) == 1
    for batch in batches:
        bounds = batch.sample_offsets[batch.micro_batch_offsets]
        assert (np.diff(bounds) <= 8).all()


def test_every_rank_gets_the_header_and_all_ordinals() -> None:
    """Its witness is of the whole step (P20)."""
    for rank, batch in enumerate(build(2)):
        assert (batch.rank, batch.num_ranks, batch.ordinals.tolist()) == (rank, 2, [0, 2, 3])
        assert {name: getattr(batch, name) for name in HEADER} == HEADER


def test_more_ranks_than_samples_leave_ranks_with_empty_micro_batches() -> None:
    """One sample, three ranks: all take part in the step, two with nothing."""
    groups = [a_group(0, [2])]
    batches = build_batches(groups, 3, 8, **HEADER | {"digests": ["d0"]})
    assert sorted(batch.token_ids.size for batch in batches) == [0, 0, 4]
    assert {batch.num_micro_batches for batch in batches} == {1}


def test_a_step_without_loss_tokens_says_so() -> None:
    """The losses divide by 1 then, see `test_losses`."""
    groups = [a_group(0, [2], masked=2)]
    assert build_batches(groups, 1, 8, **HEADER | {"digests": ["d0"]})[0].loss_tokens.tolist() == [0]


def without_zeros(groups: list[ScoredGroup], num_ranks: int = 1, num_minibatches: int = 1) -> list[StepBatch]:
    """Their batches with filter_zero_advantages."""
    header = HEADER | {"digests": ["d"] * len(groups)}
    return build_batches(groups, num_ranks, 8, num_minibatches, filter_zero_advantages=True, **header)


def with_advantages(group: ScoredGroup, *advantages: float) -> ScoredGroup:
    """The group with these, one for each completion."""
    return group.model_copy(update={"advantages_G": np.array(advantages, np.float32)})


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_zero_advantages_leave_the_loss_and_its_denominator(num_ranks: int) -> None:
    """Equal rewards in the first group: 4 of 11 tokens go; and one completion of the second: 2 more."""
    groups = [with_advantages(a_group(0, [3, 1]), 0, 0), with_advantages(a_group(1, [4, 2, 1]), 1, 0, -1)]
    batches = without_zeros(groups, num_ranks)
    assert {(*b.loss_tokens.tolist(), *b.num_completions.tolist()) for b in batches} == {(5, 2)}
    found = samples(batches)
    assert sorted(sample["token_ids"][0] for sample in found) == [2000, 2006]
    assert all(sample["loss_mask"] == [1] * len(sample["token_ids"]) for sample in found)
    assert [batch.ordinals.tolist() for batch in batches] == [[0, 1]] * num_ranks


def test_single_tokens_without_an_advantage_leave_the_loss() -> None:
    """One of a completion's two tokens has some; the completion stays, as does one that had no loss tokens before."""
    group = a_group(0, [2, 2], masked=2).model_copy(update={"token_advantages": np.array([0, 0, 0, 2], np.float32)})
    (batch,) = without_zeros([group])
    assert sorted(tuple(sample["loss_mask"]) for sample in samples([batch])) == [(0, 0), (0, 1)]
    assert (batch.loss_tokens.tolist(), batch.num_completions.tolist()) == ([1], [2])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_minibatch_of_zero_advantages_is_a_micro_batch_of_nothing(num_ranks: int) -> None:
    """Two minibatches, the second with a group of equal rewards: it stays one, on every rank, and can be sent."""
    groups = [with_advantages(a_group(0, [3, 1]), 1, -1), with_advantages(a_group(1, [2, 2]), 0, 0)]
    for batch in without_zeros(groups, num_ranks, 2):
        assert (batch.loss_tokens.tolist(), batch.num_completions.tolist()) == ([4, 0], [2, 0])
        assert np.diff(batch.minibatch_offsets).tolist()[1] == 1
        assert codec.decode([bytes(frame) for frame in codec.encode(batch)]).equals(batch)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_component_counts_the_tokens_of_the_environments_that_have_it(num_ranks: int) -> None:
    """Of three groups of 4, 3 and 5 tokens: the first policy loss alone, the second both, the third distillation."""
    groups = [a_group(0, [3, 1]), a_group(1, [3]), a_group(2, [2, 3])]
    names = ["plain", "both", "taught"]
    groups = [group.model_copy(update={"environment": name}) for group, name in zip(groups, names, strict=True)]
    batches = build_batches(groups, num_ranks, 8, weights={"both": (0.5, 2.0), "taught": (0.0, 1.0)}, **HEADER)
    assert {(*b.loss_tokens.tolist(), *b.ref_kl_tokens.tolist()) for b in batches} == {(7, 8)}
    found = {
        int(ordinal): (rl, ref_kl)
        for b in batches
        for ordinal, rl, ref_kl in zip(b.sample_ordinals, b.rl_weights, b.ref_kl_weights, strict=True)
    }
    assert found == {0: (1.0, 0.0), 1: (0.5, 2.0), 2: (0.0, 1.0)}


def test_packer_and_replay_build_a_step_by_the_same_settings() -> None:
    """With adv_norm and two ranks, and with filter_zero_advantages: what `batches_of_step` makes of the payloads."""
    groups = [a_group(0, [3, 1]), with_advantages(a_group(1, [2, 2]), 0, 0)]
    header = HEADER | {"digests": ["d0", "d1"]}
    run = config(trainer={"max_steps": 9, "num_ranks": 2}, packer={"filter_zero_advantages": True, "sequence_len": 600})
    assert [batch.loss_tokens.tolist() for batch in batches_of_step(groups, run, **header)] == [[1], [1]]
    reward = {"functions": [{"path": "exact_match"}], "adv_norm": {}}
    (batch,) = batches_of_step(groups, config(reward=reward), **header)
    mask = batch.loss_mask > 0
    np.testing.assert_allclose(batch.advantages[mask].std(ddof=1), 1.0, atol=1e-4)


def test_ranks_that_compute_rows_together_have_one_batch() -> None:
    """Four ranks, two for each row: two batches, and neighbours have the same one."""
    run = config(trainer={"max_steps": 9, "num_ranks": 4, "context_parallel": 2}, packer={"sequence_len": 600})
    groups = [a_group(0, [3, 1]), a_group(1, [2, 2])]
    batches = batches_of_step(groups, run, **HEADER | {"digests": ["d0", "d1"]})
    assert [(batch.rank, batch.num_ranks) for batch in batches] == [(0, 2), (1, 2)]
    assert [run.trainer.row_group_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_zero_advantages_stay_unless_they_are_filtered() -> None:
    """The default: they hold their place in the denominator."""
    (batch,) = build_batches([with_advantages(a_group(0, [3, 1]), 0, 0)], 1, 8, **HEADER | {"digests": ["d0"]})
    assert (batch.loss_tokens.tolist(), batch.num_completions.tolist()) == ([4], [2])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_batches_rebuilt_from_stored_payloads_are_the_same_bit_by_bit(num_ranks: int) -> None:
    """A pure function of payloads, ordinals, ranks and settings: a new incarnation gets what the old one got."""
    frames = [[bytes(frame) for frame in codec.encode(group)] for group in GROUPS]
    decoded = [codec.decode(parts) for parts in frames]
    first = [[bytes(frame) for frame in codec.encode(batch)] for batch in build(num_ranks)]
    again = [[bytes(frame) for frame in codec.encode(batch)] for batch in build(num_ranks, groups=decoded)]
    assert first == again


def test_batches_survive_the_wire() -> None:
    """Encoded and decoded, the same message."""
    for batch in build(2):
        received = codec.decode([bytes(frame) for frame in codec.encode(batch)])
        assert received.equals(batch)


def test_a_sample_longer_than_a_micro_batch_is_refused() -> None:
    """The ledger drops such groups before (P11); here it is an error that names the key."""
    with pytest.raises(ValueError, match=r"packer\.sequence_len"):
        build(sequence_len=5)


# --- minibatches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "num_parts", "expected"),
    [
        ([2, 3, 1], 1, [[0, 1, 2, 3, 4, 5]]),
        ([2, 4, 1, 3], 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]),
        ([1, 2, 1], 3, [[0], [1, 2], [3]]),
        ([2, 4, 4], 2, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        ([3, 2], 3, [[0, 1], [2, 3], [4]]),
        ([2], 2, [[0], [1]]),
    ],
    ids=["one", "whole groups", "a group each", "groups cut", "more parts than groups", "a completion each"],
)
def test_a_step_is_split_into_whole_groups_else_whole_completions(
    sizes: list[int], num_parts: int, expected: list[list[int]]
) -> None:
    """In the order of the step; sizes differ by one completion at most where groups are cut."""
    assert [part.tolist() for part in split(sizes, num_parts)] == expected


def test_more_minibatches_than_completions_are_refused() -> None:
    """An update of nothing would still move the weights by the optimizer's momentum."""
    with pytest.raises(ValueError, match=r"trainer\.num_minibatches: 4 parts of a step of 3 completions"):
        split([1, 2], 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_minibatch_has_its_own_micro_batches_on_every_rank(num_ranks: int) -> None:
    """Three groups of 2, 3 and 2 completions are three minibatches; all ranks have the figures counted by hand."""
    batches = build(num_ranks, num_minibatches=3)
    assert len({tuple(batch.minibatch_offsets.tolist()) for batch in batches}) == 1
    for batch in batches:
        assert (batch.loss_tokens.tolist(), batch.num_completions.tolist()) == ([4, 9, 2], [2, 3, 2])
        assert batch.num_minibatches == 3
    for u, ordinal in enumerate((0, 2, 3)):
        found: list[int] = []
        for batch in batches:
            first, last = batch.micro_batch_offsets[batch.minibatch_offsets[u : u + 2]]
            found += batch.sample_ordinals[first:last].tolist()
        assert found == [ordinal] * len(GROUPS[u].completions)


def test_minibatches_move_no_token_and_change_none() -> None:
    """The samples are those of a step in one piece."""
    whole, parts = samples(build(2)), samples(build(2, num_minibatches=2))
    assert sorted(whole, key=str) == sorted(parts, key=str)


def row_sizes(batches: list[StepBatch]) -> list[int]:
    """Tokens of each row that is not empty: prompts once, as `sample_shared` says."""
    found = []
    for batch in batches:
        held = np.diff(batch.sample_offsets) - batch.sample_shared
        bounds = batch.micro_batch_offsets.tolist()
        found += [int(held[start:end].sum()) for start, end in pairwise(bounds) if end > start]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "capacity", "apart", "once"),
    [([8] * 16, 64, 4, 3), ([8] * 16, 136, 2, 1), ([8] * 16, 32, 8, 6), ([3, 8, 5, 20, 1, 1], 40, 3, 2)],
    ids=str,
)
def test_a_prompt_counts_once_where_that_makes_fewer_rows(
    sizes: list[int], capacity: int, apart: int, once: int, num_ranks: int
) -> None:
    """A group with a prompt of 8 tokens, by hand; and with more groups and ranks no row is too long."""
    group = a_group(0, sizes, prompt=8)
    header = HEADER | {"digests": ["d0"]}
    assert len(row_sizes(build_batches([group], 1, capacity, **header))) == apart
    rows = row_sizes(build_batches([group], 1, capacity, prompts_count_once=True, **header))
    assert len(rows) == once
    assert sum(rows) == sum(sizes) + 8 * once
    groups = [a_group(number, sizes[number:], prompt=8 - number) for number in range(3)]
    batches = build_batches(groups, num_ranks, capacity, prompts_count_once=True, **HEADER)
    assert max(row_sizes(batches)) <= capacity
    assert len({batch.num_micro_batches for batch in batches}) == 1
    fewest = build_batches(groups, num_ranks, capacity, **HEADER)[0].num_micro_batches
    assert batches[0].num_micro_batches <= fewest
    tokens = Counter(token for sample in samples(batches) for token in sample["token_ids"])
    assert tokens == Counter(int(token) for group in groups for token in group.token_ids)


def test_without_a_row_less_all_is_packed_as_before() -> None:
    """Bit by bit, so a run whose steps have as few rows keeps its bits."""
    before, after = (build_batches(GROUPS, 2, 8, prompts_count_once=once, **HEADER) for once in (False, True))
    for one, other in zip(before, after, strict=True):
        assert codec.encode(one) == codec.encode(other)


def test_prompts_count_once_by_the_configuration_alone() -> None:
    """`auto`: with a GPU that is written down; a replay on a CPU then packs the same rows."""
    run = config()
    for asked, device, expected in (
        ("auto", "auto", False), ("auto", "cpu", False), ("auto", "cuda", True),
        ("once", "cpu", True), ("per_completion", "cuda", False),
    ):  # fmt: skip
        model = run.model.model_copy(update={"device": device})
        packer = run.packer.model_copy(update={"count_prompts": asked})
        assert prompts_count_once(run.model_copy(update={"model": model, "packer": packer})) is expected


# --- images ----------------------------------------------------------------------------------------------------------

IMAGE = 99
"""Token id of images."""


def seen_group(ordinal: int, prompts: list[list[int | bytes]], completions: list[list[int]]) -> ScoredGroup:
    """A group with a prompt per completion, of tokens and images, or with one prompt; an image has a token per byte."""
    ids, offsets, places = list[int](), [0], list[dict[str, int]]()
    images = dict[bytes, int]()
    for prompt in prompts:
        for piece in prompt:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            number = images.setdefault(piece, len(images))
            places.append({"image": number, "start": len(ids), "length": len(piece)})
            ids += [IMAGE] * len(piece)
        offsets.append(len(ids))
    whole = a_group(ordinal, [len(completion) for completion in completions]).__dict__
    return ScoredGroup(
        **whole
        | {
            "prompt_ids": np.array(ids, np.int32),
            "prompt_offsets": np.array(offsets),
            "sample_prompts": np.arange(len(completions)) % len(prompts),
            "token_ids": np.concatenate([np.array(completion, np.int32) for completion in completions]),
            "images": list(images),
            "image_places": places,
        }
    )


def shown(batches: list[StepBatch]) -> list[tuple[int, list[int | bytes], list[int]]]:
    """Ordinal, prompt with its images in their places, and completion of each sample, in sorted order."""
    found = []
    for batch in batches:
        for b, places in enumerate(batch.places_of_samples()):
            start, end = batch.sample_offsets[b : b + 2].tolist()
            prompt: list[int | bytes] = list(batch.token_ids[start : start + int(batch.prompt_lengths[b])].tolist())
            for place in reversed(places):
                assert prompt[place.start : place.start + place.length] == [IMAGE] * place.length
                prompt[place.start : place.start + place.length] = [batch.images[place.image]]
            found.append(
                (int(batch.sample_ordinals[b]), prompt, batch.token_ids[start + batch.prompt_lengths[b] : end])
            )
    return sorted(((o, prompt, completion.tolist()) for o, prompt, completion in found), key=str)


RED, BLUE, WIDE = b"red", b"sky", b"wide"
"""Two images of equally many tokens, and one of more."""
SEEN = [
    seen_group(0, [[1, RED, 2, WIDE]], [[5, 6], [5, 7], [8]]),
    seen_group(1, [[3]], [[5], [6, 7]]),
    seen_group(2, [[1, RED, 2, RED], [1, RED, 2, BLUE], [1, RED, 2, RED, 5, 6, 4]], [[5, 6, 7], [8, 5], [9, 9]]),
]
"""One prompt of all completions; none with images; prompts that differ by an image alone, and a branch."""


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("sequence_len", [20, 40, 200])
def test_every_sample_has_its_images_however_it_is_packed(num_ranks: int, once: bool, sequence_len: int) -> None:
    """On the wire too; each rank has the files of its own samples, each once."""
    batches = build_batches(SEEN, num_ranks, sequence_len, 1, prompts_count_once=once, **HEADER)
    received = [codec.decode([bytes(frame) for frame in codec.encode(batch)]) for batch in batches]
    assert [one.equals(batch) for one, batch in zip(received, batches, strict=True)] == [True] * num_ranks
    expected = [
        (0, [1, RED, 2, WIDE], [5, 6]),
        (0, [1, RED, 2, WIDE], [5, 7]),
        (0, [1, RED, 2, WIDE], [8]),
        (1, [3], [5]),
        (1, [3], [6, 7]),
        (2, [1, RED, 2, RED], [5, 6, 7]),
        (2, [1, RED, 2, BLUE], [8, 5]),
        (2, [1, RED, 2, RED, 5, 6, 4], [9, 9]),
    ]
    assert shown(batches) == sorted(expected, key=str)
    for batch in batches:
        assert len(set(batch.images)) == len(batch.images)


def test_a_shared_prefix_ends_in_front_of_another_image() -> None:
    """Ids of the images are equal. The branch shares both images and sampled tokens, the other prompt one image."""
    (batch,) = build_batches(SEEN[2:], 1, 200, 1, **HEADER | {"digests": ["d"]})
    assert dict(zip(batch.completions.tolist(), batch.sample_shared.tolist(), strict=True)) == {0: 0, 1: 5, 2: 10}
    assert len(batch.images) == 2
    assert len(batch.image_places) == 3
    assert batch.completions.tolist() == [0, 2, 1]


def test_text_alone_has_the_bytes_that_it_had_before_there_were_images() -> None:
    """A rank without images, next to a rank with some."""
    plain = build_batches(SEEN[1:2], 1, 20, 1, **HEADER | {"digests": ["d"]})[0]
    header = codec.encode(plain)[0]
    assert not plain.images
    assert b"image" not in bytes(header)
