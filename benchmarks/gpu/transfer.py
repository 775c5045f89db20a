"""Phase `weights`: the parts of a weight update, memory shared by two processes on one GPU, and calls of NCCL.

The bandwidth of NCCL between GPUs can't be measured with one GPU: only the calls are tried. `peers` has the code of the
other processes.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.learner import formats
from actors.models import loading
from benchmarks import weights
from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import ROOT
from benchmarks.trainer_cases import worker
from bus.weights.buckets import pack
from schemas.config.model import ModelConfig
from schemas.config.services import WeightsConfig

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
GROUP_SECONDS = 60.0


def measure(setting: Setting, report: Report) -> None:
    """Measure the parts, whole updates by channel, then shared memory and groups of processes."""
    with report.case("parts", {}) as found:
        found |= _parts(setting)
    setting.fresh()
    for pool in ("", "expandable_segments:True")[: 2 if setting.on_gpu else 1]:
        with report.case("shared memory", {"pool": pool or "default"}) as found:
            found |= _shared(pool, setting)
    for backend, size in (("gloo", 2), ("nccl", 1), ("nccl", 2)):
        with report.case("groups", {"backend": backend, "processes": size}) as found:
            found |= _group(backend, size, setting)
    for content in setting.size(("adapter", "full"), ("full",)):
        with report.case("updates", {"content": content}) as found:
            found["channels"] = _updates(content, setting)


def _model(setting: Setting, content: str) -> ModelConfig:
    lora = {} if content == "adapter" else None
    keys = {"path": str(setting.model()), "device": setting.device.type, "dtype": "bfloat16", "lora": lora}
    return ModelConfig.model_validate(keys)


def _parts(setting: Setting) -> dict[str, Any]:
    """Return milliseconds of gathering as the trainer does, of packing, and of copies into one pinned block."""
    config = _model(setting, "full")
    model = loading.load_model(config, torch.bfloat16)  # as the trainer holds it, beside float32 masters
    gathered = formats.weights(model, config)
    tensors = list(loading.full_tensors(model).values())
    block = torch.empty(sum(x.numel() for x in tensors), dtype=torch.bfloat16, pin_memory=setting.on_gpu)
    places = block.split([x.numel() for x in tensors])

    def copy_pinned() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.flatten(), non_blocking=True)
        setting.synchronize()

    return {
        "bytes": sum(tensor.nbytes for tensor in gathered.tensors.values()),
        "gather_ms": _milliseconds(lambda: formats.weights(model, config)),
        "pinned_ms": _milliseconds(copy_pinned),
        "pack_ms": _milliseconds(lambda: pack(gathered, WeightsConfig().bucket_bytes)),
        "pack_large_buckets_ms": _milliseconds(lambda: pack(gathered, 256 << 20)),
    }


def _milliseconds(work: Callable[[], object]) -> float:
    """Return the least milliseconds of three calls."""
    return 1e3 * min(weights.timed(work) for _ in range(3))


def _updates(content: str, setting: Setting) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="weights-", dir=setting.folder) as folder,
        tempfile.TemporaryDirectory(prefix="weights-", dir="/dev/shm") as memory,
    ):
        rounds, warmup = setting.size((3, 1), (1, 0))
        return weights.measure_model(content, _model(setting, content), Path(folder), Path(memory), rounds, warmup)


# --- other processes -------------------------------------------------------------------------------------------------


def _peer(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "benchmarks.gpu.peers", *arguments]


def _shared(pool: str, setting: Setting) -> dict[str, Any]:
    """Return bytes per second out of another process's memory, and the result of reading after that process's death."""
    environment = {**os.environ, ALLOCATOR: pool}
    size = setting.size(1 << 30, 1 << 20)
    with (
        worker(_peer("producer", setting.device, size), environment) as producer,
        worker(_peer("consumer", setting.device, size), environment) as consumer,
    ):
        made = _answer(producer.step())
        opened = _answer(consumer.step(json.dumps({"handle": made["handle"]})))
        changed = _answer(producer.step())
        seen = _answer(consumer.step(json.dumps({"handle": None})))
        producer.kill()
        try:
            after: dict[str, Any] = consumer.step(json.dumps({"handle": None}))
        except RuntimeError as error:  # the consumer has ended
            after = {"ended": str(error)[:300]}
    return {
        "bytes": size,
        "open_ms": opened["open_ms"],
        "gigabytes_per_second": seen["gigabytes_per_second"],
        "ok": opened["checksum"] == made["checksum"] and seen["checksum"] == changed["checksum"],
        "after_the_producers_death": {key: value for key, value in after.items() if key != "open_ms"},
    }


def _answer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an answer; raise the error that it has instead."""
    if "error" in values:
        raise RuntimeError(values["error"])
    return values


def _group(backend: str, size: int, setting: Setting) -> dict[str, Any]:
    """Return the answers of the processes of a group on this one device.

    Two processes with NCCL on one GPU are expected to be refused; `ok` is then that they say so.
    """
    if backend == "nccl" and not setting.on_gpu:
        raise NotHereError("NCCL is for GPUs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_bytes = setting.size(256 << 20, 1 << 20)
    device = setting.device if backend == "nccl" else "cpu"
    peers = [
        subprocess.Popen(
            [str(word) for word in _peer("group", device, num_bytes, backend, rank, size, port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(size)
    ]
    deadline, said = time.monotonic() + GROUP_SECONDS, []
    for peer in peers:
        try:
            out, _ = peer.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            peer.kill()
            out, _ = peer.communicate()
            out += f"\nnot done within {GROUP_SECONDS:g} s"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said.append(json.loads(lines[-1]) if lines else {"error": out[-1_000:]})
    refused = any("error" in one for one in said)
    return {"answers": said, "ok": refused if (backend, size) == ("nccl", 2) else not refused}
