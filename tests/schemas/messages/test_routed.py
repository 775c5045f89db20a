"""Experts on the wire: bytes of any token, in pieces, and groups and batches with them."""

from typing import Any

import numpy as np
import pytest

from bus.codec import decode, encode
from schemas import routed
from tests.actors.learner.steps import batches_of, scored_group


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of ten bytes, so that tokens are cut in their middle."""
    monkeypatch.setattr(routed, "CHUNK_BYTES", 10)


def made(num_tokens: int, dtype: Any = np.int8) -> Any:
    """Different values everywhere."""
    return (np.arange(num_tokens * 6) % 120).reshape(num_tokens, 3, 2).astype(dtype)


def with_experts(group: Any, experts: Any) -> Any:
    """The group, told the experts of all tokens."""
    pieces, layout = routed.packed(experts)
    return type(group).model_validate(group.__dict__ | {"routed_experts": pieces, "expert_layout": layout})


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
@pytest.mark.parametrize(("start", "end"), [(0, None), (0, 1), (3, 7), (6, 7), (7, 7), (2, None)])
def test_any_tokens_are_read_from_the_pieces(small_pieces: None, dtype: Any, start: int, end: int | None) -> None:
    """Also those that lie in two pieces."""
    experts = made(7, dtype)
    pieces, layout = routed.packed(experts)
    assert layout == [dtype().itemsize, 3, 2]
    assert len(pieces) > 2
    found = routed.unpacked(pieces, layout, start, end)
    assert found.dtype == dtype
    assert np.array_equal(found, experts[start:end])


def test_groups_and_batches_travel_with_experts_and_images_apart(small_pieces: None) -> None:
    """They come back whole; without experts a message has the bytes that it had before there were any."""
    group = scored_group(0)
    experts = made(len(group.prompt_ids) + len(group.token_ids))
    sent = with_experts(group, experts)
    found: Any = decode([bytes(frame) for frame in encode(sent)])
    assert found.equals(sent)
    assert np.array_equal(found.experts, experts)
    plain = encode(group)
    assert b"routed" not in bytes(plain[0])
    assert b"expert" not in bytes(plain[0])
    (batch,) = batches_of([sent, with_experts(scored_group(1), experts)])
    received: Any = decode([bytes(frame) for frame in encode(batch)])
    assert received.equals(batch)
    num_shared = int(received.sample_shared.sum())
    assert num_shared > 0
    assert sum(map(len, received.experts_of(0, len(received.prompt_lengths)))) == len(received.token_ids) - num_shared
    for b, rows in enumerate(received.experts_of(0, len(received.prompt_lengths))):
        assert len(rows) == received.sample_offsets[b + 1] - received.sample_offsets[b] - received.sample_shared[b]
        assert np.array_equal(rows, received.experts_of(b, b + 1)[0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"routed_experts": [b"123"]}, "routed_experts: 3 bytes, and 28 tokens of"),
        ({"expert_layout": [1, 3]}, "expert_layout: .* is not bytes per index"),
        ({"expert_layout": [4, 3, 2]}, "expert_layout: .* is not bytes per index"),
        ({"expert_layout": [1, 0, 2]}, "expert_layout: .* is not bytes per index"),
    ],
)
def test_experts_that_do_not_fit_the_tokens_are_refused(change: dict[str, Any], problem: str) -> None:
    """By the receiver, as a fault of the message."""
    group = scored_group(0)
    sent = with_experts(group, made(len(group.prompt_ids) + len(group.token_ids)))
    with pytest.raises(ValueError, match=problem):
        type(group).model_validate(sent.__dict__ | change)


def test_the_smallest_type_is_taken() -> None:
    """A byte for up to 128 experts, two for more."""
    assert routed.narrow(np.array([[[127, -1]]], np.int16)).dtype == np.int8
    assert routed.narrow(np.array([[[128]]], np.uint8)).dtype == np.int16
    assert routed.narrow(np.zeros((0, 2, 2), np.int64)).dtype == np.int8
