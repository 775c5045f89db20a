"""SGLang servers that are there already."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.base import Section

ServerUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$")]


class SglangEngineConfig(Section):
    """An SGLang server behind each inference actor, started and owned by somebody else (docs/engines.md)."""

    type: Literal["sglang"] = "sglang"
    urls: list[ServerUrl] = []
    """Servers (http://host:port), the first for inference-0 and so on; with `inference.pool` its `urls` name them. Each
    has the same model, the folder of the weights in sight, and with `model.lora` `--enable-lora --max-lora-rank N
    --lora-target-modules all`."""
    api_key_env: str = ""
    """Environment variable that holds the servers' `--api-key`; none is sent where empty."""
    admin_api_key_env: str = ""
    """Environment variable that holds their `--admin-api-key`, for the endpoints of weights; where empty these get the
    key of `api_key_env`."""
    max_loras: int = Field(2, ge=2)
    """Versions of the adapter that are served at once: requests under way end with the one they began with. The
    servers' `--max-loaded-loras` must allow as many."""
    startup_timeout: float = Field(600.0, gt=0)
    """Seconds until a server must answer; loading a large model takes minutes."""


class EnginePoolConfig(Section):
    """Servers of engine type vllm or sglang, each with an inference actor of its own for as long as it is there."""

    urls: list[ServerUrl] = Field(min_length=1)
    """Where servers are (http://host:port). A host name stands for all addresses that it has at the moment, such as
    those of a headless service; with https, for one server."""
    sync_interval: float = Field(10.0, gt=0)
    """Seconds between two looks at which of them are there."""
