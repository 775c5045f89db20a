"""Micro-batches that a thread makes ahead: the same tensors in the same order, errors when they are due."""

import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import MicroBatch, micro_batch, non_empty
from actors.learner.prefetch import HOST, host_block, prefetched
from schemas.messages import StepBatch
from tests.actors.learner.steps import batches_of, branched_group, run_config, scored_group
from tests.conftest import ModelFolder

WAIT_SECONDS = 60.0


def batch_of(num_groups: int, sequence_len: int = 96) -> StepBatch:
    """A batch with groups and branches, in several micro-batches from the second group on."""
    groups = [scored_group(ordinal) for ordinal in range(num_groups)]
    return batches_of([*groups, branched_group(num_groups, 3, 8, trajectories=2)], 1, sequence_len=sequence_len)[0]


def parts(holder: Any) -> dict[str, Any]:
    """The fields of a micro-batch or row, without what is made of them later."""
    found = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
    return {name: value for name, value in found.items() if name != "_plans"}


def assert_equal(made: Any, expected: Any) -> None:
    """Equal in each field: bits, types and shapes of tensors, and everything else."""
    for name, value in parts(expected).items():
        own = getattr(made, name)
        if isinstance(value, Tensor):
            assert (own.dtype, own.shape) == (value.dtype, value.shape), name
            assert torch.equal(own, value), name
            assert own.data_ptr() != value.data_ptr() or not value.numel(), name
        elif name == "row":
            assert_equal(own, value)
        elif name == "samples":
            assert all(np.array_equal(a, b) for a, b in zip(own, value, strict=True))
        else:
            assert own == value, name


@pytest.mark.parametrize("num_groups", [1, 4, 24])
def test_a_block_holds_the_micro_batch(num_groups: int) -> None:
    """All tensors, of five types, also empty ones, at three sizes."""
    batch = batch_of(num_groups)
    for number in non_empty(batch):
        micro = micro_batch(batch, number, HOST, 96)
        assert_equal(host_block(micro).on(HOST), micro)


def test_a_gpu_gets_a_block_by_one_copy_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which nobody waits. The copy is made in host memory here."""
    calls: list[tuple[Any, ...]] = []
    to = Tensor.to

    def pinned(tensor: Tensor) -> Tensor:
        calls.append(("pin", tensor.nbytes))
        return tensor

    def moved(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        if given != (torch.device("cuda"),):
            return to(tensor, *given, **named)
        calls.append(("copy", tensor.nbytes, named))
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", moved)
    batch = batch_of(4)
    micro = micro_batch(batch, non_empty(batch)[0], HOST, 96)
    block = host_block(micro)
    assert_equal(block.on(torch.device("cuda")), micro)
    size = block.bytes_N.nbytes
    assert calls == [("pin", size), ("copy", size, {"non_blocking": True})]


def test_the_next_is_made_while_one_is_computed() -> None:
    """In order, one ahead and no more."""
    batch = batch_of(24)
    numbers, began = non_empty(batch), dict[int, threading.Event]()
    assert len(numbers) > 3
    for number in numbers:
        began[number] = threading.Event()

    def make(number: int, device: torch.device) -> MicroBatch:
        assert threading.current_thread() is not threading.main_thread()
        began[number].set()
        return micro_batch(batch, number, device, 96)

    for place, micro in enumerate(prefetched(numbers, make, HOST)):
        assert_equal(micro, micro_batch(batch, numbers[place], HOST, 96))
        for due in numbers[: place + 2]:
            assert began[due].wait(WAIT_SECONDS), f"micro-batch {due} is not made ahead"
        time.sleep(0.01)  # a thread that goes on would go on here
        assert not any(began[later].is_set() for later in numbers[place + 2 :])


def test_nothing_is_made_for_a_rank_without_samples() -> None:
    """No number, no micro-batch."""
    assert not list(prefetched([], lambda *_: pytest.fail("made"), HOST))


def test_an_error_is_raised_when_its_micro_batch_is_due() -> None:
    """The ones before it are computed."""
    batch = batch_of(24)
    numbers = non_empty(batch)

    def make(number: int, device: torch.device) -> MicroBatch:
        if number == numbers[2]:
            raise ValueError("a broken batch")
        return micro_batch(batch, number, device, 96)

    micros = prefetched(numbers, make, HOST)
    for number in numbers[:2]:
        assert_equal(next(micros), micro_batch(batch, number, HOST, 96))
    with pytest.raises(ValueError, match="a broken batch"):
        next(micros)


def test_a_step_with_prefetching_has_the_same_bits(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after two steps, with prefetching as on a GPU and without."""
    batch = batch_of(8)
    assert len(non_empty(batch)) > 2
    found = []
    for ahead in (False, True):
        if ahead:
            monkeypatch.setattr(TorchLearner, "_micro_batches", _ahead)
        learner = TorchLearner(run_config(model_folder()))
        for step in (1, 2):
            learner.step(batch.model_copy(update={"step": step}))
        found.append([parameter.detach().clone() for parameter in learner.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _ahead(learner: TorchLearner, batch: StepBatch, numbers: list[int]) -> Any:
    return prefetched(numbers, lambda number, device: micro_batch(batch, number, device, 96), HOST)
