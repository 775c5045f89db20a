"""One step of the learner: what is updated, what is refused, what is published and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from actors.learner import formats
from actors.learner.learner import TorchLearner
from schemas.config import RunConfig
from schemas.errors import RunFailedError
from tests import models
from tests.actors.learner.steps import Sampled, random_samples, run_config, step_batch
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}


def parameters(learner: TorchLearner) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def changed(before: dict[str, Tensor], learner: TorchLearner) -> set[str]:
    """Names of the parameters that are no longer what they were."""
    return {name for name, now in parameters(learner).items() if not torch.equal(before[name], now)}


def saved(learner: TorchLearner, folder: Path) -> None:
    """Write what a checkpoint of this learner holds."""
    folder.mkdir()
    learner.snapshot().write(folder)


@pytest.fixture
def config(model_folder: ModelFolder) -> RunConfig:
    """A run on the tied model."""
    return run_config(model_folder())


def test_step_moves_logprobs_the_way_advantages_point(config: RunConfig) -> None:
    """After one step the praised completion is more probable than before, the blamed one less."""
    prompt, good, bad = [1, 10, 11], [12, 13, 14], [15, 16, 17]
    learner = TorchLearner(config)

    def scores() -> list[float]:
        with torch.no_grad():
            published = learner.weights().tensors
            plain = models.plain(Path(config.model.path))
            plain.load_state_dict(published, strict=False)
            return [float(models.logprobs(plain, prompt, c).sum()) for c in (good, bad)]

    before = scores()
    plain = models.plain(Path(config.model.path))
    own = [models.logprobs(plain, prompt, c).tolist() for c in (good, bad)]
    learner.step(step_batch([Sampled(prompt, good, own[0], 1.0), Sampled(prompt, bad, own[1], -1.0)]))
    after = scores()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_loss_and_gradient_do_not_depend_on_the_number_of_micro_batches(config: RunConfig) -> None:
    """Shares of four micro-batches add up to the loss and the gradient of one."""
    samples = random_samples()
    whole, parts = (TorchLearner(config).step(step_batch(samples, micro_batches=m)) for m in (1, 4))
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_max", "tokens"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4), name


def test_learning_rate_follows_the_schedule(model_folder: ModelFolder) -> None:
    """Warm-up over 4 steps to 0.01, then linear to 0 at step 8; the optimizer uses it."""
    config = run_config(model_folder(), max_steps=8, warmup_steps=4, lr_scheduler="linear")
    learner = TorchLearner(config)
    assert learner.step(step_batch(random_samples(), step=1))["learning_rate"] == pytest.approx(0.0025)
    assert learner.step(step_batch(random_samples(), step=4))["learning_rate"] == pytest.approx(0.01)
    assert learner.step(step_batch(random_samples(), step=6))["learning_rate"] == pytest.approx(0.005)
    before = parameters(learner)
    assert learner.step(step_batch(random_samples(), step=8))["learning_rate"] == 0.0
    assert changed(before, learner) == set()


def test_gradient_is_scaled_down_to_the_allowed_norm(model_folder: ModelFolder) -> None:
    """With a large eps AdamW's first step is proportional to the gradient: half the norm allowed, half the step."""
    steps = []
    for limit in (0.1, 0.05):
        config = run_config(model_folder(), learning_rate=1.0, max_grad_norm=limit, optimizer={"eps": 10.0})
        learner = TorchLearner(config)
        before = parameters(learner)
        assert learner.step(step_batch(random_samples()))["grad_norm"] > 0.1
        name = "model.layers.0.mlp.up_proj.weight"
        steps.append((parameters(learner)[name].double() - before[name].double()).norm())
    assert float(steps[0]) > 0
    assert float(steps[1] / steps[0]) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_updates_nothing(config: RunConfig, value: float) -> None:
    """The step raises, names what to look at, and parameters and the next step are as if it had not been."""
    learner, untouched = TorchLearner(config), TorchLearner(config)
    before = parameters(learner)
    bad = random_samples()
    bad[0].advantage = value
    with pytest.raises(FloatingPointError, match=r"step 1: loss .*trainer\.learning_rate"):
        learner.step(step_batch(bad))
    assert changed(before, learner) == set()
    for one in (learner, untouched):
        one.step(step_batch(random_samples()))
    assert changed(parameters(untouched), learner) == set()


