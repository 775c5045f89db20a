"""Embedded engine: a transformers model inside the inference actor."""

from typing import TYPE_CHECKING

from actors.engines.embedded.room import check_cache_fits
from actors.engines.trainers_base import trainers_base
from schemas.config import RunConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig

if TYPE_CHECKING:
    from actors.engines.protocol import Engine


def make(config: RunConfig, engine: EmbeddedEngineConfig, name: str, server_index: int) -> "Engine":
    """Make the engine of an inference actor; the arguments are those of `actors.assembly.ENGINES`."""
    from actors.algorithms.noise import norm_noise
    from actors.engines.embedded.decoder import Decoder  # imports torch, as does the engine
    from actors.engines.embedded.engine import EmbeddedEngine

    decoder = Decoder(config.model, engine, norm_noise(config), trainers_base(config), config.trainer.router_replay)
    if decoder.device.type == "cuda":
        received = decoder.version_bytes if config.weights.channel == "device" else 0
        check_cache_fits(engine, decoder.token_bytes, decoder.free_bytes() - received)
    return EmbeddedEngine(config.model, engine, config.weights.update_mode, decoder)
