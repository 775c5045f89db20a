"""Messages: every kind survives the wire, the wire does not change unseen, and wrong arrays are refused in words."""

import re
import subprocess
import sys
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from schemas import limits
from schemas.messages import (
    MESSAGE_TYPES,
    Frozen,
    RolloutGroup,
    ScoredGroup,
    StepBatch,
    fingerprint,
    fingerprint_of,
    single_turn,
)
from tests.schemas.messages.examples import EXAMPLES, GOLDEN, GROUP_FIELDS, decoded, example_frames, golden_path

KINDS = sorted(MESSAGE_TYPES)


def test_every_kind_has_an_example() -> None:
    """No kind escapes the tests of this folder."""
    assert sorted(EXAMPLES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_kind_round_trips(kind: str) -> None:
    """What is decoded equals what was encoded, type, fields and arrays."""
    message = decoded(example_frames(kind))
    assert type(message) is MESSAGE_TYPES[kind]
    assert message.equals(EXAMPLES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_wire_equals_the_golden_file(kind: str) -> None:
    """A change of the wire is seen: the example's bytes are those of the golden file of its kind and version."""
    advice = (
        f"{kind} changed on the wire: bump its version unless only an optional field is new, then "
        "`python -m tests.schemas.messages.examples`"
    )
    assert golden_path(kind).is_file(), advice
    golden = msgpack.unpackb(golden_path(kind).read_bytes())
    assert golden == example_frames(kind), advice
    assert decoded(golden).equals(EXAMPLES[kind]), advice


def test_golden_files_belong_to_a_kind() -> None:
    """No golden file is left over from a kind or version that is gone."""
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(golden_path(kind).name for kind in KINDS)


def test_equality_sees_a_changed_field_and_a_changed_array() -> None:
    """`equals` compares type, plain fields and array contents; NaN equals NaN."""
    group = EXAMPLES["scored_group"]
    assert group.equals(group.model_copy())
    assert not group.equals(EXAMPLES["rollout_group"])
    assert not group.equals(group.model_copy(update={"ordinal": 13}))
    assert not group.equals(group.model_copy(update={"rewards_G": np.array([1.0, 0.5])}))


# --- fingerprint -----------------------------------------------------------------------------------------------------


class Inner(Frozen):
    """Stands for a value inside a message."""

    number: int


class Outer(ScoredGroup):
    """Stands for a kind."""

    kind: ClassVar[str] = "outer"
    inner: list[Inner]


def _variant(base: type[Any], name: str, **annotations: Any) -> type[Any]:
    return type(base)(name, (base,), {"__annotations__": annotations, "__module__": __name__})


@pytest.mark.slow
def test_fingerprint_is_the_same_in_each_process() -> None:
    """It follows from the declarations alone, in any order."""
    assert fingerprint() == fingerprint_of(reversed(MESSAGE_TYPES.values()))
    assert len(fingerprint()) == 16
    command = [sys.executable, "-c", "from schemas.messages import fingerprint; print(fingerprint())"]
    for _ in range(2):
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == fingerprint()


@pytest.mark.parametrize(
    "annotations",
    [
        {"ordinal": str},
        {"extra": int},
        {"version": 3},
        {"rewards_G": ScoredGroup.__annotations__["advantages_G"]},
        {"inner": list[_variant(Inner, "Inner", number=float)]},
    ],
    ids=["type of a field", "new field", "version", "dtype of an array", "field of a value inside"],
)
def test_fingerprint_changes_with(annotations: dict[str, Any]) -> None:
    """Any difference in what two builds say to each other shows."""
    changed = _variant(Outer, "Outer", **{k: v for k, v in annotations.items() if k != "version"})
    changed.version = annotations.get("version", Outer.version)
    assert fingerprint_of([changed]) != fingerprint_of([_variant(Outer, "Outer")])


# --- refusals --------------------------------------------------------------------------------------------------------


def _segments(*starts: int) -> Any:
    return np.array([[start, 1, 7, 0, 0] for start in starts])


def _refusal(message_type: type[Any] = RolloutGroup, **changes: Any) -> str:
    """What a message with these changes is refused with."""
    fields = dict(EXAMPLES[message_type.kind]) | changes
    with pytest.raises(ValidationError) as caught:
        message_type(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.arange(5)}, "token_ids: dtype <i8, declared <i4"),
        ({"token_ids": np.zeros((5, 1), np.int32)}, r"token_ids: shape \(5, 1\), declared axes \(N\)"),
        ({"logprobs": np.zeros(4, np.float32)}, r"logprobs: shape \(4,\), declared axes \(N\); N is 5 elsewhere"),
        ({"segments": np.zeros((3, 2), np.int64)}, r"segments: shape \(3, 2\), declared axes \(S, 5\)"),
        ({"segment_temperatures": np.ones(2, np.float32)}, "S is 3 elsewhere"),
        ({"sample_offsets": np.zeros(0, np.int64)}, r"sample_offsets: shape \(0,\), declared axes \(B\+1\)"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "instance of ndarray"),
        ({"sample_offsets": np.array([0, 3, 4])}, "sample_offsets: .* end at 5, got .0, 3, 4."),
        ({"sample_offsets": np.array([1, 3, 5])}, "sample_offsets: must start at 0"),
        ({"sample_offsets": np.array([0, 5, 5])}, "sample_offsets: must .* rise strictly"),
        ({"prompt_offsets": np.array([0, 3])}, "prompt_offsets: must start at 0, not fall, and end at 4"),
        ({"prompt_offsets": np.array([0, 2**63 - 1, -2, 4])}, "prompt_offsets: must start at 0, not fall"),
        ({"prompt_offsets": np.array([0, 4, 4])}, "prompt_offsets: prompt 1 has no token; it needs at least one"),
        (
            {"prompt_ids": np.zeros(0, np.int32), "prompt_offsets": np.array([0, 0])},
            "prompt_offsets: prompt 0 has no token",
        ),
        ({"completions": ["one"]}, "one per completion, so 2"),
        ({"stop_conditions": ["stop"] * 3}, "one per completion, so 2"),
        ({"segments": _segments(0, 3, 3)}, "segments: must .* rise strictly"),
        ({"segments": _segments(0, 3, 5)}, "segments: .* stay below 5"),
        ({"ordinal": "twelve"}, "ordinal"),
        ({"purpose": "test"}, "'train' or 'eval'"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_rollout_group_refuses(changes: dict[str, Any], words: str) -> None:
    """A wrong dtype, axis, offset or field is refused with the field's name and what it should be."""
    assert re.search(words, _refusal(**changes))


def test_group_without_segments_is_refused() -> None:
    """Every token belongs to a segment."""
    none = {"segments": np.zeros((0, 5), np.int64), "segment_temperatures": np.zeros(0, np.float32)}
    assert "segments: must start at 0" in _refusal(**none)


def test_long_offsets_are_held_to_the_same_rule() -> None:
    """The rule for more than 64 offsets, which numpy checks, is that for few."""
    fields = GROUP_FIELDS | dict(
        completions=["a"] * 100,
        stop_conditions=["stop"] * 100,
        **single_turn(np.array([5], np.int32), np.arange(101) * 2, np.array([[0, 1, 7]])),
        segment_temperatures=np.ones(1, np.float32),
        token_ids=np.zeros(200, np.int32),
        loss_mask=np.ones(200, np.uint8),
        logprobs=np.zeros(200, np.float32),
    )
    assert RolloutGroup(**fields).num_completions == 100
    equal_neighbours = np.arange(101) * 2
    equal_neighbours[70] = equal_neighbours[69]
    assert "rise strictly" in _refusal(**fields | {"sample_offsets": equal_neighbours})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward_names": ["exact"]}, "reward_names: 1 names for 2 functions"),
        ({"advantages_G": np.zeros(3, np.float32)}, "advantages_G"),
        ({"rewards_G": np.array([1.0, np.inf])}, "infinite"),
        ({"advantages_G": np.array([0.0, np.nan], np.float32)}, "an advantage is NaN"),
        ({"rewards_FG": np.zeros((2, 3))}, r"rewards_FG: shape \(2, 3\)"),
        ({"token_advantages": np.zeros(4, np.float32)}, "token_advantages: 4 for 5 tokens"),
        ({"token_advantages": np.full(5, np.inf, np.float32)}, "infinite or an advantage is NaN"),
    ],
)
def test_scored_group_refuses(changes: dict[str, Any], words: str) -> None:
    """Rewards and advantages fit functions and completions, and are finite where they must be."""
    assert re.search(words, _refusal(ScoredGroup, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minibatch_offsets": np.array([0, 1, 2])}, "minibatch_offsets: must start at 0, rise strictly and end at 3"),
        ({"minibatch_offsets": np.array([0, 0, 3])}, "minibatch_offsets"),
        ({"loss_tokens": np.array([3])}, "loss_tokens"),
        ({"micro_batch_offsets": np.array([0, 2, 1, 2])}, "micro_batch_offsets: must start at 0, not fall"),
        ({"micro_batch_offsets": np.array([0, 1])}, "micro_batch_offsets"),
        ({"sample_offsets": np.array([0, 4, 5])}, "sample_offsets"),
        ({"digests": []}, "digests: one per group, so 1, got 0"),
        ({"prompt_lengths": np.array([2])}, "prompt_lengths"),
    ],
)
def test_step_batch_refuses(changes: dict[str, Any], words: str) -> None:
    """Minibatches cover the micro-batches, these the samples, samples the tokens, digests the groups."""
    assert words in _refusal(StepBatch, **changes)


