"""Engines to choose from with `inference.engine.type`. A new engine is a class more in the union."""

from typing import Annotated, get_args

from pydantic import Field

from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.engine_base import EngineBase
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.sglang_engine import SglangEngineConfig
from schemas.config.vllm_engine import VllmEngineConfig

EngineConfig = Annotated[
    EmbeddedEngineConfig | VllmEngineConfig | SglangEngineConfig | FakeEngineConfig, Field(discriminator="type")
]


def types_with(capability: str) -> str:
    """Return the types of all engines whose class has a capability, as a text for people: `embedded or vllm`."""
    classes: tuple[type[EngineBase], ...] = get_args(get_args(EngineConfig)[0])
    return " or ".join(str(each.model_fields["type"].default) for each in classes if getattr(each, capability))
