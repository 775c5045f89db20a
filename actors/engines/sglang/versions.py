"""Which SGLang this engine is for, and what a server must be started with: judged by its own `/server_info`.

Its types are those of 0.5.23, held by tests/system/test_sglang_types.py. They change between versions: the spans of
`weight_versions`, on which everything here rests, are younger than the weight endpoints.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from schemas.config.sglang import SglangEngineConfig
from schemas.errors import ConfigError

SUPPORTED = "0.5.23"


def check_server(info: Mapping[str, Any], config: SglangEngineConfig, lora: bool, url: str) -> None:
    """Refuse a server that this engine can't use.

    Raises:
        ConfigError: each reason, with what to start it with.
    """
    problems = [f"inference.engine: SGLang at {url} {problem}" for problem in _problems(info, config, lora)]
    if problems:
        raise ConfigError(*problems)


def _problems(info: Mapping[str, Any], config: SglangEngineConfig, lora: bool) -> Iterator[str]:
    if not f"{info['version']}.".startswith(f"{SUPPORTED}."):
        yield f"is version {info['version']}, this engine is for {SUPPORTED}"
        return
    if info["disaggregation_mode"] != "null":
        yield f"is one half of a pair (--disaggregation-mode {info['disaggregation_mode']}); start a whole one"
    if not lora:
        return
    if not info["enable_lora"]:
        yield (
            "serves no adapters (model.lora); start it with --enable-lora --max-lora-rank N --lora-target-modules all"
        )
    if info["dp_size"] > 1:
        yield f"has --dp-size {info['dp_size']} and can't load adapters then; start several servers instead"
    if (room := info["max_loaded_loras"]) is not None and room < config.max_loras:
        yield f"holds --max-loaded-loras {room} adapters, inference.engine.max_loras is {config.max_loras}"
