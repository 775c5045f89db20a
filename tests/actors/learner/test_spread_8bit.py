"""AdamW in 8 bits over weights that are spread over ranks, and what a checkpoint of it is worth elsewhere."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.learner.optimizer import PolicyOptimizer, make_optimizer
from actors.learner.optimizer_states import State, in_float32
from schemas.config.trainer import TrainerConfig
from tests import models
from tests.actors.learner.steps import run_config
from tests.actors.learner.test_parallelism import Trained, sharded, whole

RATE = 1e-2


class Weights(nn.Module):
    """Matrices with rows of whole blocks and of others, experts, a bias; all are large but the norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(33, 256))
        self.odd = nn.Parameter(torch.randn(100, 100))
        self.experts = nn.Parameter(torch.randn(2, 64, 256))
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


def nearest(values: Tensor, code: Tensor, block: int = 256) -> Tensor:
    """Values in 8 bits and back: the nearest number of the map, times the largest of each block."""
    blocks = values.view(-1, block)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    chosen = (blocks / scale).unsqueeze(-1).sub(code.double()).abs().argmin(-1)
    return (code.double()[chosen] * scale).view(values.shape)


def test_updates_are_those_of_adamw_with_moments_rounded_to_eight_bits_after_each() -> None:
    """Three updates by hand in float64, with the map of bitsandbytes, whose kernel rounds some numbers otherwise."""
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
        assert apart.double().mean() < (0.05 if name in IN_8_BITS else 1e-9), name
        assert float((parameter.detach().double() - weights[name]).abs().max()) < 0.5 * RATE, name


