"""Adapters computed without peft's forward: values and gradients of peft, in fewer bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.learner.learner import TorchLearner
from actors.models import choices, loading
from actors.models.attention import PADDED, PackedRow, pack_row
from actors.models.lora_forward import AdapterProduct
from schemas.config.model import ModelConfig
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

SIZES = [(1, 3, 2, 1), (5, 8, 6, 4), (130, 48, 33, 16)]
"""Tokens, inputs, outputs, rank."""
CPU = torch.device("cpu")


def factors(size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Base (1, R, out), x (1, R, in), a (rank, in), b (out, rank)."""
    tokens, inputs, outputs, rank = size
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, outputs), (1, tokens, inputs), (rank, inputs), (outputs, rank)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plain(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The formula, with autograd's own gradients."""
    return base + scale * (x @ a.T @ b.T)


def with_gradients(function: Any, given: list[Tensor], scale: float) -> list[Tensor]:
    """Output and gradients, in float64."""
    out = function(*given, scale)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, given, weights))]


@pytest.mark.parametrize("scale", [2.0, 1.37])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_are_those_of_the_formula(size: tuple[int, ...], scale: float) -> None:
    """float64 to its rounding, float32 to 1e-5 of the largest value, against float64; and by finite differences."""
    expected = with_gradients(plain, factors(size, torch.float64), scale)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        found = with_gradients(AdapterProduct.apply, factors(size, dtype), scale)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))
    if size[0] < 100:
        assert torch.autograd.gradcheck(lambda *x: AdapterProduct.apply(*x, scale), factors(size, torch.float64))


