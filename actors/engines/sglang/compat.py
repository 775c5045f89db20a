"""Supported version of SGLang, and the options a server needs, checked in the answer of `/server_info`.

The fields are those of 0.5.23, held by tests/system/test_sglang_types.py. Fields change between versions: the spans of
`weight_versions`, on which this engine depends, are younger than the weight endpoints.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from schemas.config.sglang_engine import SglangEngineConfig
from schemas.errors import ConfigError

SUPPORTED = "0.5.23"
"""Version and all patch releases; another version is refused."""


def check_server(info: Mapping[str, Any], config: SglangEngineConfig, lora: bool, url: str) -> None:
    """Check a server's version and options.

    Args:
        info: answer of `/server_info`.
        lora: True if the server must serve adapters.
        url: address of the server, for the error.

    Raises:
        ConfigError: every problem, with the option to start the server with.
    """
    problems = [f"inference.engine: SGLang at {url} {problem}" for problem in _problems(info, config, lora)]
    if problems:
        raise ConfigError(*problems)


def is_supported(version: str) -> bool:
    """Return whether a version is the supported one or one of its patch releases."""
    return f"{version}.".startswith(f"{SUPPORTED}.")


def _problems(info: Mapping[str, Any], config: SglangEngineConfig, lora: bool) -> Iterator[str]:
    if not is_supported(info["version"]):
        yield f"is version {info['version']}, this engine is for {SUPPORTED}"
        # fields of another version may have other meanings, so the first problem is the only one reported
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
