"""Optimizers: one update against a float64 reference or the library itself, and what a checkpoint keeps of them."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.learner.learner import TorchLearner
from actors.learner.optimizer import PolicyOptimizer, make_optimizer
from actors.learner.snapshots import OPTIMIZER, OPTIMIZER_NUMBERS
from schemas.config.trainer import TrainerConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.actors.learner.test_learner import changed, parameters, saved
from tests.conftest import ModelFolder

RATE = 1e-2
TYPES = ("adamw", "adamw_8bit", "muon")
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "beta2": 0.99, "weight_decay": 0.1},
    "adamw_8bit": {"type": "adamw_8bit", "weight_decay": 0.1},
    "muon": {"type": "muon", "weight_decay": 0.1, "adamw_learning_rate": 1e-3},
}


class PolicyVersion(nn.Module):
    """An embedding, a hidden matrix large enough for 8 bits, experts in one tensor, a norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 128)
        self.hidden = nn.Linear(128, 96)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 40, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """As models of transformers tell it."""
        return self.head


def made(**optimizer: Any) -> tuple[PolicyVersion, PolicyOptimizer]:
    """A policy with its optimizer at the peak of the learning rate."""
    policy = PolicyVersion()
    config = TrainerConfig(max_steps=1, learning_rate=RATE, optimizer=optimizer)  # type: ignore[arg-type]
    found = make_optimizer(policy, config)
    found.set_rate(RATE)
    return policy, found


def with_gradients(policy: nn.Module, seed: int) -> dict[str, Tensor]:
    """Random gradients on all parameters; returns them in float64."""
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    return {name: p.grad.double() for name, p in policy.named_parameters() if p.grad is not None}


def weights(policy: nn.Module) -> dict[str, Tensor]:
    """In float64."""
    return {name: p.detach().double().clone() for name, p in policy.named_parameters()}


def adamw_by_hand(weight: Tensor, gradients: list[Tensor], rate: float, decay: float, beta2: float = 0.999) -> Tensor:
    """Updates of decoupled AdamW from its paper's algorithm 2, with eps 1e-8 and beta1 0.9."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        mean, square = 0.9 * mean + 0.1 * gradient, beta2 * square + (1 - beta2) * gradient**2
        step = mean / (1 - 0.9**t) / ((square / (1 - beta2**t)).sqrt() + 1e-8)
        weight = weight - rate * (step + decay * weight)
    return weight


def muon_by_hand(weight: Tensor, gradient: Tensor, rate: float, decay: float, scale: float) -> Tensor:
    """The first Muon update, with the coefficients of Jordan's post and Nesterov momentum 0.95."""
    x = gradient * 0.05
    x = gradient * 0.05 + 0.95 * x
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return weight * (1 - rate * decay) - rate * scale * (x if wide else x.T)


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_adamw_updates_as_by_hand_and_decays_matrices_alone(decay_embeddings: bool) -> None:
    """Three updates in float64: within 1e-6; biases and norms have no decay, embeddings where it is asked for."""
    policy, optimizer = made(beta2=0.99, weight_decay=0.5, decay_embeddings=decay_embeddings)
    before = weights(policy)
    gradients = []
    for seed in range(3):
        gradients.append(with_gradients(policy, seed))
        optimizer.step()
    for name, weight in weights(policy).items():
        decayed = weight.ndim >= 2 and (decay_embeddings or name != "embed.weight")
        by_hand = adamw_by_hand(before[name], [g[name] for g in gradients], RATE, 0.5 * decayed, beta2=0.99)
        assert (weight - by_hand).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("adjust", "scale"),
    [("match_rms_adamw", 0.2 * math.sqrt(128)), ("original", 1.0)],
)
def test_muon_makes_hidden_matrices_orthogonal_and_leaves_all_else_to_adamw(adjust: str, scale: float) -> None:
    """One update: 96 × 128 by Newton-Schulz (which torch does in bfloat16), the others by AdamW at its own rate."""
    policy, optimizer = made(type="muon", weight_decay=0.5, adjust_lr_fn=adjust, adamw_learning_rate=RATE / 10)
    before, gradients = weights(policy), with_gradients(policy, 1)
    optimizer.step()
    after = weights(policy)
    for name, weight in after.items():
        if name == "hidden.weight":
            by_hand = muon_by_hand(before[name], gradients[name], RATE, 0.5, scale)
            update = (by_hand - before[name]).norm()
            assert (weight - by_hand).norm() < 0.02 * update, adjust
        else:
            by_hand = adamw_by_hand(before[name], [gradients[name]], RATE / 10, 0.5 * (weight.ndim >= 2))
            assert (weight - by_hand).abs().max() < 1e-6, name


