"""Keys of `inference.engine` with type sglang, and of `inference.pool`."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.base import Section
from schemas.config.resume_classes import Free

ServerUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$")]
"""URL of a server, http://host:port or https://host:port, without a path."""


class SglangEngineConfig(Section):
    """Existing SGLang server behind each inference actor, started by you (docs/engines.md)."""

    type: Free[Literal["sglang"]] = "sglang"
    urls: Free[list[ServerUrl]] = []
    """Existing servers (http://host:port), the first for inference-0 and so on. With `inference.pool` leave this empty.
    Each server needs the model of `model.path`, access to the run's weights folder (`weights.directory`), and with
    `model.lora` `--enable-lora --max-lora-rank N --lora-target-modules all`."""
    api_key_env: Free[str] = ""
    """Name of the environment variable with the servers' `--api-key`. Empty: no key is sent."""
    admin_api_key_env: Free[str] = ""
    """Name of the environment variable with the servers' `--admin-api-key`, for the endpoints of weights. Empty: the
    key of `api_key_env`."""
    max_loras: Free[int] = Field(2, ge=2)
    """Number of adapter versions served at once, so that running requests finish with the version of their start. The
    servers' `--max-loaded-loras` must be at least this."""
    startup_timeout: Free[float] = Field(600.0, gt=0)
    """Seconds until a server must answer. Loading a large model takes minutes."""


class EnginePoolConfig(Section):
    """Pool of vLLM or SGLang servers that join and leave during the run, each with its own inference actor."""

    urls: Free[list[ServerUrl]] = Field(min_length=1)
    """Servers (http://host:port). With http a host name stands for all addresses it currently resolves to, e.g. of a
    headless Kubernetes service; with https for a single server."""
    sync_interval: Free[float] = Field(10.0, gt=0)
    """Seconds between two checks of the servers in `urls`."""
