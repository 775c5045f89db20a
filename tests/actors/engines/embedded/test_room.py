"""Room for the cache on a GPU, which is checked before a run begins."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import actors.engines.embedded.decoder as module
from actors.engines.embedded import make
from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.room import WORK_BYTES, check_cache_fits
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.errors import ConfigError
from tests.actors.learner.steps import run_config

ModelFolder = Callable[..., Path]


@pytest.mark.parametrize(("sequences", "length", "token"), [(1, 100, 8), (256, 2048, 114_688), (1024, 32_768, 65_536)])
def test_a_cache_that_just_fits_is_taken_and_a_larger_one_is_refused(sequences: int, length: int, token: int) -> None:
    """The error names both keys, what is missing, and what would fit."""
    limits = EmbeddedEngineConfig(max_sequences=sequences, max_sequence_len=length)
    just = sequences * length * token + WORK_BYTES
    check_cache_fits(limits, token, just)
    with pytest.raises(
        ConfigError, match=rf"max_sequences: {sequences} .*{length} tokens \(max_sequence_len\)"
    ) as error:
        check_cache_fits(limits, token, just - 1)
    assert f"; {sequences - 1} sequences fit" in str(error.value)


def test_a_gpu_without_any_room_says_so() -> None:
    """The weights alone have filled it."""
    with pytest.raises(ConfigError, match=r"has 0\.0 GB left beside the weights; 0 sequences fit"):
        check_cache_fits(EmbeddedEngineConfig(), 1000, WORK_BYTES // 2)


def test_an_engine_on_a_gpu_checks_its_room_and_one_on_a_cpu_does_not(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 3 GB, as torch would tell it; the cache of the model takes 256 bytes a token."""
    config = run_config(model_folder())
    engine = EmbeddedEngineConfig(max_sequences=4096, max_sequence_len=4096)
    make(config, engine, "inference-0", 0).close()
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(module.Decoder, "__init__", lambda self, *_: _fill(self, config.model.path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 3 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match=r"need a cache of 4\.3 GB, and the GPU has 1\.1 GB left"):
        make(config, engine, "inference-0", 0)


def _fill(decoder: Decoder, path: str) -> None:
    """What the check reads of a decoder on a GPU, which is not here."""
    from transformers import AutoModelForCausalLM

    decoder.model = AutoModelForCausalLM.from_pretrained(path)
    decoder._dtype = torch.float32