def test_messages_are_frozen() -> None:
    """A message can't be changed after it has been made."""
    with pytest.raises(ValidationError, match="frozen"):
        EXAMPLES["rollout_group"].ordinal = 1  # type: ignore[attr-defined]


# --- what a group says of itself -------------------------------------------------------------------------------------


def test_group_counts_lengths_versions_and_spreads_segments() -> None:
    """Lengths 3 and 2, oldest version 7; one value per segment becomes one per token: 2, 1 and 2 times."""
    group = RolloutGroup(**GROUP_FIELDS)
    assert group.num_completions == 2
    assert group.lengths_G.tolist() == [3, 2]
    assert group.oldest_version == 7
    assert group.per_token(np.array([7, 8, 9])).tolist() == [7, 7, 8, 9, 9]


def test_step_batch_counts_empty_micro_batches() -> None:
    """Offsets 0, 1, 1, 2 are three micro-batches, the second of which is empty; 0, 2, 3 are two minibatches of them."""
    batch = StepBatch(**dict(EXAMPLES["step_batch"]))
    assert (batch.num_micro_batches, batch.num_minibatches) == (3, 2)


# --- images ----------------------------------------------------------------------------------------------------------


def _with_places(*places: tuple[int, int, int], images: Any = (b"red", b"blue")) -> RolloutGroup:
    """The example with images at these places: image, start and length."""
    found = [{"image": image, "start": start, "length": length} for image, start, length in places]
    return RolloutGroup(**GROUP_FIELDS | {"images": list(images), "image_places": found})


