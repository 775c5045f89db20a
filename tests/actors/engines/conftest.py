"""Engines that are closed at the end of the test."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from actors.algorithms.noise import NormNoise
from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.external import relay
from actors.engines.http import server
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import LoraConfig, ModelConfig
from tests.actors.engines.engines import WAIT, MakeEngine
from tests.conftest import ModelFolder


@pytest.fixture(autouse=True)
def _patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for threads that a busy machine holds up."""
    monkeypatch.setattr(server, "JOIN_SECONDS", WAIT)
    monkeypatch.setattr(relay, "JOIN_SECONDS", WAIT)


@pytest.fixture
def make_engine(model_folder: ModelFolder) -> Iterator[MakeEngine]:
    """`make_engine(family, mode="interrupt", max_sequences=8, eos=2, lora=False, dtype="float32", **engine_keys)`."""
    made: list[EmbeddedEngine] = []

    def make(
        family: str = "qwen3",
        mode: str = "interrupt",
        max_sequences: int = 8,
        eos: int = 2,
        lora: bool | LoraConfig = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        noise: NormNoise | None = None,
        **engine_keys: Any,
    ) -> EmbeddedEngine:
        model = ModelConfig(
            path=str(model_folder(family, eos=eos)),
            dtype=dtype,
            device="cpu",
            lora=(LoraConfig(rank=4, alpha=8.0) if lora else None) if isinstance(lora, bool) else lora,
        )
        config = EmbeddedEngineConfig(max_sequences=max_sequences, max_sequence_len=64, **engine_keys)
        made.append(EmbeddedEngine(model, config, mode, Decoder(model, config, noise)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()
