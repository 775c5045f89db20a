"""Phase `profile`: one training step of Qwen3-0.6B under torch's profiler, its time by kind of kernel.

On a GPU the kernels are counted; on a CPU, torch's operators in their place. `head` is the output layer with all of
its kernels, which also count in their own kinds.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from actors.learner.learner import TorchLearner
from actors.models import token_logprobs
from benchmarks.gpu.phases import Report
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.trainer import lengths_of, sequence_len
from benchmarks.trainer_cases import step_batch

GROUPS: Sequence[tuple[str, str]] = (
    ("attention", r"flash|fmha|flex|attention|sdpa|varlen"),
    ("gemm", r"gemm|cutlass|nvjet|cublas|xmma|\baten::(mm|bmm|addmm|linear|matmul|baddbmm)\b|splitk"),
    ("optimizer", r"adam|multi_tensor|foreach|lamb|lpnorm"),
    ("copies", r"memcpy|memset|copy|\baten::(to|_to_copy|fill|zero)|direct_copy|cat_?array|aten::cat"),
    ("gather and scatter", r"index|gather|scatter|embedding|select"),
    ("reductions", r"reduce|softmax|norm|sum|mean|amax|logsumexp|vecdot|linalg"),
    (
        "elementwise",
        r"elementwise|vectorized|triton_(poi|per|red)|pointwise|\baten::(mul|add|sub|div|exp|silu|neg|pow)",
    ),
)
"""Kinds of kernels, each with a pattern of the names; the first that fits counts."""
OTHER = "other"
HEAD = "output layer"
TOP = 15


def measure(setting: Setting, report: Report) -> None:
    """Profile a step of a LoRA and of a full training, on 4 samples of 4 096 tokens."""
    lengths, length = lengths_of("4 × 4k", setting), sequence_len(setting)
    for content, lora in (("lora", {"rank": 16}), ("full", None)):
        with report.case("steps", {"weights": content}) as found:
            setting.fresh()
            config = setting.config(setting.model(), length, {"dtype": "bfloat16", "lora": lora})
            learner = TorchLearner(config)
            batches = [step_batch(lengths, setting.shape.vocab_size, length, step) for step in range(1, 6)]
            for batch in batches[:2]:
                learner.step(batch)
            found["times"] = setting.timed(lambda learner=learner, batch=batches[2]: learner.step(batch), 3, 0)
            found |= _profiled(learner, batches[3], setting)
            found["waits"] = _waits(learner, batches[4], setting)


def _profiled(learner: TorchLearner, batch: Any, setting: Setting) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    setting.synchronize()
    with _labelled_head(), profile(activities=activities) as profiled:
        learner.step(batch)
        setting.synchronize()
    averages = profiled.key_averages()
    heads = [event for event in averages if event.key == HEAD]
    if setting.on_gpu:
        autograd: Any = torch.autograd
        on_gpu = [event for event in profiled.events() if event.device_type == autograd.DeviceType.CUDA]
        # a label of a part of the program has a span on the GPU too
        kernels = [event for event in on_gpu if not getattr(event, "is_user_annotation", False) and event.name != HEAD]
        named = [(event.name, event.time_range.elapsed_us()) for event in kernels]
        busy, whole = busy_and_whole((event.time_range.start, event.time_range.end) for event in kernels)
        head_us, launches = max(event.device_time_total for event in heads), len(kernels)
    else:
        named = [(event.key, event.self_cpu_time_total) for event in averages if event.key != HEAD]
        busy = whole = sum(time for _, time in named)
        head_us, launches = heads[0].cpu_time_total, sum(event.count for event in averages)
    top = Counter[str]()
    for name, time in named:
        top[name] += time
    return {
        "launches": launches,
        "busy_ms": busy / 1e3,
        "whole_ms": whole / 1e3,
        "idle_share": 1 - busy / whole,
        "head_ms": head_us / 1e3,
        "groups_ms": {name: time / 1e3 for name, time in grouped(named).items()},
        "top_ms": {name[:120]: time / 1e3 for name, time in top.most_common(TOP)},
    }


@contextmanager
def _labelled_head() -> Iterator[None]:
    """Give the forward pass of the output layer a name in the profile; under LoRA it computes the gradient too."""
    module: Any = token_logprobs
    computed = module.chunked_logprobs_and_entropy

    def labelled(*arguments: Any, **keys: Any) -> Any:
        with record_function(HEAD):
            return computed(*arguments, **keys)

    with mock.patch.object(token_logprobs, "chunked_logprobs_and_entropy", labelled):
        yield


def _waits(learner: TorchLearner, batch: Any, setting: Setting) -> dict[str, int]:
    """Return the places at which the program waits for the GPU in a step, with their numbers; none on a CPU."""
    if not setting.on_gpu:
        learner.step(batch)
        return {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message))
    return dict(places.most_common())


def group_of(name: str) -> str:
    """Return the kind of a kernel, or of one of torch's operators, by its name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def grouped(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the time of each kind of kernels, longest first."""
    times: Any = Counter()
    for name, time in kernels:
        times[group_of(name)] += time
    return dict(times.most_common())


def busy_and_whole(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the time in which at least one of the spans runs, and the time from the first start to the last end."""
    busy, end, ordered = 0.0, float("-inf"), sorted(spans)
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - ordered[0][0] if ordered else 0.0