def test_images_may_lie_in_prompts_and_behind_them() -> None:
    """Four tokens of the prompt, then samples of three and two tokens."""
    group = _with_places((1, 0, 1), (0, 4, 2), (1, 7, 1))
    assert [place.start for place in group.image_places] == [0, 4, 7]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0, 1)], "must name each of 2 images"),
        ([(0, 0, 1), (1, 1, 1), (2, 2, 1)], "must name each of 2 images"),
        ([(0, 0, 1), (1, 1, 1), (-1, 2, 1)], "must name each of 2 images"),
        ([(0, 1, 1), (1, 0, 1)], "a place at 0 with 1 tokens, behind 2"),
        ([(0, 0, 2), (1, 1, 1)], "a place at 1 with 1 tokens, behind 2"),
        ([(0, 0, 0), (1, 1, 1)], "a place at 0 with 0 tokens"),
        ([(0, -1, 1), (1, 1, 1)], "a place at -1"),
        ([(0, 0, 1), (1, 9, 1)], "a place at 9"),
        ([(0, 0, 1), (1, 1, 1), (1, 2, 2)], "an image has places of different lengths"),
        ([(0, 0, 1), (1, 3, 2)], "the place at 3 ends behind its prompt or sample"),
        ([(0, 0, 1), (1, 5, 2)], "the place at 5 is the end of its sample"),
        ([(0, 0, 1), (1, 8, 1)], "the place at 8 is the end of its sample"),
        ([(0, 0, 1), (1, 6, 2)], "the place at 6 ends behind its prompt or sample"),
        ([(0, 0, 1), (1, 8, 1 << 62)], "the place at 8 ends behind its prompt or sample"),
    ],
)
def test_places_that_are_none_are_refused(places: list[tuple[int, int, int]], words: str) -> None:
    """In order, apart, within one prompt or sample, and each image has one."""
    with pytest.raises(ValidationError, match=words):
        _with_places(*places)


