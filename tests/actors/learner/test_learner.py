"""One step of the learner: what is updated, what is refused, what is published and saved."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from actors.algorithms.losses import LossInputs, LossOutput
from actors.learner import formats
from actors.learner import learner as learner_module
from actors.learner.learner import TorchLearner
from actors.learner.parallelism import DataParallel
from actors.learner.reference_models import ReferenceModels
from actors.learner.saved_tensors import SavedTensors
from actors.models import loading
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig
from schemas.errors import ConfigError, RunFailedError
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


def test_gradient_without_a_maximum_is_the_gradient(model_folder: ModelFolder) -> None:
    """As with a maximum that no norm reaches; the norm is measured."""
    found = []
    for limit in (None, 1e9):
        learner = TorchLearner(run_config(model_folder(), max_grad_norm=limit))
        measured = learner.step(step_batch(random_samples()))
        found.append((measured["grad_norm"], parameters(learner)))
    assert found[0][0] == found[1][0] > 0
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


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
    trained = [p for p in learner.trained.parameters() if p.requires_grad]
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


def faulty_losses(monkeypatch: pytest.MonkeyPatch, factor: Callable[[int], float]) -> list[LossInputs]:
    """Have every loss come out multiplied, by a function of the number of the call; what the loss has been given."""
    whole, calls = learner_module.compute_loss, list[LossInputs]()

    def faulty(inputs: LossInputs, *others: Any) -> LossOutput:
        calls.append(inputs)
        found = whole(inputs, *others)
        return replace(found, loss=found.loss * factor(len(calls)))

    monkeypatch.setattr(learner_module, "compute_loss", faulty)
    return calls


def test_a_gradient_that_is_not_finite_once_is_computed_again(config: RunConfig, monkeypatch: Any) -> None:
    """A fault of the machine that does not come again: the step is trained as if nothing had been."""
    learner, untouched = TorchLearner(config), TorchLearner(config)
    untouched.step(step_batch(random_samples()))
    calls = faulty_losses(monkeypatch, lambda number: float("nan") if number == 1 else 1.0)
    learner.step(step_batch(random_samples()))
    assert len(calls) == 2
    assert changed(parameters(untouched), learner) == set()


def test_adapters_of_experts_are_refused_for_servers(model_folder: ModelFolder) -> None:
    """Before anything is sampled; adapters of attention are served."""
    tree = run_config(model_folder("qwen3_moe"), lora={"rank": 4}).model_dump(exclude_unset=True)
    tree["inference"] = {"engine": {"type": "vllm"}}
    with pytest.raises(ConfigError, match=r"model.lora.target_modules: experts would have adapters \(.*experts"):
        TorchLearner(RunConfig.model_validate(tree))
    tree["model"]["lora"]["target_modules"] = ["q_proj", "v_proj"]
    TorchLearner(RunConfig.model_validate(tree))


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


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_moe"])
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


ADAPTERS = [
    LORA,
    LORA | {"rslora": True},
    LORA | {"dora": True},
    LORA | {"modules_to_save": ["lm_head", "norm"]},
    LORA | {"target_modules": r"model\.layers\.1\..*_proj", "init": "gaussian"},
    LORA | {"init": "orthogonal", "rslora": True, "dora": True, "modules_to_save": ["embed_tokens"]},
]
ADAPTER_IDS = ["plain", "rslora", "dora", "modules", "expression", "all"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", ADAPTERS, ids=ADAPTER_IDS)
def test_lora_checkpoint_loads_with_peft_alone(model_folder: ModelFolder, tmp_path: Path, lora: Any) -> None:
    """The adapter loads onto the base model and gives the learner's logprobs, merged into it too."""
    from peft import PeftModel

    learner = TorchLearner(run_config(model_folder("llama"), lora=lora))
    base = models.plain(model_folder("llama"))
    learner.step(step_batch(random_samples()))
    saved(learner, tmp_path / "checkpoint")
    assert mismatch_of(learner, base) > 1e-3
    single = PeftModel.from_pretrained(models.plain(model_folder("llama")), tmp_path / "checkpoint")
    fresh = TorchLearner(run_config(model_folder("llama"), lora=lora))
    fresh.restore(tmp_path / "checkpoint")
    assert mismatch_of(fresh, single) < 1e-5
    again = TorchLearner(run_config(model_folder("llama"), lora=lora))
    again.restore(tmp_path / "checkpoint")
    assert mismatch_of(again, single.merge_and_unload()) < 1e-5


