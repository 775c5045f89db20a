"""Payloads of the ledger: those of this build, and those of the build before trajectories."""

from pathlib import Path

import msgpack
import numpy as np
import pytest

from actors.ledger.stored_groups import stored_group
from schemas.errors import DecodeError, ProtocolError
from tests.schemas.messages.examples import EXAMPLES, example_frames

EARLIER = Path(__file__).parent / "scored_group.1.msgpack"
"""Frames as version 1 has written them."""


def test_a_payload_of_this_build_is_what_was_stored() -> None:
    """With environments, turns and branches."""
    assert stored_group(example_frames("scored_group")).equals(EXAMPLES["scored_group"])


def test_a_payload_of_version_1_becomes_a_group_of_single_turns() -> None:
    """Two completions of 3 and 2 tokens, sampled by versions 7 and 8, with the same tokens, rewards and advantages."""
    group = stored_group(msgpack.unpackb(EARLIER.read_bytes()))
    assert group.completions == ["it is", "3 ✓"]
    assert group.stop_conditions == ["length", "stop"]
    assert group.completion_offsets.tolist() == group.sample_offsets.tolist() == [0, 3, 5]
    assert group.prompt_ids.tolist() == [5, 6, 7, 8]
    assert group.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert group.lengths_G.tolist() == [3, 2]
    assert group.policies == {(1, 7), (1, 8)}
    assert group.counts.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert group.rewards_G.tolist() == [1.0, 0.25]
    assert np.array_equal(group.advantages_N, np.array([0.5, 0.5, 0.125, -0.5, -0.25], np.float32))


def test_what_no_build_has_written_is_refused_with_the_version_of_this_one() -> None:
    """A later version, a version 1 with other fields, and another kind."""
    with pytest.raises(DecodeError, match="this build speaks 2"):
        stored_group([msgpack.packb(["scored_group", 3, {}])])
    with pytest.raises(DecodeError, match="this build speaks 2"):
        stored_group([msgpack.packb(["scored_group", 1, {}])])
    with pytest.raises(ProtocolError, match="is a rollout_group"):
        stored_group(example_frames("rollout_group"))
