"""Shared prefixes of a StepBatch from an untrusted peer: refused in words, or the row has each sample whole."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors.models.attention import pack_row
from bus import codec
from schemas.errors import DecodeError
from schemas.messages import StepBatch
from tests.schemas.messages.examples import EXAMPLES

SMALLEST, LARGEST = -(2**63), 2**63 - 1


def batch_of(texts: list[str], ordinals: list[int], shared: list[int], micro_batches: list[int]) -> StepBatch:
    """A batch of these samples, in which `|` ends the prompt; unchecked, as a peer may send it."""
    samples = [[ord(c) for c in text if c != "|"] for text in texts]
    sizes = [len(sample) for sample in samples]
    size, number = sum(sizes), len(samples)
    per_sample: dict[str, Any] = {
        name: np.ones(number, np.float32) for name in ("sample_shares", "rl_weights", "ref_kl_weights")
    }
    per_token = {name: np.ones(size, np.float32) for name in ("logprobs", "advantages", "temperatures")}
    return EXAMPLES["step_batch"].model_copy(
        update={
            "minibatch_offsets": np.array([0, len(micro_batches) - 1]),
            **{name: np.array([size]) for name in ("loss_tokens", "ref_kl_tokens", "num_completions")},
            "micro_batch_offsets": np.array(micro_batches),
            "sample_offsets": np.cumsum([0, *sizes]),
            "prompt_lengths": np.array([text.index("|") for text in texts]),
            "sample_ordinals": np.array(ordinals),
            "completions": np.arange(number),
            "sample_shared": np.array(shared, np.int64),
            "rewards": np.ones(number),
            "token_ids": np.array([token for sample in samples for token in sample], np.int32),
            "loss_mask": np.ones(size, np.uint8),
            "versions": np.ones(size, np.int32),
            **per_sample,
            **per_token,
        }
    )  # type: ignore[return-value]


def received(batch: StepBatch) -> StepBatch:
    """The batch behind the wire."""
    found = codec.decode([bytes(frame) for frame in codec.encode(batch)])
    assert isinstance(found, StepBatch)
    return found


def refusal(**changes: Any) -> str:
    """The words with which a receiver refuses the tree with these changes."""
    with pytest.raises(DecodeError) as caught:
        received(TREE.model_copy(update={name: np.array(value, np.int64) for name, value in changes.items()}))
    assert caught.value.reason == "bad_header"
    return str(caught.value)


TREE = batch_of(
    ["ab|XYZ.", "abXc|V.", "ab|W.", "ab|W.", "q|UV", "qU|V"], [7, 7, 7, 8, 8, 8], [0, 3, 2, 0, 0, 1], [0, 3, 6]
)
"""Two micro-batches. In the first, sample 1 branches behind X, and sample 2 has the prompt of sample 0."""


def test_the_tree_is_valid() -> None:
    """Else the refusals below would tell nothing."""
    assert received(TREE).equals(TREE)


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ([0, -1, 2, 0, 0, 1], "sample_shared: of the 4 prompt tokens of sample 1, 0 to all, got -1"),
        ([0, 5, 2, 0, 0, 1], "sample_shared: of the 4 prompt tokens of sample 1, 0 to all, got 5"),
        ([0, 3, LARGEST, 0, 0, 1], f"sample_shared: of the 2 prompt tokens of sample 2, 0 to all, got {LARGEST}"),
        ([0, 3, SMALLEST, 0, 0, 1], f"sample_shared: of the 2 prompt tokens of sample 2, 0 to all, got {SMALLEST}"),
        ([1, 3, 2, 0, 0, 1], "sample_shared: sample 0 is the first of its micro-batch, so 0, got 1"),
        ([0, 3, 2, 2, 0, 1], "sample_shared: sample 3 is the first of its micro-batch, so 0, got 2"),
        ([0, 4, 2, 0, 0, 1], "sample_shared: samples 0 and 1 differ in their first 4 tokens"),
        ([0, 3, 2, 0, 1, 1], "sample_shared: samples 3 and 4 differ in their first 1 tokens"),
    ],
)
def test_wrong_numbers_of_shared_tokens_are_refused(shared: list[int], words: str) -> None:
    """The words name the sample and the value."""
    assert words in refusal(sample_shared=shared)


def test_a_prefix_of_another_group_is_refused() -> None:
    """Even one that is equal: the packer shares within groups alone."""
    words = "sample_shared: sample 2 is of group 7 and sample 3 of 8, so 0, got 2"
    assert words in refusal(sample_shared=[0, 3, 2, 2, 0, 1], micro_batch_offsets=[0, 0, 6])


def test_a_prefix_of_a_token_that_the_row_leaves_out_is_refused() -> None:
    """The last token of a completion predicts nothing, so no row holds it."""
    batch = batch_of(["a|X", "aX|V."], [7, 7], [0, 2], [0, 2])
    with pytest.raises(DecodeError, match="the row holds 1 tokens of sample 0, sample 1 shares 2"):
        received(batch)


@pytest.mark.parametrize("length", [0, -1, 7, SMALLEST, LARGEST])
def test_a_prompt_that_is_no_part_of_its_sample_is_refused(length: int) -> None:
    """A row needs a token that predicts the first one of the completion."""
    words = f"prompt_lengths: of the 6 tokens of sample 0, 1 to all, got {length}"
    assert words in refusal(prompt_lengths=[length, 4, 2, 2, 1, 2])


def test_offsets_whose_differences_overflow_are_refused() -> None:
    """Each difference of these int64 is positive, but the second number is beyond the samples."""
    assert "micro_batch_offsets: must start at 0" in refusal(
        micro_batch_offsets=[0, LARGEST, -2, 6], minibatch_offsets=[0, 3]
    )


def is_right(batch: StepBatch, b: int) -> bool:
    """Whether a sample has what it shares in common with the row of the sample before; by lists."""
    ids, bounds, prompts = batch.token_ids.tolist(), batch.sample_offsets.tolist(), batch.prompt_lengths.tolist()
    sample, shared = ids[bounds[b] : bounds[b + 1]], int(batch.sample_shared[b])
    if not 1 <= prompts[b] <= len(sample) or not 0 <= shared <= prompts[b]:
        return False
    if shared == 0:
        return True
    if b in batch.micro_batch_offsets.tolist() or batch.sample_ordinals[b] != batch.sample_ordinals[b - 1]:
        return False
    before = ids[bounds[b - 1] : bounds[b]]
    row = before[: max(len(before) - 1, prompts[b - 1])]
    return len(row) >= shared and row[:shared] == sample[:shared]


LENGTHS = st.one_of(st.integers(-1, 4), st.sampled_from([SMALLEST, LARGEST, 2**32]))
TEXTS = st.lists(st.sampled_from(["a|a", "a|aa", "aa|a", "ab|a", "aab|b", "aaa|ab", "b|a"]), min_size=2, max_size=4)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data(), TEXTS)
def test_what_is_taken_has_each_sample_whole_and_all_else_is_refused(data: st.DataObject, texts: list[str]) -> None:
    """Over few letters, so that many numbers are right; without the wrong ones, rows give back the samples' tokens."""
    several = {"min_size": len(texts), "max_size": len(texts)}
    ordinals = sorted(data.draw(st.lists(st.integers(7, 8), **several)))
    cut = data.draw(st.integers(0, len(texts)))
    batch = batch_of(texts, ordinals, data.draw(st.lists(LENGTHS, **several)), [0, cut, len(texts)])
    if data.draw(st.booleans()):
        batch = batch.model_copy(update={"prompt_lengths": np.array(data.draw(st.lists(LENGTHS, **several)), np.int64)})
    wrong = [not is_right(batch, b) for b in range(len(texts))]
    if any(wrong):
        with pytest.raises(DecodeError, match=r"sample_shared|prompt_lengths"):
            received(batch)
        batch = batch.model_copy(
            update={
                "sample_shared": np.where(wrong, 0, batch.sample_shared),
                "prompt_lengths": np.where(wrong, [text.index("|") for text in texts], batch.prompt_lengths),
            }
        )
        # the row before may have become shorter with its prompt, and longer too
        wrong = [not is_right(batch, b) for b in range(len(texts))]
        batch = batch.model_copy(update={"sample_shared": np.where(wrong, 0, batch.sample_shared)})
    taken = received(batch)
    for first, last in ((0, cut), (cut, len(texts))):
        if first < last:
            check_row(taken, first, last)


def check_row(batch: StepBatch, first: int, last: int) -> None:
    """Pack a micro-batch and compare."""
    start = int(batch.sample_offsets[first])
    tokens: NDArray[np.int32] = batch.token_ids[start : batch.sample_offsets[last]]
    offsets, prompts = batch.sample_offsets[first : last + 1] - start, batch.prompt_lengths[first:last]
    row = pack_row(tokens, offsets, prompts, batch.sample_shared[first:last].tolist(), torch.device("cpu"))
    for b, index in enumerate(row.samples):
        sample = tokens[offsets[b] : offsets[b + 1]].tolist()
        held = max(len(sample) - 1, int(prompts[b]))
        assert row.token_ids_R[index].tolist() == sample[:held]
        assert row.position_ids_R[index].tolist() == list(range(held))