@pytest.mark.parametrize("lora", ADAPTERS[1:], ids=ADAPTER_IDS[1:])
def test_adapters_start_at_the_base_model_and_the_reference_stays_there(model_folder: ModelFolder, lora: Any) -> None:
    """Without its adapter, and without copies of whole modules, the policy is the reference."""
    config = run_config(model_folder("llama"), lora=lora, reference={"beta": 0.1}, num_iterations=2)
    learner = TorchLearner(config)
    first = learner.step(step_batch(random_samples()))
    assert first["mismatch_max"] > 0
    base = models.plain(model_folder("llama"))
    fixed = ReferenceModels(config, TokenLogprobs(learner.model), nullcontext, DataParallel())
    batch = step_batch(random_samples())
    (found,) = fixed.logprobs(batch, True).values()
    expected = torch.cat([models.logprobs(base, sample.prompt, sample.completion) for sample in random_samples()])
    assert found.reference_T is not None
    torch.testing.assert_close(found.reference_T, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(found.old_T, expected, atol=1e-3)  # type: ignore[arg-type]


def test_published_adapters_have_a_plain_scale_and_names(model_folder: ModelFolder) -> None:
    """Engines that know alpha ÷ rank and names alone compute the same: 8 ÷ √4 is 16 ÷ 4."""
    lora = LORA | {"rslora": True, "target_modules": r".*layers\.1\..*\.(q|v)_proj"}
    learner = TorchLearner(run_config(model_folder(), lora=lora))
    published = json.loads(learner.weights().files["adapter_config.json"])
    assert (published["use_rslora"], published["lora_alpha"], published["r"]) == (False, 16.0, 4)
    assert published["target_modules"] == ["q_proj", "v_proj"]
    # a checkpoint is peft's own
    snapshot = json.loads(learner.snapshot().texts["adapter_config.json"])
    assert (snapshot["use_rslora"], snapshot["lora_alpha"]) == (True, 8.0)
    assert snapshot["target_modules"] == lora["target_modules"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_modules_are_trained_in_float32(model_folder: ModelFolder, dtype: str) -> None:
    """Their copies are, whatever the precision of the frozen base."""
    lora = LORA | {"modules_to_save": ["lm_head"]}
    learner = TorchLearner(run_config(model_folder("llama"), dtype, lora=lora))
    trained = {name: p for name, p in learner.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    head = next(name for name in trained if "lm_head" in name)
    before = parameters(learner)
    learner.step(step_batch(random_samples()))
    assert head in changed(before, learner)
    assert {str(t.dtype) for t in learner.weights().tensors.values()} == {"torch.float32"}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: lm_head has the weights of .*embed_tokens too \(tied\)"),
        ({"modules_to_save": ["value_head"]}, r"modules_to_save: the model has no module value_head"),
        ({"target_modules": r"model\.layer\..*"}, r"target_modules: .*layer"),
    ],
)
def test_modules_that_can_not_be_adapted_are_named(model_folder: ModelFolder, lora: Any, words: str) -> None:
    """On the tied model."""
    with pytest.raises(ConfigError, match=rf"^model\.lora\.{words}"):
        TorchLearner(run_config(model_folder(), lora=lora))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [None, LORA | {"dropout": 0.3}, LORA | {"dora": True, "modules_to_save": ["norm"], "rslora": True}],
    ids=["full", "lora", "dora"],
)
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


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_warm_up_computes_a_whole_row_and_changes_nothing(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, lora: Any
) -> None:
    """The steps after it have the same bits as without; the row is as long as rows are, its samples fit the model."""
    plain, warm = (TorchLearner(run_config(model_folder(), lora=lora)) for _ in range(2))
    rows: list[tuple[int, int]] = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda tensor: rows.append((tensor.numel(), tensor.requires_grad)) or backward(tensor)
    )
    forward = warm.model.forward
    lengths: list[int] = []
    monkeypatch.setattr(
        warm.model, "forward", lambda **given: lengths.append(given["input_ids"].shape[1]) or forward(**given)
    )
    warm.warm_up()
    config = run_config(model_folder(), lora=lora)
    samples = config.packer.sequence_len // (config.rollout.max_tokens + 1)
    assert lengths == [samples * config.rollout.max_tokens], "a row leaves out the last token of each sample"
    assert rows == [(1, True)]
    monkeypatch.undo()
    results = [learner.step(step_batch(random_samples(1))) for learner in (plain, warm)]
    assert results[0]["loss"] == results[1]["loss"]
    assert changed(parameters(plain), warm) == set()


