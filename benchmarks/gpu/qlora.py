"""Phase `qlora`: bitsandbytes on this device: NF4 against the weights that it stands for, and AdamW in 8 bits."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.learner.learner import TorchLearner
from actors.models import loading
from benchmarks.gpu.learner import step_with_gradients, token_logprobs
from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting, relative_error
from benchmarks.gpu.trainer import lengths_of, rates, sequence_len
from benchmarks.machine import peak_flops
from benchmarks.trainer_cases import Shape, mixed_lengths, step_batch
from schemas.config.model import ModelConfig
from schemas.messages import StepBatch

SMALL = Shape(8_000, 256, 512, 4, 8, 4, 64)
ROW = 2_048
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
NF4 = {"lora": {}, "quantization": {"type": "nf4"}}


def measure(setting: Setting, report: Report) -> None:
    """Compare NF4 in both precisions, AdamW in 8 bits before and after a restore, single rows; then measure speed."""
    missing = [name for name in ("accelerate", "bitsandbytes") if find_spec(name) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} not installed")
    shape = setting.size(SMALL, setting.shape)
    model, lengths = setting.model(shape, 1.0), setting.size(mixed_lengths(4, 4, 512), mixed_lengths(2, 3, 48))
    batches = [step_batch(lengths, shape.vocab_size, ROW, step) for step in (1, 2, 3)]
    for dtype in ("float32", "bfloat16"):
        with report.case("nf4", {"dtype": dtype}) as found:
            found |= _nf4(dtype, model, batches, setting)
    for weights, keys in (("full", {"lora": None}), ("lora", {"lora": {}}), ("lora on nf4", NF4)):
        with report.case("adamw_8bit", {"weights": weights}) as found:
            found |= _adamw_8bit(keys, model, batches, setting)
    with report.case("single rows", {}) as found:
        found |= _single_rows(model, setting)
    with report.case("steps", {"samples": "4 × 4k"}) as found:
        found |= _steps(setting)


def _learner(setting: Setting, model: Path, keys: dict[str, Any], **trainer: Any) -> TorchLearner:
    return TorchLearner(setting.config(model, ROW, keys, max_grad_norm=1e9, learning_rate=1e-4, **trainer))


def _nf4(dtype: str, model: Path, batches: list[StepBatch], setting: Setting) -> dict[str, Any]:
    """Return the differences from a learner whose base model has the dequantised weights."""
    quantised = _learner(setting, model, NF4 | {"dtype": dtype})
    quantised.step(batches[0])
    with tempfile.TemporaryDirectory() as name:
        saved, plain = Path(name) / "saved", Path(name) / "plain"
        saved.mkdir()
        quantised.snapshot().write(saved)
        _write_dequantised(quantised.model, model, plain, setting)
        exact = _learner(setting, plain, {"lora": {}, "dtype": dtype})
        exact.restore(saved)
    expected, logprobs = (token_logprobs(learner, batches[1], dtype) for learner in (exact, quantised))
    (values, gradients), (other, others) = (step_with_gradients(learner, batches[1]) for learner in (quantised, exact))
    found = torch.cat([gradients[name].flatten() for name in others])
    error = relative_error(found, torch.cat([gradient.flatten() for gradient in others.values()]))
    difference = float(abs(logprobs - expected).mean())
    return {
        "logprobs_mean": difference,
        "loss": abs(values["loss"] - other["loss"]),
        "gradients": error,
        "ok": error < TOLERANCE[dtype] and difference < TOLERANCE[dtype],
    }


def _write_dequantised(quantised: nn.Module, model: Path, folder: Path, setting: Setting) -> None:
    from bitsandbytes.functional import dequantize_4bit

    plain: Any = loading.load_model(setting.config(model, ROW, {"dtype": "float32"}).model, torch.float32)
    for name, layer in _linear_4bit(quantised):
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain.get_submodule(name).weight.data.copy_(weight)
    plain.save_pretrained(folder)
    for text, content in loading.tokenizer_files(ModelConfig(path=str(model))).items():
        (folder / text).write_bytes(content)


def _linear_4bit(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the quantised layers by the names that they have in the base model."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            yield name.removeprefix(loading.PEFT_PREFIX).removesuffix(".base_layer"), module


def _adamw_8bit(keys: dict[str, Any], model: Path, batches: list[StepBatch], setting: Setting) -> dict[str, Any]:
    """Return whether a restored learner takes the same step: the state is saved without loss."""
    keys = {"dtype": "bfloat16"} | keys
    learner, other = (_learner(setting, model, keys, optimizer={"type": "adamw_8bit"}) for _ in range(2))
    for batch in batches[:2]:
        learner.step(batch)
    with tempfile.TemporaryDirectory() as name:
        learner.snapshot().write(Path(name))
        other.restore(Path(name))
    losses = [each.step(batches[2])["loss"] for each in (learner, other)]
    pairs = zip(learner.trained.parameters(), other.trained.parameters(), strict=True)
    errors = [relative_error(one, two) for one, two in pairs if one.requires_grad]
    return {"loss": abs(losses[0] - losses[1]), "difference": max(errors), "ok": max(errors) < 1e-3}


def _single_rows(model: Path, setting: Setting) -> dict[str, Any]:
    """Return by how much a layer computes a row otherwise alone than among two rows."""
    learner = _learner(setting, model, NF4 | {"dtype": "bfloat16"})
    errors = []
    with torch.no_grad():
        for _, layer in _linear_4bit(learner.model):
            x = setting.randn(2, layer.in_features)
            errors.append(relative_error(layer(x[:1]), layer(x)[:1]))
    return {"largest_difference": max(errors)}


def _steps(setting: Setting) -> dict[str, Any]:
    lengths, length, step = lengths_of("4 × 4k", setting), sequence_len(setting), 0
    keys = NF4 | {"dtype": "bfloat16"}
    learner = TorchLearner(setting.config(setting.model(), length, keys))
    batch = step_batch(lengths, setting.shape.vocab_size, length, 1)

    def train() -> None:
        nonlocal step
        step += 1
        learner.step(batch.model_copy(update={"step": step}))

    setting.fresh()
    times = setting.timed(train, setting.size(5, 2))
    peak = peak_flops(torch.cuda.get_device_name()) if setting.on_gpu else None
    speed = rates(setting.shape, lengths, True, times["ms"] / 1e3, peak)
    return times | speed | {"peak_bytes": setting.peak_bytes()}
