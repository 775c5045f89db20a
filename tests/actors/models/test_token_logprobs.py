"""Chosen logprobs of whole models on packed rows: what a model does to its logits is found out, adapters included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import MicroBatch, micro_batch
from actors.models import attention, loading
from actors.models.logprobs import logprobs_and_entropy
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

SMALL = models.SMALL
FLOAT32_EPS = float(torch.finfo(torch.float32).eps)
CONFIGS: dict[str, Any] = {
    "plain": models.config("qwen3"),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "granite": GraniteConfig(**SMALL, logits_scaling=8.0),
    "gemma2": models.config("gemma2"),
    "sharp cap": Gemma2Config(**SMALL, final_logit_softcapping=2.0),
}


def model_of(config: Any) -> Any:
    """With packed attention, random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.PADDED)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "adapter"])
def test_an_exact_head_rounds_no_logits(model_folder: ModelFolder, lora: Any) -> None:
    """Logprobs and gradients are those of the rounded hidden states and weights in float64, to 1e-5."""
    config = run_config(model_folder(), "bfloat16", lora)
    exact = config.model.model_copy(update={"head_dtype": "float32"})
    learner = TorchLearner(config.model_copy(update={"model": exact}))
    head: Any = learner.model.get_output_embeddings()
    seen: list[Tensor] = []
    norm: Any = learner.model.get_decoder().norm
    norm.register_forward_hook(lambda module, given, output: seen.append(output))
    micro = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=lora is not None):
        found, _ = learner._token_logprobs.of(micro.row, micro.token_ids_T, micro.temperatures_T)
    seen[0].retain_grad()
    found.sum().backward()
    hidden = seen[0].detach().double().requires_grad_()
    logits = hidden[0, micro.row.source_T] @ head.weight.detach().double().T
    expected, _ = logprobs_and_entropy(logits, micro.token_ids_T, micro.temperatures_T.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    expected.sum().backward()
    assert seen[0].grad is not None
    assert hidden.grad is not None
    # gradients of a hidden state are rounded, and added for the completions that share it
    difference = (seen[0].grad.double() - hidden.grad).abs().max()
    assert float(difference) < 2**-7 * float(hidden.grad.abs().max())
    plain = TorchLearner(config)
    with torch.autocast("cpu", torch.bfloat16, enabled=lora is not None):
        rounded, _ = plain._token_logprobs.of(micro.row, micro.token_ids_T, micro.temperatures_T)
    assert float((rounded.double() - expected).abs().max()) > 1e-4


def test_an_exact_head_needs_a_plain_output_layer(model_folder: ModelFolder) -> None:
    """An adapter on it makes logits of its own."""
    config = run_config(model_folder("llama"), "bfloat16", {"rank": 4, "target_modules": ["lm_head"]})
    exact = config.model.model_copy(update={"head_dtype": "float32"})
    with pytest.raises(ConfigError, match=r"head_dtype: float32 is not possible: its output layer is .*; set model"):
        TorchLearner(config.model_copy(update={"model": exact}))


def batch(mask_from: int | None = None) -> MicroBatch:
    """Eight completions at temperature 0.7; tokens of the whole batch before `mask_from` are outside the loss."""
    samples = random_samples()
    for sample in samples:
        sample.temperature = 0.7
    made = step_batch(samples)
    if mask_from is not None:
        made.loss_mask[:mask_from] = 0
    return micro_batch(made, 0, torch.device("cpu"))


def from_logits(model: Any, micro: MicroBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """By the model's own forward, all logits at once."""
    logits = model(**micro.row.forward_arguments(), logits_to_keep=micro.row.source_T).logits[0]
    return logprobs_and_entropy(logits, micro.token_ids_T, micro.temperatures_T, entropy_gradient)


def gradients(model: nn.Module, found: tuple[Tensor, Tensor], entropy_gradient: bool) -> dict[str, Tensor]:
    """Of a loss with both, by parameter."""
    model.zero_grad()
    (found[0].exp().sum() + (found[1].square().sum() if entropy_gradient else 0.0)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_to_logits(model: Any, chosen: TokenLogprobs, entropy_gradient: bool) -> None:
    """Compare logprobs, entropy and the gradients of all parameters: in float64, and by their rounding in float32.

    In float64 chunks and logits agree to 1e-9. In float32 both round; how much depends on the processor. So the error
    of the chunks against float64 is held against the error of the model's own logits, not against a number.
    """
    micro = batch()

    def by_logits() -> list[Tensor]:
        found = from_logits(model, micro, entropy_gradient)
        return [*found, *gradients(model, found, entropy_gradient).values()]

    def by_chunks() -> list[Tensor]:
        found = chosen.of(micro.row, micro.token_ids_T, micro.temperatures_T, micro.wanted_K, entropy_gradient)
        return [*found, *gradients(model, found, entropy_gradient).values()]

    plain, chunked = by_logits(), by_chunks()
    model.double()
    try:
        exact = by_logits()
        torch.testing.assert_close(by_chunks(), exact, rtol=1e-9, atol=1e-9)
    finally:
        model.float()
    assert error(chunked, exact) <= 4 * error(plain, exact) + FLOAT32_EPS


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative error of all values together: the norm of the difference over the norm."""
    difference, whole = (torch.cat([x.detach().double().flatten() for x in values]) for values in (found, exact))
    return float((difference - whole).norm() / whole.norm())


@pytest.mark.parametrize("entropy_gradient", [True, False], ids=["entropy", "alone"])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_equal_the_models_own_logits(name: str, entropy_gradient: bool) -> None:
    """Factors of Cohere and Granite, Gemma's soft cap, tied embeddings: all without a word about the model."""
    model = model_of(CONFIGS[name])
    with capture_logs() as logs:
        chosen = TokenLogprobs(model)
    assert logs == []  # no word of logits that are computed all at once
    assert_equal_to_logits(model, chosen, entropy_gradient)


@pytest.mark.parametrize("on_head", [False, True], ids=["layers", "head"])
def test_adapters_are_computed_and_one_on_the_output_layer_is_said(model_folder: ModelFolder, on_head: bool) -> None:
    """An adapter of the layers leaves chunks as they are; one of the output layer itself has all logits at once."""
    pytest.importorskip("peft")
    lora = LoraConfig(rank=4, target_modules=["q_proj", *(["lm_head"] if on_head else [])])
    config = ModelConfig(path=str(model_folder("llama")), dtype="float32", device="cpu", lora=lora)
    model = loading.add_lora(loading.load_model(config, torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with capture_logs() as logs:
        chosen = TokenLogprobs(model)
    assert [line["event"] for line in logs] == ["logits are computed all at once"] * on_head
    assert_equal_to_logits(model, chosen, entropy_gradient=False)


def test_a_model_that_does_something_else_to_its_logits_is_left_to_do_it() -> None:
    """One that adds a number to a single token's logit: all logits at once, and a line in the log that says why."""
    model = model_of(models.config("qwen3"))
    plain = model.forward

    def forward(**arguments: Any) -> Any:
        output = plain(**arguments)
        output.logits = output.logits + torch.nn.functional.one_hot(torch.tensor(5), output.logits.shape[-1])
        return output

    model.forward = forward
    with capture_logs() as logs:
        chosen = TokenLogprobs(model)
    assert "neither a factor nor a soft cap" in logs[0]["why"]
    assert_equal_to_logits(model, chosen, entropy_gradient=False)


def test_tokens_outside_the_loss_mask_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0, the others what they were, and the output layer sees the tokens of the mask alone."""
    from actors.models import token_logprobs as module

    seen: list[int] = []
    whole = module.chunked_logprobs_and_entropy

    def spy(hidden: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(hidden))
        return whole(hidden, *rest, **named)

    monkeypatch.setattr(module, "chunked_logprobs_and_entropy", spy)
    chosen, all_of, some_of = TokenLogprobs(model_of(models.config("qwen3"))), batch(), batch(mask_from=40)
    everything, some = (chosen.of(m.row, m.token_ids_T, m.temperatures_T, m.wanted_K) for m in (all_of, some_of))
    mask_T = some_of.loss_mask_T
    assert 0 < int(mask_T.sum()) < len(mask_T)
    assert seen == [len(mask_T), int(mask_T.sum())]
    for all_T, some_T in zip(everything, some, strict=True):
        assert not some_T[~mask_T].any()
        torch.testing.assert_close(some_T[mask_T], all_T[mask_T], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.3}], ids=["full", "lora"])
def test_checkpointing_trains_what_it_trains_without(model_folder: ModelFolder, lora: Any) -> None:
    """Two steps, dropout drawn again as it was: the same loss, gradient norm and weights, and layers run twice."""
    learners, calls = [], {}
    for on in (False, True):
        config = run_config(model_folder(), lora=lora)
        model = config.model.model_copy(update={"gradient_checkpointing": on})
        learner = TorchLearner(config.model_copy(update={"model": model}))
        layer: Any = learner.model.get_decoder().layers[0].mlp  # type: ignore[operator]
        calls[on] = 0

        def count(*_: Any, on: bool = on) -> None:
            calls[on] += 1

        layer.register_forward_pre_hook(count)  # the second forward ends where the backward pass has all it needs
        measured = [learner.step(step_batch(random_samples(step), step=step)) for step in (1, 2)]
        learners.append((learner, measured))
    assert calls[True] == 2 * calls[False]
    for name in ("loss", "grad_norm", "entropy"):
        assert learners[0][1][1][name] == pytest.approx(learners[1][1][1][name], rel=1e-5)
    pairs = zip(learners[0][0].model.parameters(), learners[1][0].model.parameters(), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_output_layer_is_itself_again_after_a_row(tmp_path: Path) -> None:
    """Also after one that failed: transformers can use the model as if nothing had been."""
    model = model_of(models.config("qwen3"))
    chosen, micro = TokenLogprobs(model), batch()
    with pytest.raises(RuntimeError, match="out of bounds"):
        chosen.of(micro.row, micro.token_ids_T + 1000, micro.temperatures_T)
    assert "forward" not in vars(model.lm_head)
    model.save_pretrained(tmp_path)