def test_a_gradient_that_is_not_finite_updates_nothing(config: RunConfig) -> None:
    """A finite loss with an infinite gradient (a square root at zero inside the model) is refused as well."""
    learner = TorchLearner(config)
    before = parameters(learner)
    model: Any = learner.model
    model.model.norm.register_forward_hook(lambda module, inputs, x: x + (x - x).sum(-1, True).sqrt())
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        learner.step(step_batch(random_samples()))
    assert changed(before, learner) == set()


def test_lora_trains_the_adapter_alone(model_folder: ModelFolder) -> None:
    """Every changed parameter is an adapter's, and both halves learn (B first, A once B is not zero)."""
    learner = TorchLearner(run_config(model_folder(), lora=LORA))
    before = parameters(learner)
    for step in (1, 2):
        learner.step(step_batch(random_samples(), step=step))
    moved = changed(before, learner)
    assert {name for name in before if "lora_" in name} == moved
    assert any("lora_A" in name for name in moved)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_bfloat16_computes_in_bfloat16_and_trains_in_float32(model_folder: ModelFolder, lora: Any) -> None:
    """Trained parameters are float32, published full weights bfloat16, and logprobs near those of float32."""
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16", lora=lora))
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    seen: list[torch.dtype] = []
    model: Any = learner.model
    layers = model.get_decoder().layers
    layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = learner.step(step_batch(random_samples()))
    assert seen == [torch.bfloat16]
    exact = TorchLearner(run_config(model_folder(), lora=lora)).step(step_batch(random_samples()))
    assert found["entropy"] == pytest.approx(exact["entropy"], rel=0.02)
    published = {tensor.dtype for tensor in learner.weights().tensors.values()}
    assert published == {torch.bfloat16 if lora is None else torch.float32}


def test_tied_embeddings_are_published_once(model_folder: ModelFolder) -> None:
    """A tied head is the embedding; an untied one has a tensor of its own."""
    tied = TorchLearner(run_config(model_folder("qwen3"))).weights().tensors
    untied = TorchLearner(run_config(model_folder("llama"))).weights().tensors
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in untied
    assert "model.embed_tokens.weight" in tied.keys() & untied.keys()


def test_published_weights_do_not_change_with_the_next_step(config: RunConfig) -> None:
    """What was published is a copy."""
    learner = TorchLearner(config)
    published = learner.weights().tensors
    before = {name: tensor.clone() for name, tensor in published.items()}
    learner.step(step_batch(random_samples()))
    assert all(torch.equal(before[name], tensor) for name, tensor in published.items())
    assert not all(torch.equal(before[name], tensor) for name, tensor in learner.weights().tensors.items())


def mismatch_of(learner: TorchLearner, single: Any) -> float:
    """Largest gap between the learner's logprobs and a plain model's, over random samples."""
    samples = random_samples(seed=3)
    with torch.no_grad():
        for sample in samples:
            sample.logprobs = models.logprobs(single, sample.prompt, sample.completion).tolist()
    return learner.step(step_batch(samples, step=9))["mismatch_max"]


def test_a_gradient_that_is_not_finite_once_is_computed_again(config: RunConfig, monkeypatch: Any) -> None:
    """A fault of the machine that does not come again: the step is trained as if nothing had been."""
    learner, untouched = TorchLearner(config), TorchLearner(config)
    whole, calls = learner._backward, []

    def faulty(*arguments: Any) -> dict[str, float]:
        calls.append(arguments)
        return whole(*arguments) | ({"loss": float("nan")} if len(calls) == 1 else {})

    monkeypatch.setattr(learner, "_backward", faulty)
    for one in (learner, untouched):
        one.step(step_batch(random_samples()))
    assert len(calls) == 2
    assert changed(parameters(untouched), learner) == set()


