"""Owned vLLM server: command line and environment."""

import json
import os
import secrets
import sys
from pathlib import Path

from actors.engines.external.owned import OwnedServer
from actors.engines.http.access import secret
from actors.engines.http.requests import MOST_TOP_LOGPROBS
from actors.engines.vllm.inside import grpo_actors_owner_key as owner_key_module
from actors.engines.vllm.inside import grpo_actors_worker as worker
from actors.engines.vllm.shared_gpu import ServerMemory
from bus.weights.inside import grpo_actors_handles as handles
from schemas.config.model import ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM has kernels."""
LOAD_FORMAT = "grpo_base"
"""Name in vLLM of the loader in `inside.grpo_actors_base`, a module that imports vLLM."""
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""Option for computing each prompt in a single step."""


class OwnServer(OwnedServer):
    """vLLM server of an inference actor."""

    def __init__(
        self,
        model: ModelConfig,
        config: VllmEngineConfig,
        on_cpu: bool,
        log: Path,
        memory: ServerMemory | None = None,
        takes_turns: bool = False,
        base: Path | None = None,
        tells_experts: bool = False,
    ) -> None:
        # loopback is open to every user of the machine, so the endpoints that change weights require a key
        self.owner_key = secrets.token_hex(16)
        super().__init__(
            "vLLM",
            log,
            lambda port: command(model, config, on_cpu, port, memory, takes_turns, base, tells_experts),
            environment(model, config, self.owner_key, shares_base=base is not None),
        )


def command(
    model: ModelConfig,
    config: VllmEngineConfig,
    on_cpu: bool,
    port: int,
    memory: ServerMemory | None = None,
    takes_turns: bool = False,
    base: Path | None = None,
    tells_experts: bool = False,
) -> list[str]:
    """Return the server's command line; `base` is the manifest of a base that the server maps.

    On CPUs each prompt is computed in a single step. A seeded prompt in several steps makes vLLM 0.32 rewind the
    request's random numbers. CPU generators can't be rewound, so the server stops.
    """
    options: dict[str, object] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--model": model.path,
        "--dtype": model.dtype,
        "--max-model-len": config.max_model_len,
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--data-parallel-size": config.data_parallel_size,
        "--gpu-memory-utilization": memory.utilization if memory else config.gpu_memory_utilization,
        "--kv-cache-memory-bytes": memory.cache_bytes if memory else None,
        "--quantization": config.quantization,
        "--reasoning-parser": config.reasoning_parser,
        "--tool-call-parser": config.tool_call_parser,
        "--logprobs-mode": "processed_logprobs",
        # one more than clients may request: see `answers.alternatives`
        "--max-logprobs": MOST_TOP_LOGPROBS + 1,
        "--middleware": owner_key_module.MIDDLEWARE,
        "--worker-extension-cls": worker.EXTENSION,
        "--hf-overrides": json.dumps({"head_dtype": "float32"}) if model.has_exact_head else None,
        "--load-format": LOAD_FORMAT if base else None,
        "--model-loader-extra-config": json.dumps({"manifest": str(base)}) if base else None,
    }
    if model.lora is not None:
        options["--max-lora-rank"] = lora_rank(config.max_lora_rank or model.lora.rank)
        options["--max-loras"] = config.max_loras
        # a version that waits for its turn in a batch must not be evicted for the version being loaded
        options["--max-cpu-loras"] = config.max_loras + 1
    flags = {
        "--enable-scale-out": True,
        "--enable-lora": model.lora is not None,
        "--enable-prefix-caching": config.enable_prefix_caching,
        "--no-enable-prefix-caching": not config.enable_prefix_caching,
        "--enforce-eager": config.enforce_eager,
        "--enable-return-routed-experts": tells_experts,
        # vLLM gives no memory back without it; on CPUs it has no such mode
        "--enable-sleep-mode": takes_turns and not on_cpu,
        WHOLE_PROMPTS: on_cpu,
        "--enable-auto-tool-choice": config.tool_call_parser is not None,
        "--trust-remote-code": model.trust_remote_code,
    }
    python = [config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    # `extra_args` last, so that they win
    return [*python, *given, *(name for name, on in flags.items() if on), *config.extra_args]


def environment(
    model: ModelConfig, config: VllmEngineConfig, owner_key: str, *, shares_base: bool = False
) -> dict[str, str]:
    """Return the server's environment: this process's own, the endpoints for weights, the middleware, and the keys.

    Keys stay off the command line, which every user of the machine can read. PYTHONSAFEPATH keeps modules of the folder
    where the run was started out of the path: such a module may have the name of a module of vLLM or Python.
    """
    ours = [str(Path(file).parent) for file in (owner_key_module.__file__, handles.__file__)]
    path = [*ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        owner_key_module.KEY_VARIABLE: owner_key,
    }
    if shares_base:
        added[worker.SHARES_BASE] = "1"
    if model.lora is not None:
        added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if key := api_key(config):
        added["VLLM_API_KEY"] = key
    return os.environ | added


def api_key(config: VllmEngineConfig) -> str:
    """Return the server's API key; empty if none is configured.

    Raises:
        ConfigError: the variable named by `inference.engine.api_key_env` is not set.
    """
    return secret(config.api_key_env, "inference.engine.api_key_env")


def lora_rank(rank: int) -> int:
    """Return the smallest adapter rank of vLLM not below this rank.

    Raises:
        ConfigError: the rank exceeds vLLM's largest.
    """
    fitting = [known for known in LORA_RANKS if known >= rank]
    if not fitting:
        raise ConfigError(f"model.lora.rank: {rank}, but vLLM serves adapters up to rank {LORA_RANKS[-1]}")
    return fitting[0]