def test_weights_with_rows_of_whole_blocks_take_a_byte_for_a_number() -> None:
    """And the scales of their blocks; all others are in float32."""
    optimizer = made(Weights(), "fsdp")
    for name, state in saved(optimizer).items():
        moment, scales = state["state1"], state.get("absmax1")
        assert isinstance(moment, Tensor)
        assert moment.dtype == (torch.uint8 if name in IN_8_BITS else torch.float32), name
        if name in IN_8_BITS:
            assert isinstance(scales, Tensor)
            assert scales.shape == (*moment.shape[:-1], moment.shape[-1] // 256)


@pytest.mark.parametrize("columns", [256, 100])
def test_weights_and_gradients_that_lie_in_columns_are_updated_as_others(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of GPUs count numbers by their place in memory, so all that they are given lies in rows."""
    from actors.learner import spread_adamw_8bit  # here, since bitsandbytes takes seconds in every worker

    given = []

    def watched(kernel: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            given.extend(value for value in (*arguments, *named.values()) if isinstance(value, Tensor))
            kernel(*arguments, **named)

        return call

    for name in ("optimizer_update_32bit", "optimizer_update_8bit_blockwise"):
        monkeypatch.setattr(spread_adamw_8bit, name, watched(getattr(spread_adamw_8bit, name)))
    torch.manual_seed(0)
    values = torch.randn(80, columns)
    by_rows, by_columns = nn.Linear(columns, 80, bias=False), nn.Linear(columns, 80, bias=False)
    by_rows.weight = nn.Parameter(values.clone())
    by_columns.weight = nn.Parameter(values.T.contiguous().T)
    assert not by_columns.weight.is_contiguous()
    optimizers = made(by_rows, "fsdp"), made(by_columns, "fsdp")
    for _ in range(3):
        gradient = torch.randn(80, columns)
        by_rows.weight.grad, by_columns.weight.grad = gradient.clone(), gradient.T.contiguous().T
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(by_rows.weight, by_columns.weight)
    assert not torch.equal(by_rows.weight, values)
    assert len(given) >= 4 * 2 * 3
    assert all(value.is_contiguous() for value in given)
    kept = [saved(optimizer)["weight"]["state1"] for optimizer in optimizers]
    assert torch.equal(torch.as_tensor(kept[0]), torch.as_tensor(kept[1]))


@pytest.mark.parametrize(("first", "then"), [("fsdp", "none"), ("none", "fsdp")])
def test_a_run_that_changes_its_sharding_keeps_its_moments(first: str, then: str) -> None:
    """To the bit where both have them in 8 bits or in float32, and so does the next update; others are converted."""
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
            if name in {*IN_8_BITS, "norm"} or first == "none":
                assert torch.equal(now, was), (name, suffix)
                continue
            assert found[name][f"state{suffix}"].dtype == torch.uint8  # type: ignore[union-attr]
            largest = nn.functional.pad(was, (0, -len(was) % 256)).view(-1, 256).abs().amax(1)
            assert ((now - was).abs() <= 0.01 * largest.repeat_interleave(256)[: len(was)]).all(), (name, suffix)
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    update(model, before, 3)
    update(other, after, 3)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        if name in {*IN_8_BITS, "norm"}:
            assert torch.equal(ours, theirs), name
        else:
            assert float((ours - theirs).abs().mean()) < 0.01 * RATE, name


def test_without_shards_the_updates_are_those_of_the_library() -> None:
    """Of weights that both have in 8 bits, and of small ones, to the bit."""
    model, other = Weights(), Weights()
    ours, theirs = made(model, "fsdp"), made(other, "none")
    for step in (1, 2, 3):
        update(model, ours, step)
        update(other, theirs, step)
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (name in {*IN_8_BITS, "norm"}) == torch.equal(found, expected), name


def test_state_of_another_layout_is_quantised() -> None:
    """With tensor_parallel a part of a row may have no whole blocks: its state in float32 becomes one in 8 bits."""
    model = Weights()
    optimizer = made(model, "fsdp")
    update(model, optimizer, 1)
    states = saved(optimizer)
    exact: State = {"step": 1, "state1": in_float32(states["rows"], "1"), "state2": in_float32(states["rows"], "2")}
    optimizer.restore((states | {"rows": exact}).items())
    for suffix in "12":
        was, now = (in_float32(each["rows"], suffix).view(-1, 256) for each in (states, saved(optimizer)))
        assert ((now - was).abs() <= 0.01 * was.abs().amax(1, keepdim=True)).all()


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
    assert found.keys() == states.keys()
    update(model, optimizer, 2)
    found = saved(optimizer)
    assert (found["rows"]["step"], found["experts"]["step"]) == (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are large enough for 8 bits, and whose embedding is not."""
    made = tmp_path_factory.mktemp("wide")
    sizes = models.SMALL | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(made)
    models.tokenizer().save_pretrained(made)
    return made


def eight_bits(folder: Path, **keys: Any) -> Any:
    """A run; eps keeps AdamW from making a whole step of a gradient that is only rounding."""
    keys = {"num_ranks": 2, "optimizer": {"type": "adamw_8bit", "eps": 1e-4}} | keys
    return run_config(folder, learning_rate=1e-3, **{"sharding": "fsdp"} | keys)


def assert_nearly(found: Trained, expected: Trained) -> None:
    """Weights within 1e-5, but for one in a thousand, whose moment was on an edge between two codes."""
    for name, tensor in expected.weights.items():
        apart = (found.weights[name] - tensor).abs()
        assert float((apart > 1e-5).double().mean()) < 1e-3, name
        assert float(apart.max()) < 1e-3, name
    for ours, theirs in zip(found.values, expected.values, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_train_as_one_and_go_on_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """Three steps, then the last one again from their checkpoint."""
    config = eight_bits(folder)
    two = sharded(tmp_path / "two", config, [1, 2, 3])
    assert_nearly(two, whole(eight_bits(folder, sharding="none"), [1, 2, 3]))
    again = sharded(tmp_path / "again", config, [3], restore=two.checkpoint)
    for name, tensor in two.weights.items():
        assert torch.equal(again.weights[name], tensor), name


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "keys"), [(3, {}), (4, {"tensor_parallel": 2}), (2, {"tensor_parallel": 2})])
def test_eight_bits_fit_any_number_of_ranks(size: int, keys: dict[str, int], folder: Path, tmp_path: Path) -> None:
    """Saved by two; others, with other parts of rows, go on as the two did, and the two from their checkpoint."""
    two = sharded(tmp_path / "two", eight_bits(folder), [1, 2, 3])
    config = eight_bits(folder, num_ranks=size, **keys)
    found = sharded(tmp_path / "others", config, [3], size, restore=two.checkpoint)
    two.values = two.values[2:]
    assert_nearly(found, two)
    assert_nearly(sharded(tmp_path / "back", eight_bits(folder), [3], restore=found.checkpoint), two)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_rank_without_experts_of_its_own_has_no_state_of_them(tmp_path: Path) -> None:
    """Two experts, which two ranks divide, and two copies of each: in the axis of experts one of the two has none."""
    sizes = models.SMALL | {"hidden_size": 256, "head_dim": 64, "initializer_range": 0.05}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=False)).save_pretrained(tmp_path / "model")
    models.tokenizer().save_pretrained(tmp_path / "model")
    config = eight_bits(tmp_path / "model", num_ranks=4, expert_parallel=2)
    found = sharded(tmp_path / "four", config, [1, 2, 3], 4)
    assert_nearly(found, whole(eight_bits(tmp_path / "model", sharding="none"), [1, 2, 3]))
    again = sharded(tmp_path / "again", config, [3], 4, restore=found.checkpoint)
    found.values = found.values[2:]
    assert_nearly(again, found)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_rank_goes_on_from_the_eight_bits_of_two(folder: Path, tmp_path: Path) -> None:
    """And two from those of one."""
    two = sharded(tmp_path / "two", eight_bits(folder), [1, 2, 3])
    one = whole(eight_bits(folder, sharding="none"), [3], restore=two.checkpoint)
    two.values = two.values[2:]
    assert_nearly(one, two)
