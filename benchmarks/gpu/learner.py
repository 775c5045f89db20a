"""Phase `learner`: whole training steps, compared with the CPU in float32; equal bits; memory by vocabulary.

A learner on the CPU takes a step and saves. It and each variant on the device restore this state, and compute logprobs
and the next step of the same batch. The batch has the CPU's own logprobs as the engine's, so ratios are near 1.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch, non_empty
from actors.models.attention import implementation
from actors.models.loading import TORCH_DTYPES
from actors.models.token_logprobs import TokenLogprobs
from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting, relative_error
from benchmarks.gradients import captured_gradients
from benchmarks.machine import ROOT
from benchmarks.trainer_cases import Lengths, Shape, mixed_lengths, step_batch
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch

SMALL = Shape(8_000, 256, 512, 4, 8, 4, 64)
ROW, LOGIT_STD = 2_048, 1.0
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Allowed ‖error‖ / ‖exact‖ of all gradients together. Logprobs: the same number of nats at most."""
CONTENTS: Mapping[str, dict[str, Any] | None] = {"full": None, "lora": {}}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32 padded": {"dtype": "float32", "attention": "padded"},
    "float32 checkpointing": {"dtype": "float32", "gradient_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 padded": {"dtype": "bfloat16", "attention": "padded"},
    "bfloat16 flex": {"dtype": "bfloat16", "attention": "flex"},
    "bfloat16 flash": {"dtype": "bfloat16", "attention": "flash"},
    "bfloat16 checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "bfloat16 compiled": {"dtype": "bfloat16", "compile": True},
}


def measure(setting: Setting, report: Report) -> None:
    """Compare steps of all variants, then bits, then memory."""
    shape = setting.size(SMALL, setting.shape)
    lengths = setting.size(mixed_lengths(4, 4, 512), mixed_lengths(2, 3, 48))
    for content, lora in CONTENTS.items():
        with tempfile.TemporaryDirectory() as name:
            _compare(content, lora, shape, lengths, setting, report, Path(name))
    for deterministic in setting.size((False, True), (True,)):
        with report.case("bits", {"deterministic": deterministic}) as found:
            found |= _bits_apart(deterministic, shape, setting)
    for vocabulary in setting.size((8_000, 32_000, 151_936), (320, 640)):
        for content, lora in CONTENTS.items():
            with report.case("memory", {"vocabulary": vocabulary, "weights": content}) as found:
                found |= _memory(vocabulary, lora, setting)


# --- a step, compared ------------------------------------------------------------------------------------------------


def _compare(
    content: str,
    lora: dict[str, Any] | None,
    shape: Shape,
    lengths: Lengths,
    setting: Setting,
    report: Report,
    folder: Path,
) -> None:
    cpu, model = setting.with_device("cpu"), setting.model(shape, LOGIT_STD)
    random = [step_batch(lengths, shape.vocab_size, ROW, step) for step in (1, 2)]

    def learner_of(where: Setting, keys: Mapping[str, Any]) -> TorchLearner:
        return TorchLearner(
            where.config(model, ROW, {"lora": lora} | dict(keys), max_grad_norm=1e9, learning_rate=1e-4)
        )

    exact = learner_of(cpu, VARIANTS["float32"])
    exact.step(with_logprobs(random[0], token_logprobs(exact, random[0], "float32")))
    (folder / "saved").mkdir()
    exact.snapshot().write(folder / "saved")
    expected = token_logprobs(exact, random[1], "float32")
    batch = with_logprobs(random[1], expected)
    values, gradients = step_with_gradients(exact, batch)
    for name, keys in VARIANTS.items():
        with report.case("steps", {"weights": content, "variant": name}) as found:
            _check_here(keys, setting)
            setting.fresh()
            learner = learner_of(setting, keys)
            learner.restore(folder / "saved")
            logprobs = token_logprobs(learner, batch, keys["dtype"])
            measured, found_gradients = step_with_gradients(learner, batch)
            loaded: Any = learner.model
            found["attention"] = loaded.config._attn_implementation
            found["logprobs_mean"] = float(np.abs(logprobs - expected).mean())
            found["logprobs_max"] = float(np.abs(logprobs - expected).max())
            found["loss"] = abs(measured["loss"] - values["loss"])
            found["grad_norm"] = abs(measured["grad_norm"] / values["grad_norm"] - 1)
            found["gradients"] = relative_error(*(_joined(each, gradients) for each in (found_gradients, gradients)))
            tolerance = TOLERANCE[keys["dtype"]]
            found["ok"] = found["gradients"] < tolerance and found["logprobs_mean"] < tolerance


def _check_here(keys: Mapping[str, Any], setting: Setting) -> None:
    """Raise NotHereError if the device lacks the attention of a variant, or the rehearsal has no time for it."""
    if setting.tiny and keys.get("compile"):
        raise NotHereError("compiling takes most of a minute on a CPU; the phase trainer rehearses it")
    wanted = {"path": "none"} | {key: value for key, value in keys.items() if key in ("attention", "dtype")}
    try:
        implementation(ModelConfig.model_validate(wanted), setting.device)
    except ConfigError as error:
        raise NotHereError(str(error)) from error


