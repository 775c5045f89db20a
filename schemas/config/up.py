"""Keys of `up`: processes that `actors up` starts, and the GPUs of this machine that each of them gets."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free

GpuUser = Literal["trainer", "inference", "reward", "rollout", "packer"]
Devices = dict[GpuUser, list[list[int]]]
"""GPUs by kind of actor: a list per process, in the order of their names (trainer-0, trainer-1, …)."""


class UpConfig(Section):
    """Processes that `actors up` starts on this machine, their GPUs, and the limit of restarts."""

    rollout: Free[int] = Field(1, ge=1)
    """Number of rollout actors."""
    reward: Free[int] = Field(1, ge=0)
    """Number of reward actors. 0: they are started elsewhere, as by `GRPOTrainer` in the program that calls it."""
    inference: Free[int] = Field(1, ge=1)
    """Number of inference actors, one engine each."""
    devices: Free[Literal["auto"] | Devices] = "auto"
    """GPUs of each process, as indices of the GPUs on this machine (or of CUDA_VISIBLE_DEVICES, if that is set), e.g.
    `{trainer: [[0], [1]], inference: [[2, 3]]}`. `auto`: a GPU for each trainer rank, then for each engine as many as
    it spreads a model over. A process without GPUs in the plan sees none. `actors check` prints the plan."""
    colocate: Free[bool | Literal["turns"]] = False
    """Permission for trainer and engines to share GPUs if this machine has too few for a GPU each. `true`: an engine on
    the trainer's GPU starts after the trainer, works at the same time, and vLLM gets the memory that the trainer
    leaves. `turns`: they work in turns, which the packer orders: engines stop between two tokens and give the memory of
    their cache back while the trainer loads or trains a step, and go on afterwards. Needs engine vllm or embedded, and
    `rollout.group_timeout` and `inference.request_timeout` above the time of a step."""
    share_base: Free[bool] = False
    """Whether trainer and engines on its device hold the frozen base under an adapter once: the trainer's weights,
    which engines map. For `model.lora` without quantisation, one trainer rank, and engine vllm or embedded, started by
    this run without tensor or data parallelism. When the trainer ends, engines start again. Not with `colocate: turns`.
    Trainer and engines must be on one machine."""
    torch_threads: Free[dict[Literal["trainer", "inference"], int]] = {}
    """CPU threads of each trainer and inference process. Default: all cores, divided evenly among these processes."""
    fork_server: Free[bool] = True
    """Whether `actors up` forks actors from a process that has imported their modules: an actor starts, and comes back
    after a crash, in a fraction of a second. Not trainers and engines on a machine with a GPU. Linux only."""
    max_restarts: Free[int] = Field(5, ge=0)
    """Restarts of one actor in a row before the run fails. A life of more than 60 s resets the count."""

    @model_validator(mode="after")
    def _threads_positive(self) -> "UpConfig":
        if any(threads < 1 for threads in self.torch_threads.values()):
            raise ValueError("torch_threads: at least 1 thread per process")
        return self

    @model_validator(mode="after")
    def _devices_are_indices(self) -> "UpConfig":
        for kind, processes in self.devices.items() if isinstance(self.devices, dict) else ():
            for gpus in processes:
                if any(gpu < 0 for gpu in gpus) or len(set(gpus)) != len(gpus):
                    raise ValueError(f"devices.{kind}: {gpus} must be different indices, 0 or more")
        return self