def test_a_snapshot_is_of_its_moment(config: RunConfig, tmp_path: Path) -> None:
    """Written after the next step has moved the weights, it holds those of before it."""
    learner = TorchLearner(config)
    learner.step(step_batch(random_samples()))
    before, snapshot = parameters(learner), learner.snapshot()
    learner.step(step_batch(random_samples(2), step=2))
    snapshot.write(tmp_path)
    restored = TorchLearner(config)
    restored.restore(tmp_path)
    assert changed(before, restored) == set()
    assert changed(before, learner) != set()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_full_checkpoint_loads_with_transformers_alone(model_folder: ModelFolder, family: str, tmp_path: Path) -> None:
    """Model and tokenizer load without this project, and give the learner's logprobs."""
    from transformers import AutoTokenizer

    learner = TorchLearner(run_config(model_folder(family)))
    learner.step(step_batch(random_samples()))
    saved(learner, tmp_path / "checkpoint")
    single = models.plain(tmp_path / "checkpoint", models.reference_attention(family))
    assert single.config.use_cache
    assert "grpo" not in (tmp_path / "checkpoint" / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint")("ab=").input_ids == [models.BOS, 4, 5, 3]
    assert mismatch_of(learner, single) < 1e-5


def test_lora_checkpoint_loads_with_peft_alone(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The adapter loads onto the base model and gives the learner's logprobs."""
    from peft import PeftModel

    learner = TorchLearner(run_config(model_folder(), lora=LORA))
    base = models.plain(model_folder())
    learner.step(step_batch(random_samples()))
    saved(learner, tmp_path / "checkpoint")
    assert mismatch_of(learner, base) > 1e-3
    single = PeftModel.from_pretrained(models.plain(model_folder()), tmp_path / "checkpoint")
    fresh = TorchLearner(run_config(model_folder(), lora=LORA))
    fresh.restore(tmp_path / "checkpoint")
    assert mismatch_of(fresh, single) < 1e-5


@pytest.mark.parametrize("lora", [None, LORA | {"dropout": 0.3}], ids=["full", "lora"])
def test_going_on_from_a_checkpoint_is_going_on(model_folder: ModelFolder, lora: Any, tmp_path: Path) -> None:
    """Two steps, save, restore elsewhere, third step: the same bits, in optimizer and dropout too."""
    learner = TorchLearner(run_config(model_folder(), lora=lora))
    for step in (1, 2):
        learner.step(step_batch(random_samples(step), step=step))
    saved(learner, tmp_path / "checkpoint")
    first = learner.step(step_batch(random_samples(3), step=3))
    restored = TorchLearner(run_config(model_folder(), lora=lora))
    restored.step(step_batch(random_samples(9), step=1))
    restored.restore(tmp_path / "checkpoint")
    second = restored.step(step_batch(random_samples(3), step=3))
    assert second["loss"] == first["loss"]
    assert changed(parameters(learner), restored) == set()


def test_a_checkpoint_holds_no_pickle(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Data only: safetensors and text."""
    saved(TorchLearner(run_config(model_folder())), tmp_path / "checkpoint")
    files = {path.suffix for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".jinja", ".txt", ".md"}


@pytest.mark.parametrize(("stop", "fails"), [(0.7, True), (None, False)])
def test_engine_that_serves_another_model_stops_the_run_before_anything_is_applied(
    model_folder: ModelFolder, stop: float | None, fails: bool
) -> None:
    """Logprobs of another model on the very weights of the step: the words say so, the weights stay as they are."""
    learner = TorchLearner(run_config(model_folder(), mismatch={"stop": stop}))
    before = parameters(learner)
    foreign = [Sampled([1, 10, 11], [12, 13, 14], [-9.0, -8.0, -9.0], 1.0)]
    if fails:
        with pytest.raises(RunFailedError, match=r"step 1: .* do not compute the same model"):
            learner.step(step_batch(foreign))
        assert changed(before, learner) == set()
    else:
        with capture_logs() as logs:
            assert learner.step(step_batch(foreign))["mismatch_abs_current"] > 1.0
            learner.step(step_batch(foreign, step=2))
        assert [line["cause"] for line in logs if line["event"] == "trainer and engine differ"] == ["model"]


def test_weights_are_read_for_a_model_whose_attention_runs_elsewhere(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Those of a rank with shards pass through the host's memory, where flex does not run, and need not."""
    learner = TorchLearner(run_config(model_folder()))
    learner.snapshot().write(tmp_path)
    config = learner._config.model.model_copy(update={"attention": "flex"})
    formats.restore(learner.model, config, tmp_path)
