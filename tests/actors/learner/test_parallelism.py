"""Weights spread over ranks: the step of one process that has them all, and checkpoints that fit any number."""

import gc
import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.learner import expert_parallel, tensor_parallel
from actors.learner.collective_watch import CollectiveWatch
from actors.learner.fsdp import FullySharded
from actors.learner.learner import TorchLearner
from actors.learner.ranks import SINGLE_RANK, RanksBrokenError
from actors.models import attention, loading
from schemas.config import RunConfig, check_tree
from schemas.config.resume import as_tree
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.shard_rank import GROUPS, Gradients
from tests.actors.learner.steps import batches_of, run_config, scored_group
from tests.conftest import ModelFolder
from tests.marks import first_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "several_updates": {"num_iterations": 2, "num_minibatches": 2},
    "lora": {"lora": {"rank": 4}, "reference": {"beta": 0.1}, "num_minibatches": 2},
    "kl": {"reference": {"beta": 0.1, "place": "group_reward"}, "num_iterations": 2, "num_minibatches": 2},
    "experts": {"family": "qwen3_moe"},
    "mixtral": {"family": "mixtral"},
    "replayed": {"family": "qwen3_moe", "router_replay": True},
    "adapted_experts": {"family": "qwen3_moe", "lora": {"rank": 4, "target_modules": ["q_proj", "o_proj"]}},
    "gemma": {"family": "gemma2"},
    "biased": {"family": "biased_llama"},
    "mistral": {"family": "mistral", "entropy_coef": 0.01, "loss": {"type": "gspo"}},
    "bfloat16_lora": {"lora": {"rank": 4}, "dtype": "bfloat16"},
    "exact_head": {"lora": {"rank": 4}, "dtype": "bfloat16", "model": {"head_dtype": "float32"}},
    "vision": {"family": "qwen3_vl"},
    "checkpointing": {"lora": {"rank": 4}, "model": {"gradient_checkpointing": True}},
    "selective": {"model": {"gradient_checkpointing": "selective"}},
    "compiled": {"model": {"compile": True}},
    "untied_decay": {"family": "llama", "optimizer": {"weight_decay": 0.1, "decay_embeddings": False}},
}
MARKS: dict[str, Any] = {
    "lora": [],
    "compiled": [pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="not run: install g++")],
}
"""`make test` runs adapters, `make test-long` all others."""


@dataclass
class Trained:
    """What a run of some steps has left."""

    weights: dict[str, Tensor]
    values: list[dict[str, float]]
    checkpoint: Path
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the last update."""
    computed: dict[str, Any] = field(default_factory=dict)
    """By shard_rank.Computed."""


def config_of(model_folder: ModelFolder, sharding: str = "fsdp", family: str = "qwen3", **keys: Any) -> RunConfig:
    """A run of one of the kinds; eps keeps AdamW from making a whole step of a gradient that is only rounding."""
    model = keys.pop("model", {})
    keys["optimizer"] = {"eps": 1e-4} | keys.get("optimizer", {})
    keys = {"num_ranks": 2} | keys
    made = run_config(model_folder(family), learning_rate=1e-3, sharding=sharding, **keys)
    tree = as_tree(made)
    tree["model"] |= model
    return check_tree(tree)


def sharded(
    folder: Path,
    config: RunConfig,
    steps: list[int],
    size: int = 2,
    restore: Path | None = None,
    groups: str = "single turns",
) -> Trained:
    """Steps of ranks in processes of their own."""
    folder.mkdir()
    task = {"config": as_tree(config), "steps": steps, "size": size, "restore": str(restore or ""), "groups": groups}
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, "-m", "tests.actors.learner.shard_rank", str(folder)]
    ended = subprocess.run(command, check=False, timeout=1000)
    logs = {path.name: path.read_text() for path in sorted(folder.glob("rank_*.log"))}
    assert ended.returncode == 0, logs
    values = json.loads((folder / "values.json").read_text())
    computed = json.loads((folder / "computed.json").read_text())
    weights, gradients = (load_file(folder / f"{name}.safetensors") for name in ("weights", "gradients"))
    return Trained(weights, values, folder / "checkpoint", gradients, computed)


def whole(
    config: RunConfig,
    steps: list[int],
    restore: Path | None = None,
    num_batches: int = 1,
    groups: str = "single turns",
) -> Trained:
    """The same steps of one process that shards nothing and stands for one rank or more."""
    learner, values = TorchLearner(config), []
    if restore is not None:
        learner.restore(restore)
    gradients = Gradients(learner)
    for step in steps:
        made = [GROUPS[groups](ordinal) for ordinal in range(5)]
        *before, batch = batches_of(made, num_batches, config.trainer.num_minibatches, step)
        values.append(learner.step(batch, SINGLE_RANK, before))
    gradients.close()
    return Trained(learner.weights().tensors, values, Path(), gradients.found)


def assert_near(found: Trained, expected: Trained, within: float = 1e-5) -> None:
    """Weights by distance; gradients and metrics relative to their size, gradients also to that of the largest."""
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert (found.weights[name].float() - tensor.float()).abs().max() <= within, name
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.gradients.values())
    for name, tensor in expected.gradients.items():
        allowed = within * float(tensor.abs().max()) + 1e-6 * largest
        assert float((found.gradients[name] - tensor).abs().max()) <= allowed, name
    for ours, theirs in zip(found.values, expected.values, strict=True):
        for name in ("loss", "grad_norm", "entropy", "tokens", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=within, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, [pytest.mark.long])) for kind in KINDS])
def test_two_ranks_with_halves_make_the_steps_of_one_that_has_all(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Five groups, so that one rank has fewer micro-batches: weights within 1e-5 after two steps.

    In bfloat16 a row is rounded otherwise in other company, so there the one process has the rows of two.
    """
    config = config_of(model_folder, **KINDS[kind])
    alone = whole(config, [1, 2], num_batches=2 if config.model.dtype == "bfloat16" else 1)
    assert_near(sharded(tmp_path / "two", config, [1, 2]), alone)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["lora", "checkpointing", "full"])
