"""Engines in front of stubs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.engines.sglang.engine import SglangEngine
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.sglang_engine import SglangEngineConfig
from tests import models
from tests.actors.engines.sglang.stub import StubServer, serving
from tests.conftest import ModelFolder
from tests.folders import scratch_at


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub server that serves anything."""
    with serving() as server:
        yield server


MakeSglang = Callable[..., SglangEngine]


@pytest.fixture
def make_sglang(model_folder: ModelFolder, stub: StubServer, tmp_path: Path) -> Iterator[MakeSglang]:
    """`make_sglang(lora=False, mode="interrupt", eos=2, family="qwen3", **engine_keys)`: an engine before the stub."""
    made: list[SglangEngine] = []

    def make(
        lora: bool = False, mode: Any = "interrupt", eos: int = models.EOS, family: str = "qwen3", **engine_keys: Any
    ) -> SglangEngine:
        adapter = LoraConfig(rank=4, alpha=8.0) if lora else None
        model = ModelConfig(path=str(model_folder(family, eos=eos)), dtype="float32", lora=adapter)
        config = SglangEngineConfig(**{"type": "sglang", "urls": [stub.url], "startup_timeout": 60.0} | engine_keys)
        made.append(SglangEngine(model, config, mode, scratch_at(tmp_path / "run" / "scratch")))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
