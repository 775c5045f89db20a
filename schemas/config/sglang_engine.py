"""Keys of `inference.engine` with type sglang."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.engine_base import EngineBase, WeightChannel
from schemas.config.resume_classes import Free
from schemas.config.server_pool import ServerUrl


class SglangEngineConfig(EngineBase):
    """Existing SGLang server behind each inference actor, started by you (docs/reference/engines.md)."""

    has_server: ClassVar[bool] = True
    takes_any_adapter: ClassVar[bool] = False
    channels: ClassVar[frozenset[WeightChannel]] = frozenset({"filesystem"})

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

    @property
    def server_urls(self) -> list[str]:
        """Value of `urls`."""
        return self.urls

    @property
    def attached(self) -> bool:
        """True: no server is started."""
        return True
