"""Keys of `inference.engine` with type fake."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.engine_base import EngineBase
from schemas.config.resume_classes import Free


class FakeEngineConfig(EngineBase):
    """Engine for tests and dry runs: tokens are a hash of seed, position and policy. No model is loaded."""

    gives_memory_back: ClassVar[bool] = True
    loads_model: ClassVar[bool] = False

    type: Free[Literal["fake"]] = "fake"
    vocab_size: Free[int] = Field(64, ge=4)
    """Number of token ids to draw from."""
    token_seconds: Free[float] = Field(0.0, ge=0)
    """Seconds of pause per decoded token."""

    @property
    def own_vocab_size(self) -> int:
        """Value of `vocab_size`."""
        return self.vocab_size