def _batch(*places: tuple[int, int, int], images: Any = (b"red", b"blue"), **fields: Any) -> StepBatch:
    """A batch of two samples, of 4 prompt tokens and 2 others each; the second shares 3 tokens of the first."""
    found = [{"image": image, "start": start, "length": length} for image, start, length in places]
    arrays = {
        "micro_batch_offsets": np.array([0, 2]),
        "minibatch_offsets": np.array([0, 1]),
        "loss_tokens": np.array([4]),
        "ref_kl_tokens": np.array([0]),
        "num_completions": np.array([2]),
        "sample_offsets": np.array([0, 6, 12]),
        "prompt_lengths": np.array([4, 4]),
        "sample_shared": np.array([0, 3]),
        "token_ids": np.array([9, 9, 9, 9, 1, 2, 9, 9, 9, 9, 3, 4], np.int32),
        "loss_mask": np.ones(12, np.uint8),
        "versions": np.zeros(12, np.int32),
        **{name: np.zeros(12, np.float32) for name in ("logprobs", "advantages", "temperatures")},
    }
    given = dict(EXAMPLES["step_batch"]) | arrays | {"images": list(images), "image_places": found} | fields
    return StepBatch(**given)


def test_samples_of_a_batch_have_the_images_of_shared_tokens() -> None:
    """Stated once, with the sample before; starts count from each sample's first token."""
    batch = _batch((1, 0, 1), (0, 1, 2), (1, 3, 1), (1, 9, 1))
    found = [[(place.image, place.start, place.length) for place in places] for places in batch.places_of_samples()]
    assert found == [[(1, 0, 1), (0, 1, 2), (1, 3, 1)], [(1, 0, 1), (0, 1, 2), (1, 3, 1)]]
    assert StepBatch(**dict(EXAMPLES["step_batch"])).places_of_samples() == [[], []]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0, 1)], "image_places: must name each of 2 images"),
        ([(0, 0, 1), (1, 1, 1), (1, 9, 2)], "image_places: an image has places of different lengths"),
        ([(0, 1, 1), (1, 0, 1)], "image_places: a place at 0 with 1 tokens, behind 2"),
        ([(0, 0, 1), (1, 12, 1)], "image_places: a place at 12"),
        ([(0, 0, 1), (1, 2, 4)], "image_places: an image ends behind the 5 tokens in the row of sample 0"),
        ([(0, 0, 1), (1, 5, 2)], "image_places: an image ends behind the 5 tokens in the row of sample 0"),
        ([(0, 0, 1), (1, 10, 9)], "image_places: an image ends behind the 5 tokens in the row of sample 1"),
        ([(0, 0, 1), (1, 2, 2)], "sample_shared: the 3 tokens that sample 1 shares cut an image"),
        ([(0, 0, 1), (1, 8, 1)], "image_places: sample 1 has a place in the 3 tokens that it shares"),
    ],
)
def test_places_that_no_row_has_are_refused(places: list[tuple[int, int, int]], words: str) -> None:
    """Each is in one sample, in front of what the row leaves out, and no shared tokens cut it."""
    with pytest.raises(ValidationError, match=words):
        _batch(*places)


def test_too_many_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by bytes; also images without a place."""
    monkeypatch.setattr(limits, "IMAGES_BYTES", 6)
    with pytest.raises(ValidationError, match="images: 2 with 7 bytes, and at most 1024 with 6 bytes travel"):
        _with_places((0, 0, 1), (1, 1, 1))
    with pytest.raises(ValidationError, match="images: 1025 with 0 bytes"):
        _with_places(images=[b""] * 1025)
    with pytest.raises(ValidationError, match="must name each of 1 images"):
        _with_places(images=[b"red"])