def _joined(gradients: Mapping[str, Tensor], order: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in order])


def token_logprobs(learner: TorchLearner, batch: StepBatch, dtype: str) -> "np.ndarray[Any, Any]":
    """Return the logprobs of all completion tokens of a batch under the learner's model, in the order of the batch."""
    found, policy = [], TokenLogprobs(learner.model)
    device = next(learner.model.parameters()).device
    # a model beside float32 masters has 16-bit weights, and computes without autocast
    low = TORCH_DTYPES[dtype] is not torch.float32 and learner.trained is learner.model
    with torch.no_grad(), torch.autocast(device.type, TORCH_DTYPES[dtype]) if low else nullcontext():
        for number in non_empty(batch):
            micro = micro_batch(batch, number, device)
            logprobs_T, _ = policy.of(micro.row, micro.token_ids_T, micro.temperatures_T)
            found.append(logprobs_T.float().cpu().numpy())
    return np.concatenate(found)


def with_logprobs(batch: StepBatch, logprobs: "np.ndarray[Any, Any]") -> StepBatch:
    """Return a batch with other logprobs of the engine, given for all completion tokens in order."""
    in_completion = np.ones(batch.token_ids.size, bool)
    for start, prompt in zip(batch.sample_offsets[:-1].tolist(), batch.prompt_lengths.tolist(), strict=True):
        in_completion[start : start + prompt] = False
    values = np.zeros(batch.token_ids.size, np.float32)
    values[in_completion] = logprobs
    return batch.model_copy(update={"logprobs": values})


def step_with_gradients(learner: TorchLearner, batch: StepBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Train a step; return its measurements, and the gradients that the optimizer was given, on the CPU."""
    with captured_gradients(learner) as gradients:
        values = learner.step(batch)
    return values, gradients


# --- equal bits ------------------------------------------------------------------------------------------------------


def _bits_apart(deterministic: bool, shape: Shape, setting: Setting) -> dict[str, Any]:
    """Return `bits` of a process of its own: cuBLAS reads its settings once, at the first product of a process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.learner",
        str(setting.device),
        str(setting.model(shape, LOGIT_STD)),
    ]
    command += [str(shape.vocab_size), str(setting.size(512, 48)), str(int(deterministic))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bits(setting: Setting, model: Path, vocab_size: int, longest: int, deterministic: bool) -> dict[str, Any]:
    """Return by kind of weights whether a step has the same bits again, and a step after saving and restoring.

    On a GPU without `trainer.deterministic` bits may differ; then `ok` is True in any case.
    """
    dtype = setting.size("bfloat16", "float32")
    found: dict[str, Any] = {"dtype": dtype, "ok": True}
    promised = deterministic or not setting.on_gpu
    batches = [step_batch(mixed_lengths(4, 4, longest), vocab_size, 4 * longest, step) for step in (1, 2)]
    for content, lora in CONTENTS.items():
        config = setting.config(
            model, 4 * longest, {"dtype": dtype, "lora": lora}, learning_rate=1e-4, deterministic=deterministic
        )
        try:
            one, other, third = (TorchLearner(config) for _ in range(3))
            for learner in (one, other):
                learner.step(batches[0])
            again = _same(one, other)
            with tempfile.TemporaryDirectory() as name:
                one.snapshot().write(Path(name))
                third.restore(Path(name))
            for learner in (one, third):
                learner.step(batches[1])
        except RuntimeError as error:  # an operation that has no deterministic algorithm
            found[content] = {"raised": f"{error}"[:500]}
            continue
        found[content] = {"again": again, "after_restore": _same(one, third)}
        found["ok"] = found["ok"] and (not promised or all(found[content].values()))
    return found


def _same(one: TorchLearner, other: TorchLearner) -> bool:
    both = zip(one.trained.parameters(), other.trained.parameters(), strict=True)
    return all(torch.equal(first, second) for first, second in both)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(vocabulary: int, lora: dict[str, Any] | None, setting: Setting) -> dict[str, Any]:
    """Return the peak of a step on the same tokens, with and without the weights."""
    shape = Shape(vocabulary, *setting.size((1_024, 3_072, 2, 16, 8, 128), (64, 128, 1, 4, 2, 16)))
    longest = setting.size(2_048, 48)
    setting.fresh()
    learner = TorchLearner(setting.config(setting.model(shape), longest, {"dtype": "bfloat16", "lora": lora}))
    models = {id(model): model for model in (learner.model, learner.trained)}
    weights = sum(parameter.nbytes for model in models.values() for parameter in model.parameters())
    for step in (1, 2):
        learner.step(step_batch([(8, [longest - 8])], vocabulary, longest, step))
    return {"tokens": longest, "weights_bytes": weights, "peak_bytes": setting.peak_bytes()}


if __name__ == "__main__":
    device, folder, vocabulary, longest, flag = sys.argv[1:]
    where = Setting(torch.device(device), device == "cpu", Path(folder).parent)
    print(json.dumps(bits(where, Path(folder), int(vocabulary), int(longest), flag == "1")))
