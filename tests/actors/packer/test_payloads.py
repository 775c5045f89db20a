"""Scored groups in the packer's memory: never more than `packer.memory_bytes`, and the same training."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import LonePacker, lone_packer
from benchmarks.soak import config
from bus import codec
from schemas.messages import ScoredGroup, StepBatch, Ticket

STEPS, GROUPS = 12, 8


Trained = dict[int, tuple[list[int], bytes]]
"""Ordinals and token ids of the batch of each step."""


def trained(folder: Path, memory_bytes: int, tokens: int) -> tuple[Trained, int, int]:
    """What a run trains; the most bytes of groups in memory after a round; bytes of a group."""
    sections = {
        "packer": {"groups_per_step": GROUPS, "memory_bytes": memory_bytes, "max_async_level": 4},
        "rollout": {"max_tokens": tokens, "group_size": 4},
        "trainer": {"checkpoint": {"interval": 4}},
        "eval": {"num_prompts": 8, "every_steps": 4},
    }
    most, batches = 0, Trained()
    with lone_packer(config(folder, STEPS, **sections)) as ring:
        stamp, send = ring._stamp, ring.trainer.try_send

        def stamped(sender: str, scorer: str, ticket: Ticket) -> ScoredGroup:
            """A group whose tokens tell its ordinal."""
            group = stamp(sender, scorer, ticket)
            return group.model_copy(update={"token_ids": np.full_like(group.token_ids, ticket.ordinal % 50_000)})

        def sent(batch: StepBatch) -> bool:
            batches[batch.step] = batch.ordinals.tolist(), batch.token_ids.tobytes()
            return send(batch)

        ring._stamp, ring.trainer.try_send = stamped, sent  # type: ignore[method-assign]
        for _ in range(2000):
            ring.turn()
            payloads = ring.packer._payloads
            assert payloads.num_bytes == sum(held for _, held in payloads._by_ordinal.values())
            most = max(most, payloads.num_bytes)
            if ring.over:
                break
        assert ring.num_trained == STEPS * GROUPS
        return batches, most, group_bytes(ring)


def group_bytes(ring: LonePacker) -> int:
    """Bytes of a group on the wire."""
    return codec.num_bytes([bytes(frame) for frame in codec.encode(ring._template)])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 256, 4096])
def test_memory_is_bounded_and_training_is_the_same(tmp_path: Path, tokens: int) -> None:
    """With room for all groups, for three, and for none: read from the ledger, the groups are the same."""
    batches, all_bytes, one = trained(tmp_path / "all", 1 << 30, tokens)
    assert all_bytes > 8 * one, "a run that never needs much memory shows nothing"
    assert len(batches) == STEPS
    for name, room in (("three", 3 * one + 1000), ("none", 1)):
        found, most, _ = trained(tmp_path / name, room, tokens)
        assert most <= room
        assert found == batches
