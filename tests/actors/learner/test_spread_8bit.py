"""AdamW in 8 bits over weights that are spread over ranks (torchao), and what a checkpoint of it is worth elsewhere."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.learner.learner import TorchLearner
from actors.learner.optimizer import PolicyOptimizer, make_optimizer
from actors.learner.optimizer_states import State, in_float32
from schemas.config.trainer import TrainerConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import run_config
from tests.actors.learner.test_parallelism import assert_near, sharded, whole

RATE = 1e-2


class Weights(nn.Module):
    """Matrices with rows of whole blocks and of others, experts, a bias; all are large but the norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(33, 256))
        self.odd = nn.Parameter(torch.randn(100, 100))
        self.experts = nn.Parameter(torch.randn(2, 64, 128))
        self.bias = nn.Parameter(torch.randn(4096))
        self.norm = nn.Parameter(torch.randn(128))


IN_8_BITS = {"rows", "experts"}


def made(model: nn.Module, sharding: str, kind: str = "adamw_8bit") -> PolicyOptimizer:
    """The optimizer at the peak of the learning rate."""
    optimizer: Any = {"type": kind, "weight_decay": 0.1}
    config = TrainerConfig(max_steps=1, learning_rate=RATE, optimizer=optimizer, sharding=sharding)  # type: ignore[arg-type]
    found = make_optimizer(model, config)
    found.set_rate(RATE)
    return found


def update(model: nn.Module, optimizer: PolicyOptimizer, seed: int) -> dict[str, Tensor]:
    """One update from random gradients; returns them in float64."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def saved(optimizer: PolicyOptimizer) -> dict[str, State]:
    """As a checkpoint has it."""
    found: dict[str, State] = {}
    for name, key, value in optimizer.states():
        found.setdefault(name, {})[key] = value.clone() if isinstance(value, Tensor) else value
    return found


def nearest(values: Tensor, code: Tensor, block: int = 128) -> Tensor:
    """Values in 8 bits and back: the nearest number of the map, times the largest of each block."""
    blocks = values.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    chosen = (blocks / scale).unsqueeze(-1).sub(code.double()).abs().argmin(-1)
    return (code.double()[chosen] * scale).view(values.shape)


def test_updates_are_those_of_adamw_with_moments_rounded_to_eight_bits_after_each() -> None:
    """Three updates by hand in float64, with the map of bitsandbytes: a number on an edge may be rounded otherwise."""
    from bitsandbytes.functional import create_dynamic_map  # here, since its import takes seconds in every worker

    maps = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
    model = Weights()
    optimizer = made(model, "fsdp")
    weights = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    means, squares = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in (1, 2, 3):
        gradients = update(model, optimizer, step)
        for name, weight in weights.items():
            mean = 0.9 * means[name] + 0.1 * gradients[name]
            square = 0.999 * squares[name] + 0.001 * gradients[name] ** 2
            change = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[name] = weight - RATE * (change + 0.1 * (weight.ndim >= 2) * weight)
            in_8_bits = name in IN_8_BITS
            means[name] = nearest(mean, maps[0]) if in_8_bits else mean
            squares[name] = nearest(square, maps[1]) if in_8_bits else square
    for name, parameter in model.named_parameters():
        apart = (parameter.detach().double() - weights[name]).abs() > 1e-6
        assert apart.double().mean() < (2e-3 if name in IN_8_BITS else 1e-9), name


def test_weights_with_rows_of_whole_blocks_take_a_byte_for_a_number() -> None:
    """And the scales of their blocks; all others are in float32."""
    optimizer = made(Weights(), "fsdp")
    for name, state in saved(optimizer).items():
        moment, scales = state["state1"], state.get("absmax1")
        assert isinstance(moment, Tensor)
        assert moment.dtype == (torch.uint8 if name in IN_8_BITS else torch.float32), name
        if name in IN_8_BITS:
            assert isinstance(scales, Tensor)
            assert scales.shape == (*moment.shape[:-1], moment.shape[-1] // 128)


@pytest.mark.parametrize(("first", "then"), [("fsdp", "none"), ("none", "fsdp")])
def test_a_run_that_changes_its_sharding_keeps_its_moments(first: str, then: str) -> None:
    """They are quantised again: each within a hundredth of the largest of its 256; the count of updates is exact."""
    model, other = Weights(), Weights()
    before, after = made(model, first), made(other, then)
    for step in (1, 2):
        update(model, before, step)
    states = saved(before)
    update(other, after, 9)  # state of its own, which goes
    after.restore(states.items())
    found = saved(after)
    assert found.keys() == states.keys()
    for name, state in states.items():
        assert found[name]["step"] == 2
        for suffix in "12":
            was, now = (in_float32(each, suffix).flatten() for each in (state, found[name]))
            padded = nn.functional.pad(was, (0, -len(was) % 256)).view(-1, 256)
            largest = padded.abs().amax(1).repeat_interleave(256)[: len(was)]
            assert ((now - was).abs() <= 0.01 * largest + 1e-12).all(), (name, suffix)
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    update(model, before, 3)
    update(other, after, 3)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert float((ours - theirs).abs().mean()) < 0.2 * RATE, name


def test_going_on_has_the_same_bits() -> None:
    """Codes and scales are saved as they are: weights, and state too, after two more updates."""
    model = Weights()
    optimizer = made(model, "fsdp")
    for step in (1, 2):
        update(model, optimizer, step)
    states, other = saved(optimizer), copy.deepcopy(model)
    again = made(other, "fsdp")
    again.restore(states.items())
    for step in (3, 4):
        update(model, optimizer, step)
        update(other, again, step)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    found = saved(again)
    for name, state in saved(optimizer).items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[name][key]), torch.as_tensor(value)), (name, key)


def test_a_weight_without_saved_state_begins_again() -> None:
    """It had no gradient yet, or was added since."""
    model = Weights()
    optimizer = made(model, "fsdp")
    update(model, optimizer, 1)
    states = saved(optimizer)
    del states["rows"]
    optimizer.restore(states.items())
    found = saved(optimizer)
    assert found["rows"]["step"] == 0
    assert in_float32(found["rows"], "1").abs().max() == 0
    assert found["experts"]["step"] == 1


def test_shards_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, and the keys that ask for it."""
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit with trainer\.sharding: fsdp needs .*grpo-actors\[torchao\]"):
        made(Weights(), "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are large enough for 8 bits, and whose embedding is not."""
    made = tmp_path_factory.mktemp("wide")
    sizes = models.SMALL | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.05}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(made)
    models.tokenizer().save_pretrained(made)
    return made


