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
CHECK_BYTES = 256 * MIB
"""Memory for the checksums of weights that an actor receives on a GPU."""
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

    cache_bytes: int | None
    """Value of --kv-cache-memory-bytes, for each GPU; None: what its share leaves."""
    utilization: float
    """Value of --gpu-memory-utilization: vLLM refuses to start if less than this share of the GPU is free."""


def server_memory(
    gpus: Sequence[GpuUse],
    trainer_bytes: int,
    weight_bytes: int,
    utilization: float,
    resting_bytes: int | None = None,
    receiver: int = 0,
) -> ServerMemory:
    """Return the memory for a server on GPUs that are shared with the trainer.

    Args:
        gpus: the server's GPUs.
        trainer_bytes: estimate of the trainer's memory in a step, which the trainer may take later than now, e.g. for
            the state of the optimizer in the first step.
        weight_bytes: bytes of the served weights on all GPUs together.
        utilization: largest share of a GPU for the server, `gpu_memory_utilization`.
        resting_bytes: estimate of the trainer's memory between two steps, if the server has its cache only then
            (`up.colocate: turns`). None: the server has its cache at all times.
        receiver: bytes that the server's actor needs on the first GPU.

    Raises:
        ConfigError: no room is left for a cache; with what takes the memory.
    """
    own = weight_bytes // len(gpus) + WORK_BYTES + CONTEXT_BYTES
    beside = trainer_bytes if resting_bytes is None else resting_bytes
    extra = [receiver, *(0 for _ in gpus[1:])]
    room = [
        min(gpu.total * utilization, gpu.total * USABLE - max(gpu.taken, beside + CONTEXT_BYTES) - more)
        for gpu, more in zip(gpus, extra, strict=True)
    ]
    cache = int(min(room)) - own
    # in turns a step needs the room that is left beside a server without a cache
    fits = all(
        gpu.total * USABLE >= trainer_bytes + CONTEXT_BYTES + own + more for gpu, more in zip(gpus, extra, strict=True)
    )
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
    memory = estimate(config)
    # a base that the trainer holds is in the trainer's part
    served = 0 if config.up.share_base else parameter_bytes(config.model)
    resting = memory.resting_trainer if config.up.colocate == "turns" else None
    receiving = receiver_bytes(memory.engine_received, len(gpus))
    return server_memory(gpus, memory.trainer, served, engine.gpu_memory_utilization, resting, receiving)


def beside_receiver(config: RunConfig, engine: VllmEngineConfig) -> ServerMemory | None:
    """Return the memory of a server on GPUs of its own, where its actor receives weights (`weights.channel: device`).

    None: the server has the GPUs to itself, or the driver tells no memory.
    """
    gpus = [gpu.memory for gpu in visible_gpus() or () if gpu.memory]
    if config.weights.channel != "device" or not gpus:
        return None
    from actors.models.memory import estimate  # imported here, since it imports torch

    received = estimate(config).engine_received
    # vLLM takes one share of each of its GPUs, and the actor is on the first one
    share = receiver_bytes(received, engine.num_gpus) / gpus[0]
    return ServerMemory(None, round(min(engine.gpu_memory_utilization, USABLE - share), 4))


def receiver_bytes(received_bytes: int, num_workers: int) -> int:
    """Return the memory of a server's first GPU that its actor needs, and workers of other GPUs that map from there."""
    return received_bytes + num_workers * CONTEXT_BYTES + CHECK_BYTES if received_bytes else 0
