"""Full training in bfloat16: the model computes in 16 bits, every sum is float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.learner.learner import TorchLearner
from actors.learner.master_weights import MasterWeights
from actors.learner.ranks import SINGLE_RANK
from actors.models import loading
from schemas.config import RunConfig
from tests.actors.learner.steps import batches_of, random_samples, run_config, scored_group, step_batch
from tests.actors.learner.test_ranks import on_ranks
from tests.conftest import ModelFolder


def exact(learner: TorchLearner) -> dict[str, Tensor]:
    """A copy of the weights that are trained."""
    return {name: tensor.clone() for name, tensor in loading.full_tensors(learner.trained).items()}


def assert_rounded(learner: TorchLearner) -> None:
    """The model computes with the trained weights, each rounded to bfloat16, and holds no gradient."""
    rounded = loading.full_tensors(learner.model)
    for name, tensor in exact(learner).items():
        assert tensor.dtype == torch.float32
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name], tensor.bfloat16()), name
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def linear_pair() -> tuple[nn.Module, nn.Module]:
    """A layer of one weight in bfloat16, and its master."""
    model, masters = nn.Linear(1, 1, bias=False).bfloat16(), nn.Linear(1, 1, bias=False)
    MasterWeights(model, masters)
    return model, masters


def test_many_small_gradients_add_up() -> None:
    """256 and then 256 times 1: in bfloat16, whose neighbour of 256 is 258, they would stay 256."""
    model, masters = linear_pair()
    for gradient in [256.0, *[1.0] * 256]:
        model(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum().backward()
    (master,) = masters.parameters()
    assert master.grad is not None
    assert master.grad.tolist() == [[512.0]]
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 == 256


def test_many_small_updates_add_up() -> None:
    """Each is an eighth of the distance between two numbers of bfloat16; eight of them are one."""
    model, masters = nn.Linear(1, 1, bias=False).bfloat16(), nn.Linear(1, 1, bias=False)
    nn.init.ones_(masters.weight)
    pair, seen = MasterWeights(model, masters), []
    for _ in range(8):
        with torch.no_grad():
            masters.weight += 2**-10
        pair.round()
        seen.append(model.weight.item())
    assert seen[0] == 1.0
    assert seen[-1] == 1.0 + 2**-7


@pytest.fixture
def config(model_folder: ModelFolder) -> RunConfig:
    """Full training of the tied model in bfloat16."""
    return run_config(model_folder(), dtype="bfloat16", learning_rate=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_every_activation_is_bfloat16(model_folder: ModelFolder, family: str) -> None:
    """What each layer takes and returns, and what its norms return: nothing is computed in float32 and cast."""
    learner = TorchLearner(run_config(model_folder(family), dtype="bfloat16"))
    seen: list[torch.dtype] = []
    for name, module in learner.model.named_modules():
        if name.endswith(("norm", "_proj", "embed_tokens")):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    learner.step(step_batch(random_samples()))
    assert len(seen) > 10
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("trainer", [{}, {"num_iterations": 2, "num_minibatches": 2}, {"optimizer": {"type": "muon"}}])
def test_the_model_computes_with_the_rounded_masters_after_each_step(
    model_folder: ModelFolder, trainer: dict[str, Any]
) -> None:
    """From the start on; every weight is trained, and published as the model has it."""
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16", learning_rate=1e-3, **trainer))
    assert_rounded(learner)
    before, minibatches = exact(learner), trainer.get("num_minibatches", 1)
    for step in (1, 2):
        learner.step(step_batch(random_samples(step), step, micro_batches=2, minibatches=minibatches))
        assert_rounded(learner)
    now, published = exact(learner), learner.weights().tensors
    assert published.keys() == now.keys()
    assert "lm_head.weight" not in now, "tied to the embedding, which is there once"
    for name, tensor in now.items():
        assert not torch.equal(tensor, before[name])
        assert torch.equal(published[name], tensor.bfloat16())


def test_masters_begin_with_all_digits_of_the_file(config: RunConfig) -> None:
    """Not with the rounded weights: a model saved in float32 is trained from float32."""
    file = load_file(Path(config.model.path) / "model.safetensors")
    for name, tensor in exact(TorchLearner(config)).items():
        assert torch.equal(tensor, file[name])
        assert name.endswith("norm.weight") or not torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.slow
def test_gradients_of_micro_batches_are_those_of_one_to_the_precision_of_bfloat16(config: RunConfig) -> None:
    """Eight micro-batches or one; also with layers that are computed again in the backward pass, to the bit."""
    samples, model = random_samples(), config.model.model_copy(update={"gradient_checkpointing": True})
    whole, parts = (TorchLearner(config).step(step_batch(samples, micro_batches=m)) for m in (1, 8))
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.02)
    again = TorchLearner(config.model_copy(update={"model": model}))
    assert again.step(step_batch(samples))["grad_norm"] == whole["grad_norm"]


@pytest.mark.slow
def test_a_checkpoint_is_float32_and_training_goes_on_from_it_with_the_same_bits(
    config: RunConfig, tmp_path: Path
) -> None:
    """Two steps, save, restore elsewhere, third step; transformers reads the folder as a model in float32."""
    learner = TorchLearner(config)
    for step in (1, 2):
        learner.step(step_batch(random_samples(step), step=step))
    learner.snapshot().write(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    restored = TorchLearner(config)
    restored.step(step_batch(random_samples(9)))
    restored.restore(tmp_path)
    assert_rounded(restored)
    first, second = (each.step(step_batch(random_samples(3), step=3)) for each in (learner, restored))
    assert second["loss"] == first["loss"]
    others = exact(restored)
    assert all(torch.equal(tensor, others[name]) for name, tensor in exact(learner).items())


@pytest.mark.slow
def test_one_process_repeats_the_step_of_two_ranks_to_the_bit(config: RunConfig, tmp_path: Path) -> None:
    """As `actors replay` does; gradients of both ranks are added in float32, in the order of ranks."""
    dealt = batches_of([scored_group(ordinal) for ordinal in range(4)], 2)
    *learners, alone = [TorchLearner(config) for _ in range(3)]
    norms = on_ranks(tmp_path, 2, lambda ranks: learners[ranks.rank].step(dealt[ranks.rank], ranks)["grad_norm"])
    assert norms == [alone.step(dealt[1], SINGLE_RANK, dealt[:1])["grad_norm"]] * 2
    replayed = exact(alone)
    for learner in learners:
        assert all(torch.equal(tensor, replayed[name]) for name, tensor in exact(learner).items())


@pytest.mark.parametrize("kind", ["float32", "lora", "bfloat16_lora"])
def test_weights_that_are_float32_already_have_no_masters(model_folder: ModelFolder, kind: str) -> None:
    """In float32, and under LoRA in either precision: the very parameters of the model are trained."""
    lora = {"rank": 4} if "lora" in kind else None
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16" if "bfloat16" in kind else "float32", lora=lora))
    assert learner.trained is learner.model
    assert {p.dtype for p in learner.model.parameters() if p.requires_grad} == {torch.float32}