def eight_bits(folder: Path, **keys: Any) -> Any:
    """A run; eps keeps AdamW from making a whole step of a gradient that is only rounding."""
    keys = {"num_ranks": 2, "optimizer": {"type": "adamw_8bit", "eps": 1e-4}} | keys
    return run_config(folder, learning_rate=1e-3, **{"sharding": "fsdp"} | keys)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_train_nearly_as_with_moments_in_float32_and_go_on_with_the_same_bits(
    folder: Path, tmp_path: Path
) -> None:
    """Three steps, then the last one again from their checkpoint."""
    config = eight_bits(folder)
    two = sharded(tmp_path / "two", config, [1, 2, 3])
    exact = whole(eight_bits(folder, optimizer={"eps": 1e-4}), [1, 2, 3])
    begin = TorchLearner(config).weights().tensors
    for name, tensor in exact.weights.items():
        assert (two.weights[name] - tensor).norm() < 0.1 * (tensor - begin[name]).norm(), name
    again = sharded(tmp_path / "again", config, [3], restore=two.checkpoint)
    for name, tensor in two.weights.items():
        assert torch.equal(again.weights[name], tensor), name


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "keys"), [(3, {}), (4, {"tensor_parallel": 2}), (2, {"tensor_parallel": 2})])
def test_eight_bits_fit_any_number_of_ranks(size: int, keys: dict[str, int], folder: Path, tmp_path: Path) -> None:
    """Saved by two; others, with other parts of rows, go on as the two did: within 1e-5."""
    two = sharded(tmp_path / "two", eight_bits(folder), [1, 2, 3])
    config = eight_bits(folder, num_ranks=size, **keys)
    found = sharded(tmp_path / "others", config, [3], size, restore=two.checkpoint)
    two.values = two.values[2:]
    assert_near(found, two)
    assert_near(sharded(tmp_path / "back", eight_bits(folder), [3], restore=found.checkpoint), two)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_rank_goes_on_from_the_eight_bits_of_two(folder: Path, tmp_path: Path) -> None:
    """With bitsandbytes, whose blocks are others."""
    two = sharded(tmp_path / "two", eight_bits(folder), [1, 2, 3])
    one = whole(eight_bits(folder, sharding="none", num_ranks=1), [3], restore=two.checkpoint)
    begin = TorchLearner(eight_bits(folder)).weights().tensors
    for name, tensor in two.weights.items():
        assert (one.weights[name] - tensor).norm() < 0.05 * (tensor - begin[name]).norm(), name
