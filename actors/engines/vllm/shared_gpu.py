"""Memory of a vLLM server on GPUs that the trainer uses too.

By default vLLM takes a share of the whole GPU, and fails if less is free. Here it gets what the trainer leaves: room
for the cache is computed, and given to vLLM as a number of bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from actors.process.devices import visible_gpus
from schemas.config import RunConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError

log = structlog.get_logger("engine")

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""Memory of a process's CUDA context, libraries included (torch 2.11, H100)."""
WORK_BYTES = 1024 * MIB
"""Memory of vLLM besides weights and cache: activations of a step, CUDA graphs, scratch memory."""
USABLE = 0.95
"""Share of a GPU that both may take together: the rest is for what no estimate knows, e.g. torn pools of memory."""
LEAST_CACHE_BYTES = 256 * MIB
"""A smaller cache holds a few sequences at most, and every step waits for them."""


@dataclass(frozen=True)
class GpuUse:
    """Memory of one GPU in bytes: in all, and taken by other processes now."""

    total: int
    taken: int


@dataclass(frozen=True)
class ServerMemory:
    """Limits for vLLM's command line."""

    cache_bytes: int
    """Value of --kv-cache-memory-bytes, for each GPU."""
    utilization: float
    """Value of --gpu-memory-utilization: vLLM refuses to start if less than this share of the GPU is free."""


def server_memory(
    gpus: Sequence[GpuUse],
    trainer_bytes: int,
    weight_bytes: int,
    utilization: float,
    resting_bytes: int | None = None,
) -> ServerMemory:
    """Return the memory for a server on GPUs that are shared with the trainer.

    Args:
        gpus: the server's GPUs.
        trainer_bytes: estimate of the trainer's memory in a step, which the trainer may take later than now, e.g. for
            the state of the optimizer in the first step.
        weight_bytes: bytes of the served weights on all GPUs together, and of what the actor receives.
        utilization: largest share of a GPU for the server, `gpu_memory_utilization`.
        resting_bytes: estimate of the trainer's memory between two steps, if the server has its cache only then
            (`up.colocate: turns`). None: the server has its cache at all times.

    Raises:
        ConfigError: no room is left for a cache; with what takes the memory.
    """
    own = weight_bytes // len(gpus) + WORK_BYTES + CONTEXT_BYTES
    beside = trainer_bytes if resting_bytes is None else resting_bytes
    budget = min(
        min(gpu.total * utilization, gpu.total * USABLE - max(gpu.taken, beside + CONTEXT_BYTES)) for gpu in gpus
    )
    cache = int(budget) - own
    # in turns a step needs the room that is left beside a server without a cache
    fits = all(gpu.total * USABLE >= trainer_bytes + CONTEXT_BYTES + own for gpu in gpus)
    if cache < LEAST_CACHE_BYTES or not fits:
        smallest = min(gpu.total for gpu in gpus)
        raise ConfigError(
            f"up.colocate: a GPU of {smallest / 1e9:.1f} GB has no room for vLLM's cache beside the trainer "
            f"({trainer_bytes / 1e9:.1f} GB) and the served weights ({weight_bytes / len(gpus) / 1e9:.1f} GB), with "
            f"inference.engine.gpu_memory_utilization {utilization}; raise it, set model.gradient_checkpointing, lower "
            "packer.sequence_len, or give the engine a GPU of its own (up.devices)"
        )
    return ServerMemory(cache, round(min((cache + own) / gpu.total for gpu in gpus), 4))


def beside_trainer(config: RunConfig, engine: VllmEngineConfig) -> ServerMemory | None:
    """Return the memory of this actor's server on GPUs that the trainer uses; None if the driver tells no memory.

    Raises:
        ConfigError: as `server_memory`.
    """
    from actors.models.memory import estimate, parameter_bytes  # imported here, since it imports torch

    gpus = [GpuUse(gpu.memory, gpu.memory_taken) for gpu in visible_gpus() or () if gpu.memory]
    if not gpus:
        log.warning(
            "the driver tells no memory, so vLLM takes its whole share of a GPU that the trainer uses too; if it finds "
            "too little free, lower inference.engine.gpu_memory_utilization",
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )
        return None
    memory, served = estimate(config), parameter_bytes(config.model)
    if memory.engine_received:
        # by the inference actor, a process of its own
        served += memory.engine_received + CONTEXT_BYTES
    resting = memory.resting_trainer if config.up.colocate == "turns" else None
    return server_memory(gpus, memory.trainer, served, engine.gpu_memory_utilization, resting)