def test_two_ranks_with_halves_train_branches(kind: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Prefixes are shared on either rank; the attention of their rows is computed again in the backward pass."""
    config = config_of(model_folder, **KINDS[kind])
    found = sharded(tmp_path / "two", config, [1, 2], groups="branches")
    assert_near(found, whole(config, [1, 2], groups="branches"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["full", "lora", "experts"])
def test_four_ranks_with_quarters_make_the_steps_of_one_that_has_all(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """With five groups."""
    config = config_of(model_folder, **KINDS[kind] | {"num_ranks": 4})
    assert_near(sharded(tmp_path / "four", config, [1, 2], size=4), whole(config, [1, 2]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "sharding", "together", "size"),
    [
        ("kl", "none", 2, 2),
        pytest.param("kl", "none", 4, 4, marks=pytest.mark.long),
        pytest.param("lora", "fsdp", 2, 4, marks=pytest.mark.long),
        pytest.param("lora", "none", 2, 4, marks=pytest.mark.long),
        pytest.param("full", "none", 2, 2, marks=pytest.mark.long),
        pytest.param("selective", "fsdp", 4, 4, marks=pytest.mark.long),
        pytest.param("several_updates", "none", 2, 4, marks=pytest.mark.long),
        pytest.param("mistral", "none", 2, 2, marks=pytest.mark.long),
        pytest.param("experts", "fsdp", 2, 2, marks=pytest.mark.long),
        pytest.param("untied_decay", "fsdp", 2, 2, marks=pytest.mark.long),
        pytest.param("sft", "none", 2, 4, marks=pytest.mark.long),
    ],
)
def test_ranks_that_compute_rows_together_make_the_steps_of_one(
    kind: str, sharding: str, together: int, size: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """trainer.context_parallel, alone and with shards: weights within 1e-5 after two steps, and all metrics."""
    keys = KINDS.get(kind, {}) | {"num_ranks": size, "context_parallel": together}
    if kind == "sft":
        rows = [{"prompt": "ab" * n, "completion": "ba" * n} for n in range(1, 6)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sizes = {"batch_size": 3, "mu_peak": 0.5, "mu_valley": 0.5, "mu_warmup_steps": 0, "mu_decay_steps": 0}
        keys["sft"] = {"path": str(tmp_path / "rows.jsonl")} | sizes
    config = config_of(model_folder, sharding, **keys)
    found = sharded(tmp_path / "ranks", config, [1, 2], size)
    alone = whole(config, [1, 2], num_batches=size // together)
    assert_near(found, alone)
    for ours, theirs in zip(found.values, alone.values, strict=True):
        # nothing is counted once for each rank of a row
        for name in set(ours) - {"torch_threads"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "keys", "size"),
    [
        ("lora", {"tensor_parallel": 2}, 2),
        pytest.param("lora", {"tensor_parallel": 2}, 4, marks=pytest.mark.long),
        pytest.param("kl", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("full", {"tensor_parallel": 2}, 4, marks=pytest.mark.long),
        pytest.param("biased", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("several_updates", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("mistral", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("gemma", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("selective", {"tensor_parallel": 2}, 4, marks=pytest.mark.long),
        pytest.param("checkpointing", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("untied_decay", {"tensor_parallel": 2}, 4, marks=pytest.mark.long),
        ("experts", {"expert_parallel": 2}, 2),
        pytest.param("experts", {"expert_parallel": 2}, 4, marks=pytest.mark.long),
        pytest.param("experts", {"expert_parallel": 4}, 4, marks=pytest.mark.long),
        pytest.param("experts", {"tensor_parallel": 2, "expert_parallel": 4}, 4, marks=pytest.mark.long),
        pytest.param("experts", {"context_parallel": 2, "expert_parallel": 2}, 4, marks=pytest.mark.long),
        pytest.param("experts", {"tensor_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("adapted_experts", {"expert_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("mixtral", {"expert_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("replayed", {"tensor_parallel": 2, "expert_parallel": 4}, 4, marks=pytest.mark.long),
        pytest.param("replayed", {"context_parallel": 2, "expert_parallel": 2}, 2, marks=pytest.mark.long),
        pytest.param("replayed", {}, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_with_parts_of_the_weights_make_the_steps_of_one(
    kind: str, keys: dict[str, int], size: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """trainer.tensor_parallel and expert_parallel: weights within 1e-5 after two steps, and all metrics."""
    config = config_of(model_folder, **KINDS[kind] | {"num_ranks": size} | keys)
    groups = "routed" if config.trainer.router_replay else "single turns"
    found = sharded(tmp_path / "ranks", config, [1, 2], size, groups=groups)
    alone = whole(config, [1, 2], num_batches=config.trainer.row_groups, groups=groups)
    assert_near(found, alone)
    for ours, theirs in zip(found.values, alone.values, strict=True):
        for name in set(ours) - {"torch_threads"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "tensor_parallel") for family in models.FURTHER if family != "deepseek_v3"),
        *((family, "expert_parallel") for family in ("qwen2_moe", "ernie4_5_moe", "deepseek_v3")),
    ],
)
def test_further_families_are_divided_by_their_plans(
    family: str, way: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Experts that get tokens in two axes, dense layers in front, shared experts, norms in other places."""
    config = config_of(model_folder, family=family, **{way: 2})
    found = sharded(tmp_path / "ranks", config, [1, 2])
    assert_near(found, whole(config, [1, 2], num_batches=config.trainer.row_groups))


@pytest.mark.parametrize(
    ("family", "changed", "module"),
    [("cohere", {"use_qk_norm": True}, "CohereAttention"), ("deepseek_v3", {}, "DeepseekV3Attention")],
)
def test_attention_that_no_plan_cuts_whole_is_refused(family: str, changed: dict[str, Any], module: str) -> None:
    """Norms over all heads stay whole, while a rank has some of the heads; latent attention has no plan."""
    config = models.config(family)
    config.update(changed)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=f"tensor_parallel: transformers has no plan that cuts {module} of "):
        tensor_parallel.check(model, 2)


