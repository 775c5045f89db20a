"""Keys of `inference.engine` with type sglang."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from schemas.config.engine_base import EngineBase, WeightChannel
from schemas.config.resume_classes import Free
from schemas.config.server_arguments import refuse_own
from schemas.config.server_pool import ServerUrl

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

SET_BY_US = (
    "--host",
    "--port",
    "--model-path",
    "--served-model-name",
    "--dtype",
    "--config",
    "--api-key",
    "--admin-api-key",
    "--enable-lora",
    "--lora-target-modules",
    "--max-loaded-loras",
    "--max-loras-per-batch",
    "--skip-tokenizer-init",
    "--weight-version",
)
"""Arguments of SGLang's server that the engine sets itself, since its promises rest on them; refused in `extra_args`.
"""


class SglangEngineConfig(EngineBase):
    """SGLang server behind each inference actor, started by the actor or an existing one (`urls`)."""

    has_server: ClassVar[bool] = True
    takes_any_adapter: ClassVar[bool] = False
    takes_images: ClassVar[bool] = True
    channels: ClassVar[frozenset[WeightChannel]] = frozenset({"filesystem"})

    type: Free[Literal["sglang"]] = "sglang"
    urls: Free[list[ServerUrl]] = []
    """Existing servers (http://host:port), the first for inference-0 and so on; no server is started then. Empty: each
    actor starts its own. With `inference.pool` leave this empty. Each server needs the model of `model.path`, access to
    the run's weights folder (`weights.directory`), and with `model.lora` `--enable-lora --max-lora-rank N
    --lora-target-modules all`."""
    api_key_env: Free[str] = ""
    """Name of the environment variable with the servers' `--api-key`. Empty: no key is sent."""
    admin_api_key_env: Free[str] = ""
    """Name of the environment variable with the servers' `--admin-api-key`, for the endpoints of weights. Empty: the
    key of `api_key_env`. A server started by its actor has a key of the actor's own."""
    max_model_len: Free[int | None] = Field(None, ge=2)
    """Maximum number of tokens of a prompt and its completion, above `rollout.max_tokens` (`--context-length` of a
    started server). Empty: the model's maximum."""
    tensor_parallel_size: Free[int] = Field(1, ge=1)
    """Number of GPUs over which a started server splits one copy of the model."""
    data_parallel_size: Free[int] = Field(1, ge=1)
    """Number of copies of the model behind a started server; 1 with `model.lora`."""
    mem_fraction_static: Free[float | None] = Field(None, gt=0, lt=1)
    """Share of each GPU's memory for weights and cache of a started server. Empty: SGLang's choice."""
    max_lora_rank: Free[int | None] = Field(None, ge=1)
    """Maximum rank of adapters of a started server, at least `model.lora.rank`. Empty: the rank of `model.lora`."""
    quantization: Free[str | None] = None
    """Quantisation of the base model of a started server, by SGLang's name (`fp8`, …). Empty: none."""
    deterministic: Free[bool] = True
    """Deterministic inference of a started server (`--enable-deterministic-inference`). Without it SGLang ignores
    seeds, and is faster."""
    extra_args: Free[list[str]] = []
    """Further command line arguments of `python -m sglang.launch_server`, passed on unchanged."""
    python: Free[str] = ""
    """Path to the Python interpreter of the environment with SGLang. Empty: the actor's own interpreter."""
    max_loras: Free[int] = Field(2, ge=2)
    """Number of adapter versions served at once, so that running requests finish with the version of their start. The
    servers' `--max-loaded-loras` must be at least this."""
    startup_timeout: Free[float] = Field(600.0, gt=0)
    """Seconds until a server must answer. Loading a large model takes minutes."""

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

    def max_tokens_per_sequence(self) -> dict[str, int]:
        """Return `max_model_len`, if it is set."""
        return {} if self.max_model_len is None else {"inference.engine.max_model_len": self.max_model_len}

    def packages(self) -> Iterator[tuple[str, str]]:
        """Yield SGLang, unless another interpreter has it."""
        if not self.python:
            yield "sglang", "sglang, in an environment of its own that inference.engine.python names"

    def problems(self, config: "RunConfig") -> Iterator[str]:
        """Yield errors of adapters, and of a GPU that a started server would share."""
        lora = config.model.lora
        if config.inference.attached:
            return
        if lora is not None and (self.max_lora_rank or lora.rank) < lora.rank:
            yield f"inference.engine.max_lora_rank: {self.max_lora_rank} is below model.lora.rank {lora.rank}"
        if lora is not None and self.data_parallel_size > 1:
            yield (
                f"inference.engine.data_parallel_size: {self.data_parallel_size}, but SGLang loads no adapters then "
                "(model.lora); set 1, and raise up.inference"
            )
        if config.up.colocate and self.mem_fraction_static is None:
            yield (
                "inference.engine.mem_fraction_static: up.colocate may put SGLang on the trainer's GPU, of which it "
                "would take nearly all memory; set the share that is left for it"
            )

    def warnings(self, config: "RunConfig") -> Iterator[str]:
        """Yield a warning of servers whose precision may differ from the trainer's."""
        if config.model.has_exact_head and config.inference.attached:
            yield (
                "model.head_dtype: float32, which servers of their own do if they are started with "
                "--enable-fp32-lm-head; else their logprobs differ"
            )
