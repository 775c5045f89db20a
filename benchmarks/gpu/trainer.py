"""Phase `trainer`: training steps of Qwen3-0.6B with random weights, one row of 16 384 tokens each.

Tokens per second are of the row (a shared prompt once) and of the samples (each with its prompt). The MFU counts the
operations of `Shape.flops` against the data sheet. `host_ms` is the time of the program: a step waits for the device
at its end, so `gpu_ms`, which the learner itself measures, shows a device that waits for the program.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from actors.learner.learner import TorchLearner
from actors.models.attention import implementation
from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import peak_flops
from benchmarks.trainer_cases import Lengths, Shape, row_tokens, sample_tokens, step_batch
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

ROW = 16_384
TOY = 128
"""Factor by which a rehearsal's lengths are shorter."""
SAMPLES: Mapping[str, Lengths] = {
    "4 × 4k": [(512, [3_584])] * 4,
    "1 × 16k": [(512, [15_872])],
    "8 × 2k": [(256, [1_792])] * 8,
    "16 × (512 + 512)": [(512, [512] * 16)],
}
"""Lengths by name, most telling first; each fills a row."""


@dataclass(frozen=True)
class Variant:
    """Kind of training."""

    name: str
    lora: bool = True
    attention: str = "auto"
    compile: bool = False
    checkpointing: bool = False
    liger: bool = False
    samples: tuple[str, ...] = tuple(SAMPLES)


FIRST = ("4 × 4k", "1 × 16k")
VARIANTS = (
    Variant("LoRA"),
    Variant("full", lora=False),
    Variant("LoRA compiled", compile=True),
    Variant("LoRA flex", attention="flex", samples=FIRST),
    Variant("full compiled", lora=False, compile=True, samples=FIRST),
    Variant("LoRA padded", attention="padded", samples=FIRST),
    Variant("LoRA flex compiled", attention="flex", compile=True, samples=FIRST),
    Variant("LoRA checkpointing", checkpointing=True, samples=FIRST),
    Variant("LoRA flash", attention="flash", samples=FIRST),
    # last: the package replaces functions of transformers for the rest of the process
    Variant("LoRA Liger", liger=True, samples=FIRST),
)
# compiling takes half a minute on a CPU, so one variant is compiled, for rows of one kind
REHEARSED = (
    *(variant for variant in VARIANTS if not variant.compile),
    Variant("full compiled", lora=False, compile=True, samples=FIRST[:1]),
)


def measure(setting: Setting, report: Report) -> None:
    """Measure all variants, the most telling first: the limit of the phase may cut off the rest."""
    for variant in setting.size(VARIANTS, REHEARSED):
        learner: list[TorchLearner] = []
        labels = {"variant": variant.name}
        with report.case("variants", labels | asdict(variant)) as found:
            learner.append(_learner(variant, setting))
            model: Any = learner[0].model
            found["attention_in_use"] = model.config._attn_implementation
        for name in variant.samples if learner else ():
            lengths = lengths_of(name, setting)
            with report.case("steps", labels | {"samples": name}) as found:
                found |= _steps(learner[0], variant, lengths, setting)
        learner.clear()
        setting.fresh()


def lengths_of(name: str, setting: Setting) -> Lengths:
    """Return the lengths of SAMPLES, or shorter ones in a rehearsal."""
    if not setting.tiny:
        return SAMPLES[name]
    return [(prompt // TOY, [size // TOY for size in sizes]) for prompt, sizes in SAMPLES[name]]


def sequence_len(setting: Setting) -> int:
    """Return the tokens of a row."""
    return setting.size(ROW, ROW // TOY)


def _learner(variant: Variant, setting: Setting) -> TorchLearner:
    if variant.liger:
        _use_liger(setting)
    torch._dynamo.reset()  # the variants before count against the limit of compilations
    keys = {
        "dtype": "bfloat16",
        "lora": {"rank": 16} if variant.lora else None,
        "attention": variant.attention,
        "compile": variant.compile,
        "gradient_checkpointing": variant.checkpointing,
    }
    if words := _why_not(variant, setting):
        raise NotHereError(words)
    return TorchLearner(setting.config(setting.model(), sequence_len(setting), keys))


def _why_not(variant: Variant, setting: Setting) -> str:
    """Return why this machine can't train a variant; empty if it can."""
    try:
        implementation(ModelConfig.model_validate({"path": "none", "attention": variant.attention}), setting.device)
    except ConfigError as error:
        return str(error)
    if variant.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler (CXX)"
    return ""


def _use_liger(setting: Setting) -> None:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    except ImportError as error:
        raise NotHereError("liger-kernel is not installed") from error
    if not setting.on_gpu:
        raise NotHereError("the kernels of liger-kernel are for GPUs")
    apply_liger_kernel_to_qwen3(cross_entropy=False, fused_linear_cross_entropy=False)


def _steps(learner: TorchLearner, variant: Variant, lengths: Lengths, setting: Setting) -> dict[str, Any]:
    step, length = 0, sequence_len(setting)
    batch = step_batch(lengths, setting.shape.vocab_size, length, 1)
    assert len(batch.micro_batch_offsets) == 2, "one row"
    seconds = []

    def train() -> None:
        nonlocal step
        step += 1
        values = learner.step(batch.model_copy(update={"step": step}))
        seconds.append(values["seconds_forward_backward"] + values["seconds_optimizer"])

    with _uncapped():
        train()  # compiles
        setting.fresh()
        times = setting.timed(train, calls=setting.size(5, 2), warmup=setting.size(2, 1))
    peak = peak_flops(torch.cuda.get_device_name()) if setting.on_gpu else None
    return times | {
        "gpu_ms": 1e3 * sorted(seconds[-5:])[len(seconds[-5:]) // 2],
        **rates(setting.shape, lengths, variant.lora, times["ms"] / 1e3, peak),
        "peak_bytes": setting.peak_bytes(),
    }


def _uncapped() -> AbstractContextManager[None]:
    """Return a context in which a kernel that is compiled too often raises, instead of materialising all scores."""
    from torch._dynamo import config

    capped: AbstractContextManager[None] = config.patch(fail_on_recompile_limit_hit=True)
    return capped


def rates(shape: Shape, lengths: Lengths, lora: bool, seconds: float, peak: float | None) -> dict[str, Any]:
    """Return tokens per second and MFU of a step.

    Args:
        shape: shape of the model.
        lengths: lengths of the groups, each in a single row.
        lora: True if only an adapter is trained.
        seconds: time of the step.
        peak: operations per second of the device by its data sheet; None if unknown.
    """
    flops = shape.flops(lengths, lora)
    return {
        "row_tokens_per_second": row_tokens(lengths) / seconds,
        "sample_tokens_per_second": sample_tokens(lengths) / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": None if peak is None else flops / seconds / peak,
    }
