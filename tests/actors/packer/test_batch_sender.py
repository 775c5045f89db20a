"""Batches of large steps: built in a thread, sent in parts, the same as those that the round builds."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.packer.batch_sender import BatchSender
from actors.packer.inflow import BatchesBuilt
from benchmarks.peers import LonePacker, lone_packer
from benchmarks.soak import config
from schemas import limits
from schemas.messages import BatchPart, Message, StepBatch
from tests.ring.harness import wait_until

STEPS = 6


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a large one."""
    monkeypatch.setattr("actors.packer.batch_sender.INLINE_BYTES", 0)


def lone(folder: Path, memory_bytes: int = 1 << 30, **bus: float) -> Any:
    """Return a packer among its peers, with short runs."""
    packer = {"groups_per_step": 4, "memory_bytes": memory_bytes, "max_async_level": 4}
    rollout = {"max_tokens": 300, "group_size": 4}
    made = config(folder, STEPS, packer=packer, rollout=rollout, eval={"num_prompts": 0})
    return lone_packer(made.model_copy(update={"bus": made.bus.model_copy(update=bus)}))


def sent_of(ring: LonePacker) -> list[StepBatch]:
    """Run to the end; return all batches that the trainer was sent."""
    sent, send = list[StepBatch](), ring.trainer.try_send

    def try_send(batch: StepBatch) -> bool:
        sent.append(batch)
        return send(batch)

    ring.trainer.try_send = try_send  # type: ignore[method-assign]
    wait_until(lambda: ring.turn() or ring.over, "the end of the run")
    return sent


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30], ids=["groups are read by the thread", "groups are in memory"])
def test_the_thread_builds_the_batches_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """Equal to the bit, one for each step, whatever is in memory."""
    with lone(tmp_path / "round") as ring:
        expected = sent_of(ring)
    monkeypatch.setattr("actors.packer.batch_sender.INLINE_BYTES", 0)
    with lone(tmp_path / "thread", memory_bytes) as ring:
        found = sent_of(ring)
    assert [batch.step for batch in found] == [batch.step for batch in expected] == [*range(1, STEPS + 1)]
    for one, other in zip(expected, found, strict=True):
        # a payload names its run, and so its digest does
        assert other.equals(one.model_copy(update={"run": other.run, "digests": other.digests}))


def test_the_round_goes_on_while_a_batch_is_built(
    tmp_path: Path, in_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred rounds: the packer hears its peers and takes groups in, and a round is woken by the batch."""
    go_on, build = threading.Event(), BatchSender._build

    def held(sender: BatchSender, groups: Any, header: Any) -> Any:
        assert go_on.wait(60.0)
        return build(sender, groups, header)

    monkeypatch.setattr(BatchSender, "_build", held)
    with lone(tmp_path) as ring:

        def told() -> bool:
            return any(isinstance(event, BatchesBuilt) for event in ring.packer.inflow.look())

        for _ in range(100):
            ring.turn()
        assert ring.packer.machine.groups.num_issued["train"] >= 4
        assert ring.trainer.batches == {}
        assert not told()
        go_on.set()
        wait_until(told, "the event that wakes the round")
        assert len(sent_of(ring)) == STEPS


def test_a_ledger_that_the_thread_can_not_read_is_read_by_the_round(
    tmp_path: Path, in_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose connection works, or says what is wrong with the file."""
    failed: list[Path] = []

    def failing(path: Path) -> None:
        failed.append(path)
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr("actors.packer.payloads.LedgerReader.of", failing)
    with lone(tmp_path, memory_bytes=1) as ring:
        assert len(sent_of(ring)) == STEPS
    assert failed


def test_an_error_of_packing_ends_the_packer(tmp_path: Path, in_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the round: a step that can't be packed is no reason to wait for ever."""

    def failing(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of the project")

    monkeypatch.setattr("actors.packer.batch_sender.batches_of_step", failing)
    with lone(tmp_path) as ring, pytest.raises(ZeroDivisionError):
        sent_of(ring)


def test_batches_are_kept_until_each_rank_has_them(tmp_path: Path) -> None:
    """A rank that lost its batch asks again; what all ranks have is let go, as a step may have gigabytes."""
    kept = list[tuple[bool, list[int]]]()
    with lone(tmp_path, resend_after=1.0) as ring:
        batches, send = ring.packer.batches, ring.trainer.try_send
        lost = [2]

        def try_send(batch: StepBatch) -> bool:
            if batch.step in lost:
                lost.remove(batch.step)
                return True
            return send(batch)

        ring.trainer.try_send = try_send  # type: ignore[method-assign]
        said = ring.trainer.fields
        ring.trainer.fields = lambda: said() | {"received": np.array(sorted(ring.trainer.batches), np.int64)}

        def ends() -> bool:
            ring.turn()
            kept.append((2 in ring.trainer.batches, sorted(step for step, _ in batches.built)))
            return ring.over

        wait_until(ends, "the end of the run")
    without = [steps for has_second, steps in kept if not has_second and any(steps)]
    assert any(2 in steps for steps in without), "the batch that was lost is still there"
    assert kept[-1][1] == []
    assert max(len(steps) for _, steps in kept) <= 2


def every(number: int) -> Iterator[bool]:
    """Yield True once in so many times."""
    while True:
        yield from (*[False] * (number - 1), True)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_parts_are_sent_once_each_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """In their order, none twice and none left out, whenever the socket is full."""
    monkeypatch.setattr("bus.parts.WHOLE_BYTES", 0)
    monkeypatch.setattr(limits, "PART_BYTES", 10_000)
    room, sent = every(number), list[Message]()

    def try_send(part: Message) -> bool:
        takes = next(room)
        if takes:
            sent.append(part)
        return takes

    with lone(tmp_path) as ring:
        ring.trainer.try_send = try_send  # type: ignore[method-assign, assignment]

        def both_are_sent() -> bool:
            ring.turn()
            return len(ring.packer.batches._sent) == 2

        wait_until(both_are_sent, "the two batches that a trainer without a step is sent")
    parts = [part for part in sent if isinstance(part, BatchPart)]
    assert len(parts) == len(sent)
    for step in (1, 2):
        of_step = [part for part in parts if part.step == step]
        assert len(of_step) >= 3
        ends = [part.start + part.data.size for part in of_step]
        assert [part.start for part in of_step] == [0, *ends[:-1]]
        assert ends[-1] == of_step[0].num_bytes
