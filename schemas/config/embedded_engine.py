"""Keys of `inference.engine` with type embedded."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from schemas.config.engine_base import EngineBase
from schemas.config.resume_classes import Free

if TYPE_CHECKING:
    from schemas.config.run import RunConfig


class EmbeddedEngineConfig(EngineBase):
    """Transformers model in the inference actor, served over HTTP. No server to install."""

    gives_memory_back: ClassVar[bool] = True
    supports_noise: ClassVar[bool] = True
    takes_images: ClassVar[bool] = True
    takes_trained_vision: ClassVar[bool] = True

    type: Free[Literal["embedded"]] = "embedded"
    max_sequences: Free[int] = Field(256, ge=1)
    """Maximum number of completions decoded at once, at least `rollout.group_size`. Further requests wait."""
    max_sequence_len: Free[int] = Field(2048, ge=2)
    """Maximum number of tokens of a prompt and its completion; above `rollout.max_tokens`."""
    max_prefill_tokens: Free[int] = Field(16384, ge=1)
    """Maximum number of prompt tokens computed between two tokens of the running completions (a single prompt may be
    longer). A larger value admits waiting requests sooner; a smaller one delays running completions less and needs less
    memory."""
    deterministic: Free[bool] = False
    """Bitwise reproducible requests: the same tokens and logprobs next to any other requests, and after a restart,
    given the same weights, number of threads and kind of machine. Requests then run one at a time, without the speed of
    batching, and weights switch between two requests, as with `weights.update_mode: drain`."""

    @property
    def num_slots(self) -> int:
        """Value of `max_sequences`."""
        return self.max_sequences

    @property
    def cached_tokens(self) -> int:
        """Room of the cache: sequences times their length."""
        return self.max_sequences * self.max_sequence_len

    @property
    def tells_experts(self) -> bool:
        """True."""
        return True

    @property
    def maps_base(self) -> bool:
        """True."""
        return True

    def max_tokens_per_sequence(self) -> dict[str, int]:
        """Return `max_sequence_len`."""
        return {"inference.engine.max_sequence_len": self.max_sequence_len}

    def problems(self, config: "RunConfig") -> Iterator[str]:
        """Yield an error if a group has more completions than the engine decodes at once."""
        if config.rollout.group_size > self.max_sequences:
            yield (
                f"rollout.group_size: {config.rollout.group_size} exceeds "
                f"inference.engine.max_sequences {self.max_sequences}"
            )