@pytest.mark.parametrize(
    ("family", "size", "problem"),
    [
        ("qwen3", 2, "transformers has no plan that sends tokens to the experts of Qwen3ForCausalLM; set 1"),
        ("qwen3_moe", 3, "3 ranks can't divide the 4 experts of a layer; set a divisor"),
    ],
)
def test_experts_that_can_not_be_divided_are_refused(family: str, size: int, problem: str) -> None:
    """Before a weight is moved."""
    with pytest.raises(ConfigError, match=f"trainer.expert_parallel: {problem}"):
        expert_parallel.check(AutoModelForCausalLM.from_config(models.config(family)), size)


def test_a_rank_that_will_share_the_model_loads_it_with_the_kernel_of_its_gpu(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, where that kernel can't run: nothing is computed before the weights are on the GPU."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel has no version for CPUs")

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=refuse))
    monkeypatch.setattr(attention, "implementation", lambda *_: attention.NAMES["flash"])
    config = config_of(model_folder)
    learner = TorchLearner(config, parallelism=FullySharded(0, config.trainer))
    assert learner.model.config._attn_implementation == attention.NAMES["flash"]
    with pytest.raises(AssertionError, match="no version for CPUs"):
        learner.warm_up()


def test_an_old_transformers_is_refused_with_the_version_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no code that sends tokens to experts."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    model = AutoModelForCausalLM.from_config(models.config("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"expert_parallel: needs a newer transformers, .*; install 5.19"):
        expert_parallel.check(model, 2)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_branches_are_trained_by_ranks_that_compute_rows_together(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Prefixes are shared across the parts of a row."""
    config = config_of(model_folder, "none", **KINDS[kind] | {"num_ranks": 2, "context_parallel": 2})
    found = sharded(tmp_path / "two", config, [1, 2], groups="branches")
    assert_near(found, whole(config, [1, 2], groups="branches"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", first_of(["qwen3", "llama"]))
def test_two_ranks_compute_in_bfloat16_and_add_in_float32(
    model_folder: ModelFolder, tmp_path: Path, family: str
) -> None:
    """The float32 weights after two steps are those of one process with masters within 1e-6.

    With gradients added over ranks in bfloat16 they would be 1e-4 apart.
    """
    config = config_of(model_folder, family=family, dtype="bfloat16")
    two, alone = sharded(tmp_path / "two", config, [1, 2, 3]), TorchLearner(config)
    for step in (1, 2):
        *before, batch = batches_of([scored_group(ordinal) for ordinal in range(5)], 2, 1, step)
        values = alone.step(batch, SINGLE_RANK, before)
        assert two.values[step - 1]["grad_norm"] == pytest.approx(values["grad_norm"], rel=1e-5)
    saved = load_file(two.checkpoint / "model.safetensors")
    for name, tensor in loading.full_tensors(alone.trained).items():
        assert (saved[name] - tensor).abs().max() < 1e-6, name
    assert {tensor.dtype for tensor in two.weights.values()} == {torch.bfloat16}
    bfloat16 = ["torch.bfloat16"]
    assert two.computed["dtypes"] == {"weights": bfloat16, "activations": bfloat16, "trained": ["torch.float32"]}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_ranks_train_float32_masters_of_a_model_that_is_stored_in_16_bits(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """The ranks map the file as it is; the step is that of one process, which loads the model in float32."""
    stored = models.plain(model_folder("qwen3")).to(torch.bfloat16)
    stored.save_pretrained(tmp_path / "stored")
    config = run_config(tmp_path / "stored", learning_rate=1e-3, sharding="fsdp", num_ranks=2, optimizer={"eps": 1e-4})
    two = sharded(tmp_path / "two", config, [1, 2])
    assert_near(two, whole(config, [1, 2]))
    assert two.computed["dtypes"]["trained"] == ["torch.float32"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="not run: Linux tells what is private")
def test_a_rank_that_will_share_the_model_takes_no_memory_for_it(tmp_path: Path) -> None:
    """Eight ranks of a machine would hold eight models; what is mapped from a file, the machine has once."""
    settings = Qwen3Config(
        vocab_size=120_000, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(settings).to(torch.bfloat16).save_pretrained(tmp_path)
    models.tokenizer().save_pretrained(tmp_path)
    config = run_config(tmp_path, sharding="fsdp", num_ranks=2)
    kept = [
        TorchLearner(config, parallelism=FullySharded(0, config.trainer))
    ]  # all imports and caches are there after the first
    before = _private_bytes()
    kept.append(TorchLearner(config, parallelism=FullySharded(0, config.trainer)))
    model = sum(parameter.numel() for parameter in kept[-1].model.parameters()) * 4
    assert _private_bytes() - before < 0.2 * model
    kept.append(TorchLearner(config))  # the other way has it: so the measure can fail
    assert _private_bytes() - before > 0.9 * model


def _private_bytes() -> int:
    gc.collect()
    (found,) = re.findall(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found) * 1024


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_next_layer_is_gathered_while_a_layer_is_computed(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Two layers: when the first ends, the rest of the model and both of them have been asked for."""
    two = sharded(tmp_path / "two", config_of(model_folder, **KINDS[kind]), [1])
    assert two.computed["gathered"] == [3, 3]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_fits_any_number_of_ranks(kind: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Saved by two; one that shards nothing and three that do go on as the two did, optimizer included."""
    config = config_of(model_folder, **KINDS[kind])
    two = sharded(tmp_path / "two", config, [1, 2])
    if kind == "full":
        assert models.plain(two.checkpoint).config.vocab_size == len(models.VOCABULARY)
    one = whole(config, [2], two.checkpoint)
    three = sharded(tmp_path / "three", config, [2], 3, two.checkpoint)
    two.values = two.values[1:]
    assert_near(two, one)
    assert_near(three, one)


def exact_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Orthogonalise as Muon does (the quintic of torch.optim.Muon), in float64 instead of bfloat16."""
    a, b, c = coefficients
    x = grad.double() if grad.shape[0] <= grad.shape[1] else grad.double().T
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if grad.shape[0] <= grad.shape[1] else x.T


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_muon_on_shards_is_as_near_to_the_exact_step_as_muon_on_one_rank(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newton-Schulz rounds to bfloat16, and a processor chooses the order of its sums: no fixed bound holds everywhere.

    So both are held against the same steps with Newton-Schulz in float64: shards may round otherwise, not worse.
    """
    config = config_of(model_folder, optimizer={"type": "muon"})
    ours, theirs = sharded(tmp_path / "two", config, [1, 2]), whole(config, [1, 2])
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", exact_newton_schulz)
    exact = whole(config, [1, 2])
    begin = TorchLearner(config).weights().tensors
    for name, tensor in exact.weights.items():
        found, rounding = (ours.weights[name] - tensor).norm(), (theirs.weights[name] - tensor).norm()
        moved = (tensor - begin[name]).norm()
        assert found <= 3 * rounding + 1e-3 * moved, name  # norms are AdamW's: only float32 rounds there
        assert found <= 0.1 * moved, name


def test_a_collective_is_left_when_the_gang_shall_not_wait() -> None:
    """The thread beside it raises what it is told, and only while its owner is inside."""
    told: list[Any] = []
    ended = threading.Event()

    def note(failure: threading.ExceptHookArgs) -> None:
        told.append((failure.thread.name if failure.thread else "", str(failure.exc_value)))
        ended.set()

    def shall_wait() -> None:
        raise ValueError("the gang was told to exit")

    before, threading.excepthook = threading.excepthook, note
    try:
        watch = CollectiveWatch(shall_wait)
        with watch.watching():
            assert ended.wait(60.0)
    finally:
        threading.excepthook = before
    assert told == [("ranks", "the gang was told to exit")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), RanksBrokenError),
        (torch.distributed.DistBackendError("NCCL error"), RanksBrokenError),
        (RuntimeError("shapes can't be multiplied"), RuntimeError),
    ],
)
def test_only_the_loss_of_a_rank_is_called_that(error: Exception, expected: type[Exception]) -> None:
    """An error of the model is told as it is."""
    with pytest.raises(expected) as found, CollectiveWatch(lambda: None).watching():
        raise error
    assert type(found.value) is expected


def _tree(trainer: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {
        "model": {"path": "some/model"} | model,
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 1, "num_ranks": 2, "sharding": "fsdp"} | trainer,
    }


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (_tree({"num_ranks": 4, "context_parallel": 3}), "3 ranks for each row do not divide trainer.num_ranks 4"),
        (
            _tree({"context_parallel": 2, "teacher": {"path": "t"}, "teacher_server": {"url": "http://h:1"}}),
            "context_parallel: not with trainer.teacher_server",
        ),
        (
            _tree({"tensor_parallel": 2, "context_parallel": 2, "num_ranks": 4}),
            "tensor_parallel: not with trainer.c",
        ),
        (_tree({"expert_parallel": 2, "sharding": "none"}), "trainer.expert_parallel: needs trainer.sharding: fsdp"),
        (_tree({"expert_parallel": 3}), "expert_parallel: 3 ranks do not divide trainer.num_ranks 2"),
        (_tree({"tensor_parallel": 2}, compile=True), "trainer.tensor_parallel: not with model.compile"),
        (_tree({"router_replay": True}, compile=True), "trainer.router_replay: not with model.compile"),
        (_tree({"tensor_parallel": 2}, lora={"dropout": 0.1}), "trainer.tensor_parallel: not with dropout"),
        (_tree({}, lora={}, quantization={"type": "nf4"}), "fsdp can't spread the blocks of model.quantization"),
    ],
)
def test_what_can_not_be_spread_is_refused_by_key(tree: dict[str, Any], problem: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=problem):
        check_tree(tree)
