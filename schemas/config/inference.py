"""Keys of inference: the engine that serves the policy, and the HTTP server in front of the engine."""

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.engines import EngineConfig
from schemas.config.noise import NoiseConfig
from schemas.config.resume_classes import Free
from schemas.config.server_pool import ServerPoolConfig


class InferenceConfig(Section):
    """Inference: the engine and its HTTP address."""

    engine: EngineConfig = EmbeddedEngineConfig()
    """Engine that serves the policy."""
    pool: Free[ServerPoolConfig | None] = None
    """Pool of vLLM or SGLang servers that join and leave during the run, with an inference actor for each. Empty:
    none."""
    noise: Free[NoiseConfig | None] = None
    """Noise on the norms of the served policy (QeRL), with engines `embedded` and `vllm`. Empty: none."""
    host: Free[str] = "127.0.0.1"
    """Address that the HTTP server of an inference actor binds to. Beyond loopback, also set `api_key_env`."""
    advertise_host: Free[str | None] = None
    """Name or address under which other machines reach the HTTP server. Empty: `host`."""
    port: Free[int] = Field(0, ge=0, le=65535)
    """Port of inference-0; inference-1 takes the next port, and so on. 0: any free port; required with `pool`."""
    request_timeout: Free[float] = Field(300.0, gt=0)
    """Seconds until a request to an engine must be answered, all its completions included."""
    drain_timeout: Free[float] = Field(20.0, gt=0)
    """Seconds that an inference actor has to finish its completions when it is told to leave (SIGTERM). It takes no new
    ones; the rest is sampled elsewhere. Set 100 on machines that vanish with two minutes' notice."""
    api_key_env: Free[str] = ""
    """Name of the environment variable with the API key of requests. Empty: requests need no key."""
    tls_cert: Free[str] = ""
    """File of the TLS certificate (PEM) of the HTTP server; clients trust this certificate. Empty: plain HTTP."""
    tls_key: Free[str] = ""
    """File of the private key of `tls_cert`, read by inference actors only. Set both or none."""

    @property
    def attached(self) -> bool:
        """True if engines use existing servers; False if each actor starts what its engine needs."""
        return self.pool is not None or self.engine.attached

    @model_validator(mode="after")
    def _tls_whole(self) -> "InferenceConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: set both or none")
        return self
