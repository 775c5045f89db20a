"""Engines that are servers of their own."""

import re
from typing import Literal

from pydantic import Field, field_validator

from schemas.config.base import Section

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
"""Arguments of vLLM on which the promises of an engine rest."""


class VllmEngineConfig(Section):
    """A vLLM server behind each inference actor: started and owned by it, or one that is there already (`urls`)."""

    type: Literal["vllm"] = "vllm"
    max_model_len: int | None = Field(None, ge=2)
    """Tokens of prompt and completion at most; as many as the model allows where empty."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs over which one copy of the model is split."""
    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model behind one server."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes; less where the trainer uses the same GPU."""
    max_lora_rank: int | None = Field(None, ge=1)
    """Largest rank of an adapter; that of `model.lora` where empty. Rounded up to one that vLLM has kernels for. That
    adapters are served at all follows from `model.lora`."""
    max_loras: int = Field(2, ge=2)
    """Versions of the adapter that are served at once: requests under way end with the one they began with."""
    enable_prefix_caching: bool = True
    """Keep keys and values of prompts for later requests of the same version."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, decodes slower."""
    quantization: str | None = None
    """vLLM's name of a quantisation of the base model (`fp8`, `bitsandbytes`, …)."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser of reasoning, for clients that ask its server themselves."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls, likewise."""
    api_key_env: str = ""
    """Environment variable that holds the server's API key; none is asked for where empty."""
    extra_args: list[str] = []
    """Further arguments of `vllm serve`, as they are."""
    python: str = ""
    """Interpreter of the environment with vLLM; the actor's own where empty."""
    startup_timeout: float = Field(600.0, gt=0)
    """Seconds until the server must answer; loading a large model takes minutes."""
    urls: list[str] = []
    """Servers that are there already, the first for inference-0 and so on; none is started then. Each needs
    `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out --logprobs-mode processed_logprobs`, with `model.lora` also
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True --enable-lora`, the same model, and the folder of the weights in sight."""

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
        ours = [argument for argument in arguments if argument.partition("=")[0] in SET_BY_US]
        if ours:
            raise ValueError(f"{ours[0]} is set by the engine itself")
        return arguments