def test_a_checkpoint_is_restored_without_a_second_model(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor at a time: a model that just fits on its GPU goes on after a crash."""
    learner = TorchLearner(run_config(model_folder()))
    learner.step(step_batch(random_samples(1)))
    learner.snapshot().write(tmp_path)
    restored = TorchLearner(run_config(model_folder(seed=1)))
    read: list[str] = []
    get = SavedTensors.__getitem__
    monkeypatch.setattr(SavedTensors, "__getitem__", lambda saved, name: read.append(name) or get(saved, name))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("a second model"))
    formats.restore(restored.model, run_config(model_folder()).model, tmp_path)
    assert changed(parameters(learner), restored) == set()
    assert sorted(read) == sorted(loading.full_tensors(restored.model)), "each once"


def test_a_checkpoint_with_other_names_is_read_as_transformers_reads_it(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """As of architectures that transformers writes under other names: here, without the prefix of the whole model."""
    learner = TorchLearner(run_config(model_folder("gemma2")))
    learner.step(step_batch(random_samples(1)))
    learner.snapshot().write(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    restored = TorchLearner(run_config(model_folder("gemma2", seed=1)))
    assert changed(parameters(learner), restored)
    formats.restore(restored.model, run_config(model_folder()).model, tmp_path)
    assert changed(parameters(learner), restored) == set()


@pytest.mark.parametrize("broken", ["shape", "file"])
def test_a_checkpoint_that_does_not_fit_overwrites_nothing(
    model_folder: ModelFolder, tmp_path: Path, broken: str
) -> None:
    """Whether a tensor has another shape, or a file is cut off."""
    learner = TorchLearner(run_config(model_folder()))
    learner.snapshot().write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if broken == "shape":
        save_file(tensors | {max(tensors): torch.zeros(3)}, file, {"format": "pt"})
    else:
        file.write_bytes(file.read_bytes()[:100])
    learner.step(step_batch(random_samples(1)))
    before = {name: tensor.clone() for name, tensor in parameters(learner).items()}
    with pytest.raises(ValueError, match=r"has shape \(3,\)|model.safetensors"):
        formats.restore(learner.model, run_config(model_folder()).model, tmp_path)
    assert changed(before, learner) == set()


def test_weights_are_read_for_a_model_whose_attention_runs_elsewhere(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Those of a rank with shards pass through the host's memory, where flex does not run, and need not."""
    learner = TorchLearner(run_config(model_folder()))
    learner.snapshot().write(tmp_path)
    model = run_config(model_folder()).model.model_copy(update={"attention": "flex"})
    formats.restore(learner.model, model, tmp_path)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_padded_rows_train_the_same(model_folder: ModelFolder, lora: Any) -> None:
    """Two steps in rows padded to multiples of 16, with a reference: measurements and weights within 1e-5."""
    learners, measured, seen = [], [], []
    for multiple in (1, 16):
        config = run_config(model_folder(), lora=lora, optimizer={"eps": 1e-4}, reference={"beta": 0.1})
        model = config.model.model_copy(update={"row_multiple": multiple})
        learner = TorchLearner(config.model_copy(update={"model": model}))
        embeddings: Any = learner.model.get_input_embeddings()  # type: ignore[operator]
        embeddings.register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
        batches = [step_batch(random_samples(step), step=step, micro_batches=3) for step in (1, 2)]
        measured.append([learner.step(batch) for batch in batches])
        learners.append(learner)
    lengths = seen[len(seen) // 2 :]
    assert {length % 16 for length in lengths} == {0}
    assert {length % 16 for length in seen} != {0}
    for plain, padded in zip(*measured, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert padded[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
    for one, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
