"""Batches in parts: the same batch in any order of parts, and never another one."""

import random

import numpy as np
import pytest
from pydantic import ValidationError

from bus import codec
from bus.parts import Assembly, messages_of
from schemas import limits, routed
from schemas.errors import DecodeError, MessageTooLargeError
from schemas.messages import BatchPart, StepBatch, drop_fields

SIZES = (1, 700, 70_000)
"""Samples of a batch: one message, and many parts."""


def batch(samples: int, **header: int) -> StepBatch:
    """Return a batch of samples with 2 prompt tokens and 3 others, all numbers different."""
    tokens = 5 * samples
    numbers = np.arange(tokens, dtype=np.float32)
    ones = np.ones(samples, np.float32)
    return StepBatch(
        **{"run": "r", "term": 3, "incarnation": 2, "rank": 1, "num_ranks": 2, "step": 7} | header,
        **drop_fields([]),
        digests=["d"],
        ordinals=np.array([5]),
        minibatch_offsets=np.array([0, 1]),
        loss_tokens=np.array([3 * samples]),
        ref_kl_tokens=np.array([0]),
        num_completions=np.array([samples]),
        micro_batch_offsets=np.array([0, samples]),
        sample_offsets=np.arange(0, tokens + 1, 5),
        prompt_lengths=np.full(samples, 2),
        sample_ordinals=np.full(samples, 5),
        completions=np.arange(samples),
        sample_shared=np.zeros(samples, np.int64),
        sample_shares=ones,
        rewards=np.linspace(0, 1, samples),
        rl_weights=ones,
        ref_kl_weights=ones * 0,
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.tile(np.array([0, 0, 1, 1, 1], np.uint8), samples),
        logprobs=-numbers,
        advantages=numbers / 2,
        temperatures=numbers + 1,
        versions=np.arange(tokens, dtype=np.int32) % 9,
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 300 KB, of each batch above 5 KB."""
    monkeypatch.setattr("bus.parts.WHOLE_BYTES", 5_000)
    monkeypatch.setattr(limits, "PART_BYTES", 300_000)


def received(message: StepBatch | BatchPart) -> StepBatch | BatchPart:
    """Return a message as the other end of a socket has it."""
    found = codec.decode([bytes(frame) for frame in codec.encode(message)])
    assert isinstance(found, StepBatch | BatchPart)
    return found


def parts_of(whole: StepBatch) -> list[BatchPart]:
    """Return the received parts of a batch."""
    parts = [received(part) for part in messages_of(whole)]
    assert all(isinstance(part, BatchPart) for part in parts)
    return parts  # type: ignore[return-value]


def assembled(parts: list[BatchPart]) -> StepBatch | None:
    """Return what the last of these parts makes of an assembly; no earlier one may complete it."""
    assembly = Assembly(parts[0])
    found = [assembly.add(part) for part in parts]
    assert all(one is None for one in found[:-1])
    return found[-1]


def test_a_small_batch_is_one_message() -> None:
    """The very batch."""
    small = batch(1)
    assert messages_of(small) == [small]


@pytest.mark.parametrize("samples", SIZES[1:])
@pytest.mark.parametrize("seed", range(3))
def test_parts_in_any_order_are_the_batch(samples: int, seed: int) -> None:
    """Some of them come twice, as after a send that was given up."""
    whole = batch(samples)
    parts = parts_of(whole)
    assert len(parts) >= 3
    assert all(part.data.size <= 300_000 for part in parts)
    shuffled = random.Random(seed)
    shuffled.shuffle(parts)
    found = assembled([*parts[: len(parts) // 2], *parts])
    assert found is not None
    assert found.equals(whole)
    assert not found.token_ids.flags.writeable


def test_without_a_part_there_is_no_batch() -> None:
    """Whichever is missing."""
    parts = parts_of(batch(700))
    for missing in range(len(parts)):
        assert assembled(parts[:missing] + parts[missing + 1 :]) is None


def test_cutting_copies_no_tokens() -> None:
    """A part's bytes are those of the batch."""
    whole = batch(SIZES[-1])
    part = next(part for part in messages_of(whole) if isinstance(part, BatchPart) and part.data.size == 300_000)
    arrays = [array for array in whole.arrays().values() if np.shares_memory(part.data, array)]
    assert len(arrays) == 1


def test_parts_that_are_no_batch_are_refused() -> None:
    """Of batches with other frames, that overlap, or with the name of another step."""
    parts, others = parts_of(batch(700)), parts_of(batch(699))
    with pytest.raises(DecodeError, match="name different frames"):
        assembled([parts[0], others[1]])
    longest = max(parts, key=lambda part: part.data.size)
    moved = longest.model_copy(update={"start": longest.start - 1})
    with pytest.raises(DecodeError, match="overlap"):
        assembled([part for part in parts if part is not longest] + [moved])
    renamed = [part.model_copy(update={"step": 8}) for part in parts]
    with pytest.raises(DecodeError, match="of another step or rank"):
        assembled(renamed)
    broken = [part.model_copy(update={"data": part.data ^ 255}) for part in parts]
    with pytest.raises(DecodeError):
        assembled(broken)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frame_bytes": []}, "frame_bytes"),
        ({"frame_bytes": [1] * (limits.FRAMES + 1)}, "frame_bytes"),
        ({"frame_bytes": [-1, 20]}, "frame_bytes"),
        ({"frame_bytes": [limits.BATCH_BYTES, 1]}, "frame_bytes"),
        ({"start": -1}, "start"),
        ({"start": 10}, "start"),
        ({"start": 1 << 62}, "start"),
        ({"data": np.zeros(0, np.uint8)}, "start"),
    ],
)
def test_a_part_outside_of_its_frames_is_no_message(changes: dict[str, object], words: str) -> None:
    """From a peer that sends anything."""
    fields = {"run": "r", "term": 1, "incarnation": 1, "rank": 0, "step": 1, "frame_bytes": [4, 8], "start": 0}
    with pytest.raises(ValidationError, match=words):
        BatchPart(**fields | {"data": np.zeros(4, np.uint8)} | changes)


def test_a_batch_beyond_the_limit_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words that name the keys."""
    monkeypatch.setattr(limits, "BATCH_BYTES", 100_000)
    with pytest.raises(MessageTooLargeError, match=r"packer\.groups_per_step"):
        messages_of(batch(SIZES[-1]))


def test_parts_of_another_packer_or_gang_belong_to_no_assembly() -> None:
    """Their batches have another header."""
    assembly = Assembly(parts_of(batch(700))[0])
    assert assembly.belongs(parts_of(batch(700))[1])
    for change in ({"term": 4}, {"incarnation": 3}):
        assert not assembly.belongs(parts_of(batch(700, **change))[1])


def test_experts_count_towards_the_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be many times the arrays, in more frames than any other message has."""
    small = batch(1)
    assert messages_of(small) == [small]
    monkeypatch.setattr(routed, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 1000)
    pieces, layout = routed.packed(np.arange(5 * 1200 * 8, dtype=np.int16).reshape(5, 1200, 8) % 9)
    large = small.model_copy(update={"routed_experts": pieces, "expert_layout": layout})
    parts = [received(part) for part in messages_of(large)]
    assert len(parts) > 40
    assembly = Assembly(parts[0])  # type: ignore[arg-type]
    whole = [found for part in parts if (found := assembly.add(part)) is not None]  # type: ignore[arg-type]
    assert [one.equals(large) for one in whole] == [True]