def test_muon_has_one_rate_for_all_where_no_other_is_given() -> None:
    """So that a learning rate found for AdamW can be kept."""
    _, optimizer = made(type="muon")
    optimizer.set_rate(0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_muon_is_of_the_matrices_of_an_adapter_too(model_folder: ModelFolder) -> None:
    """All that is trained under LoRA are matrices, so AdamW has nothing to do."""
    config = run_config(model_folder(), lora={"rank": 4}, optimizer={"type": "muon"})
    learner = TorchLearner(config)
    before = parameters(learner)
    learner.step(step_batch(random_samples()))
    names = changed(before, learner)
    assert names
    assert all("lora_" in name for name in names)
    snapshot = learner.snapshot()
    states = snapshot.tensors[OPTIMIZER].keys() | json.loads(snapshot.texts[OPTIMIZER_NUMBERS]).keys()
    assert {state.partition("/")[2] for state in states} == {"momentum_buffer"}


def test_eight_bits_are_those_of_the_library(model_folder: ModelFolder) -> None:
    """The library's own optimizer over the same parameters and gradients: the same bits; large moments take a byte."""
    import bitsandbytes  # here, since its import takes seconds, which every worker of the tests would spend

    policy, optimizer = made(type="adamw_8bit", weight_decay=0.5)
    other = PolicyVersion()
    matrices = [p for p in other.parameters() if p.ndim >= 2]
    vectors = [p for p in other.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    library = bitsandbytes.optim.AdamW8bit(groups, lr=RATE, eps=1e-8)
    for seed in range(3):
        with_gradients(policy, seed)
        with_gradients(other, seed)
        optimizer.step()
        library.step()
    for (name, ours), theirs in zip(policy.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    moments = {name: value.dtype for name, key, value in optimizer.states() if key == "state1"}  # type: ignore[union-attr]
    assert moments["hidden.weight"] == torch.uint8
    assert moments["norm.weight"] == torch.float32


def test_eight_bits_without_the_library_say_what_to_install(monkeypatch: Any) -> None:
    """The extra, and the key that asks for it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.type: adamw_8bit needs .*grpo-actors\[bnb\]"):
        made(type="adamw_8bit")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.3}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", TYPES)
def test_going_on_from_a_checkpoint_has_the_same_bits(
    kind: str, lora: Any, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Two steps, save, two more; another learner, which has state of its own, restores and does the last two."""
    config = run_config(model_folder(), lora=lora, optimizer=KINDS[kind])
    learner, other = TorchLearner(config), TorchLearner(config)
    for step in (1, 2):
        learner.step(step_batch(random_samples(step), step=step))
    saved(learner, tmp_path / "checkpoint")
    other.step(step_batch(random_samples(9), step=1))
    other.restore(tmp_path / "checkpoint")
    for step in (3, 4):
        first, second = (each.step(step_batch(random_samples(step), step=step)) for each in (learner, other))
        assert second["loss"] == first["loss"]
    assert changed(parameters(learner), other) == set()
    assert [path.suffix for path in (tmp_path / "checkpoint" / "trainer").iterdir()].count(".safetensors") == 1


def test_settings_are_those_of_the_configuration_after_going_on(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A weight decay that was changed between two starts holds: the next step takes so much more off each matrix."""
    learner = TorchLearner(run_config(model_folder(), optimizer={"weight_decay": 0.0}))
    learner.step(step_batch(random_samples()))
    saved(learner, tmp_path / "checkpoint")
    before = parameters(learner)
    other = TorchLearner(run_config(model_folder(), optimizer={"weight_decay": 0.25}))
    other.restore(tmp_path / "checkpoint")
    rates = [each.step(step_batch(random_samples(2), step=2))["learning_rate"] for each in (learner, other)]
    assert rates == [1e-2] * 2
    plain, decayed = parameters(learner), parameters(other)
    for name in (name for name in before if "_proj" in name):
        taken = before[name] * (0.25 * 1e-2)
        torch.testing.assert_close(plain[name] - decayed[name], taken, rtol=0, atol=1e-6)
        assert taken.abs().max() > 1e-5


def test_state_of_an_unknown_parameter_is_refused_by_name() -> None:
    """A checkpoint of another model."""
    _, optimizer = made()
    with pytest.raises(ValueError, match=r"optimizer state of nonsense, which is not among the trained parameters"):
        optimizer.restore([("nonsense", {"step": 1})])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_each_optimizer_moves_logprobs_the_way_advantages_point(kind: str, model_folder: ModelFolder) -> None:
    """Twenty steps with the same advantages: praised completions become more probable than blamed ones."""
    config = run_config(model_folder(), learning_rate=1e-3, optimizer={"type": kind}, max_steps=20)
    learner, samples = TorchLearner(config), random_samples()

    def gap() -> float:
        plain = models.plain(Path(config.model.path))
        plain.load_state_dict(learner.weights().tensors, strict=False)
        with torch.no_grad():
            return sum(s.advantage * float(models.logprobs(plain, s.prompt, s.completion).sum()) for s in samples)

    before = gap()
    for step in range(1, 6):
        learner.step(step_batch(samples, step=step))
    assert gap() > before + 1.0