def adapted(folder: Path, forward: str, dtype: str = "float32", **lora: Any) -> Any:
    """A model with a made-up adapter, computed so."""
    given: Any = {"lora": {"rank": 4, "alpha": 8.0} | lora, "lora_forward": forward, "dtype": dtype}
    config = ModelConfig(path=str(folder), device="cpu", **given)
    torch.manual_seed(0)
    model = loading.add_lora(loading.load_model(config, loading.TORCH_DTYPES[dtype], attention=PADDED), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at the start, so that an adapter changes nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def row_of(*samples: tuple[int, int]) -> PackedRow:
    """A row of samples that share nothing: tokens of the prompt, tokens of the completion."""
    sizes = [prompt + completion for prompt, completion in samples]
    ids = np.random.default_rng(0).integers(4, 30, sum(sizes)).astype(np.int32)
    offsets, prompts = np.cumsum([0, *sizes]), np.array([prompt for prompt, _ in samples])
    return pack_row(ids, offsets, prompts, [0] * len(samples), CPU)


def computed(model: Any, row: PackedRow, dtype: str = "float32") -> tuple[dict[str, Tensor], int]:
    """Logits and gradients by name, and the bytes kept for the backward pass, weights not counted."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        logits = model(**row.forward_arguments()).logits
    (logits.float() ** 2).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | gradients, sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_a_model_has_pefts_bits_where_the_scale_is_a_power_of_two(
    model_folder: ModelFolder, family: str, dtype: str
) -> None:
    """Logits and the gradient of each adapter, to the last bit."""
    row = row_of((3, 9), (5, 1), (1, 20))
    found, expected = (
        computed(adapted(model_folder(family), forward, dtype), row, dtype)[0] for forward in ("fused", "peft")
    )
    assert found.keys() == expected.keys()
    assert len(found) > 2 * 7
    for name, tensor in expected.items():
        assert tensor.any(), name
        assert torch.equal(found[name], tensor), name


def test_another_scale_is_pefts_within_rounding(model_folder: ModelFolder) -> None:
    """Rank-stabilised, with a scale of 3/√5."""
    row, lora = row_of((3, 9), (5, 4)), {"rank": 5, "alpha": 3.0, "rslora": True}
    found, expected = (computed(adapted(model_folder(), forward, **lora), row)[0] for forward in ("fused", "peft"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * float(tensor.abs().max()), msg=name)


def test_samples_of_a_row_have_the_logits_they_have_alone(model_folder: ModelFolder) -> None:
    """Packed = unpacked, to 1e-5."""
    model, sizes = adapted(model_folder(), "fused"), [(3, 9), (5, 1), (1, 20)]
    row = row_of(*sizes)
    packed = model(**row.forward_arguments()).logits[0].detach()
    for index in row.samples:
        ids = row.token_ids_R[index]
        alone = pack_row(ids.numpy().astype(np.int32), np.array([0, ids.numel()]), np.array([ids.numel()]), [0], CPU)
        torch.testing.assert_close(
            packed[index], model(**alone.forward_arguments()).logits[0].detach(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("tokens", [8, 64])
def test_less_is_kept_for_the_backward_pass(model_folder: ModelFolder, tokens: int) -> None:
    """In bfloat16 peft keeps a rounded copy of the input for each adapter; here layers of one input share it."""
    row = row_of((4, tokens))
    (_, fused), (_, peft) = (
        computed(adapted(model_folder(), forward, "bfloat16"), row, "bfloat16") for forward in ("fused", "peft")
    )
    # 32 wide, 2 layers; inputs of q, k, v and of gate, up are one tensor each: 3 copies fewer, at 2 bytes a number
    assert peft - fused >= 2 * len(row.token_ids_R) * 3 * 32 * 2


def test_without_its_adapter_the_model_is_the_base(model_folder: ModelFolder) -> None:
    """As the reference is computed."""
    model, row = adapted(model_folder(), "fused"), row_of((3, 9))
    base = loading.load_model(ModelConfig(path=str(model_folder()), device="cpu"), torch.float32, attention=PADDED)
    with torch.no_grad(), model.disable_adapter():
        found = model(**row.forward_arguments()).logits
    with torch.no_grad():
        assert torch.equal(found, base(**row.forward_arguments()).logits)
        assert not torch.equal(found, model(**row.forward_arguments()).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_has_pefts_bits(model_folder: ModelFolder, checkpointing: bool) -> None:
    """Three updates of the learner: each adapter matrix, bit by bit, with and without gradient checkpointing."""
    weights = []
    for forward in ("fused", "peft"):
        config = run_config(model_folder(), lora={"rank": 4, "alpha": 8.0})
        changed = {"lora_forward": forward, "gradient_checkpointing": checkpointing}
        learner = TorchLearner(config.model_copy(update={"model": config.model.model_copy(update=changed)}))
        for step in (1, 2, 3):
            learner.step(step_batch(random_samples(step), step=step, micro_batches=2))
        weights.append({name: tensor.clone() for name, tensor in learner.weights().tensors.items()})
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.parametrize(
    ("keys", "on_gpu", "taken", "words"),
    [
        ({}, False, "fused", "bits of peft"),
        ({"lora": {"dora": True}}, True, "peft", "dora"),
        ({"lora": {"dropout": 0.1}, "lora_forward": "fused"}, True, "peft", "dropout"),
        ({"lora_forward": "peft"}, True, "peft", "as configured"),
        ({"lora": {"rank": 12}}, False, "peft", r"2.66667 is no power of two"),
        ({"lora": {"rank": 12}}, True, "fused", "fewer passes"),
        ({"lora": {"rank": 12}, "lora_forward": "fused"}, False, "fused", "as configured"),
        ({"lora": {"rank": 4, "alpha": 1.0, "rslora": True}}, False, "fused", "bits of peft"),
    ],
    ids=str,
)
def test_the_choice_has_a_reason(keys: dict[str, Any], on_gpu: bool, taken: str, words: str) -> None:
    """By key, value and words."""
    found = choices.lora_forward(ModelConfig.model_validate({"path": "model", "lora": {}} | keys), on_gpu)
    assert found.taken == taken
    assert words in str(found)


def test_adapters_with_more_than_two_matrices_stay_with_peft(model_folder: ModelFolder) -> None:
    """DoRA: the same logits, whatever model.lora_forward says."""
    row = row_of((3, 9))
    found, expected = (computed(adapted(model_folder(), f, dora=True), row)[0] for f in ("fused", "peft"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
