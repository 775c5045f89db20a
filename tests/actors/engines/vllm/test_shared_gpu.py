"""A server on the trainer's GPU gets what the trainer leaves."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.engines.vllm.process import command
from actors.engines.vllm.shared_gpu import (
    CHECK_BYTES,
    CONTEXT_BYTES,
    WORK_BYTES,
    GpuUse,
    ServerMemory,
    beside_receiver,
    receiver_bytes,
    server_memory,
)
from schemas.config.model import ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError
from tests.actors.learner.steps import run_config

GB = 10**9
OWN = WORK_BYTES + CONTEXT_BYTES


def test_the_cache_is_what_trainer_weights_and_the_servers_own_work_leave() -> None:
    """80 GB, of which 95 %: 20 for the trainer, 2 for the served weights, and what a process needs besides."""
    memory = server_memory([GpuUse(80 * GB, 5 * GB)], 20 * GB, 2 * GB, 0.9)
    assert memory.cache_bytes == 76 * GB - (20 * GB + CONTEXT_BYTES) - (2 * GB + OWN)
    # vLLM refuses to start if this share of the GPU is not free; it never asks for more than the trainer leaves
    assert memory.utilization * 80 * GB == pytest.approx(memory.cache_bytes + 2 * GB + OWN, rel=1e-3)
    assert memory.utilization * 80 * GB + 20 * GB + CONTEXT_BYTES <= 76 * GB * 1.001


def test_the_server_takes_no_more_than_its_share() -> None:
    """As in TRL and vLLM: 0.3 of 80 GB, however much is left."""
    memory = server_memory([GpuUse(80 * GB, 0)], 20 * GB, 2 * GB, 0.3)
    assert memory == ServerMemory(24 * GB - 2 * GB - OWN, 0.3)


def test_a_trainer_that_takes_more_than_was_estimated_is_believed() -> None:
    """The driver's number counts where it is larger."""
    estimated, measured = (server_memory([GpuUse(80 * GB, taken * GB)], 20 * GB, GB, 0.9) for taken in (1, 40))
    assert estimated.cache_bytes - measured.cache_bytes == 20 * GB - CONTEXT_BYTES


def test_of_several_gpus_the_fullest_counts_and_weights_are_spread() -> None:
    """A model over two GPUs has half of its weights on each, and a cache of one size on all."""
    one = server_memory([GpuUse(80 * GB, 30 * GB)], GB, 4 * GB, 0.9)
    two = server_memory([GpuUse(80 * GB, 30 * GB), GpuUse(80 * GB, 0)], GB, 8 * GB, 0.9)
    assert one == two


def test_weights_that_the_actor_receives_are_on_the_first_gpu() -> None:
    """3 GB of weights, a context of the actor, and of each further worker that maps from there."""
    gpus = [GpuUse(80 * GB, 0), GpuUse(80 * GB, 0)]
    receiver = receiver_bytes(3 * GB, len(gpus))
    assert receiver == 3 * GB + 2 * CONTEXT_BYTES + CHECK_BYTES
    without = server_memory(gpus, 20 * GB, 2 * GB, 0.9)
    assert server_memory(gpus, 20 * GB, 2 * GB, 0.9, receiver=receiver).cache_bytes == without.cache_bytes - receiver
    fuller = [GpuUse(80 * GB, 0), GpuUse(80 * GB, 40 * GB)]
    assert server_memory(fuller, GB, GB, 0.9, receiver=receiver) == server_memory(fuller, GB, GB, 0.9)
    assert receiver_bytes(0, 4) == 0


def test_a_server_with_a_gpu_of_its_own_leaves_room_for_what_its_actor_receives(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small GPU, of which the context of the actor is a large part; with files vLLM has its whole share."""
    config = run_config(model_folder())
    engine = VllmEngineConfig()
    gpu = SimpleNamespace(memory=8 * GB, memory_taken=0)
    monkeypatch.setattr("actors.engines.vllm.shared_gpu.visible_gpus", lambda: [gpu])
    assert beside_receiver(config, engine) is None
    weights = config.weights.model_copy(update={"channel": "device"})
    memory = beside_receiver(config.model_copy(update={"weights": weights}), engine)
    assert memory is not None
    words = " ".join(command(config.model, engine, on_cpu=False, port=1, memory=memory))
    assert "--kv-cache-memory-bytes" not in words
    assert f"--gpu-memory-utilization {memory.utilization}" in words
    assert 0.82 < memory.utilization < 0.95 - (CONTEXT_BYTES + CHECK_BYTES) / (8 * GB)


def test_in_turns_the_cache_has_the_room_of_a_step() -> None:
    """40 of the trainer's 60 GB are those of a step, and are free in the server's turn; the step must fit too."""
    gpus, weights = [GpuUse(80 * GB, 5 * GB)], 2 * GB
    beside = server_memory(gpus, 60 * GB, weights, 0.9)
    turns = server_memory(gpus, 60 * GB, weights, 0.9, resting_bytes=20 * GB)
    assert turns.cache_bytes - beside.cache_bytes == 40 * GB
    with pytest.raises(ConfigError, match="beside the trainer"):
        server_memory(gpus, 75 * GB, weights, 0.9, resting_bytes=20 * GB)


def test_no_room_for_a_cache_is_an_error_with_what_takes_it() -> None:
    """Before vLLM loads anything."""
    words = (
        "up.colocate: a GPU of 24.0 GB has no room for vLLM's cache beside the trainer (20.0 GB) and the served "
        "weights (2.0 GB), with inference.engine.gpu_memory_utilization 0.9"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        server_memory([GpuUse(24 * GB, 0)], 20 * GB, 2 * GB, 0.9)


def test_the_command_line_has_the_limits_on_a_shared_gpu_alone() -> None:
    """Elsewhere vLLM measures for itself."""
    model, engine = ModelConfig(path="org/model"), VllmEngineConfig(gpu_memory_utilization=0.8)
    shared = " ".join(command(model, engine, on_cpu=False, port=1, memory=ServerMemory(123, 0.25)))
    assert "--gpu-memory-utilization 0.25" in shared
    assert "--kv-cache-memory-bytes 123" in shared
    alone = " ".join(command(model, engine, on_cpu=False, port=1))
    assert "--gpu-memory-utilization 0.8" in alone
    assert "--kv-cache-memory-bytes" not in alone
