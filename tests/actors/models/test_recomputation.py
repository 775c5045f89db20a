"""Selective recomputation: the gradients of a step without it, and no product computed twice."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.learner.learner import TorchLearner
from actors.models import recomputation
from actors.models.recomputation import KeptResults, is_kept
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

MODES: list[Any] = [False, True, "selective"]
SETUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "dropout": {"lora": {"rank": 4, "dropout": 0.5}},
}


class Counted(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers["kept" if is_kept(func, args) else "other"] += 1
        return func(*args, **(kwargs or {}))


def steps_of(model: Any, mode: Any, keys: dict[str, Any], num_steps: int = 2) -> tuple[TorchLearner, Counter[str]]:
    """A learner after some steps, and the operations of the last one."""
    config = run_config(model, learning_rate=1e-2, **keys)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"gradient_checkpointing": mode, "lora_forward": "peft"})}
    )
    learner = TorchLearner(config)
    for step in range(1, num_steps + 1):
        with Counted() as counted:
            learner.step(step_batch(random_samples(), step=step))
    return learner, counted.numbers


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_has_the_same_bits_and_computes_no_product_twice(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, setup: str
) -> None:
    """With full recomputation products are computed again; with the selective one only what is cheap is."""
    # the model is 32 wide, the adapter's rank is 4
    monkeypatch.setattr(recomputation, "SHORTEST_SUM", 8)
    model = model_folder()
    learners, numbers = {}, {}
    for mode in MODES:
        learners[mode], numbers[mode] = steps_of(model, mode, SETUPS[setup])
    plain = learners[False].snapshot().tensors
    for mode in (True, "selective"):
        found = learners[mode].snapshot().tensors
        assert all(torch.equal(plain[kind][name], found[kind][name]) for kind in plain for name in plain[kind])
    assert numbers["selective"]["kept"] == numbers[False]["kept"] < numbers[True]["kept"]
    assert numbers[False]["other"] < numbers["selective"]["other"]


def test_kept_results_are_those_of_products_and_attention() -> None:
    """A product of 3 × 5 floats, and attention over 2 heads of 4 tokens; an adapter and a norm count nothing."""
    left, right = torch.ones(3, 128), torch.ones(128, 5)
    heads = torch.ones(1, 2, 4, 8)
    with KeptResults() as kept:
        ((left @ right).relu() + left[:, :16] @ right[:16]).sum()
    assert kept.num_bytes == 4 * 3 * 5
    with KeptResults() as kept:
        torch.addmm(right[0], left, right)
    assert kept.num_bytes == 4 * 3 * 5
    with KeptResults() as kept:
        for _ in range(50):  # each result is gone before the next is there
            left @ right
    assert kept.num_bytes == 50 * 4 * 3 * 5
    with KeptResults() as kept:
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert kept.num_bytes >= 4 * heads.numel()
