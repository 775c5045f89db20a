"""Engines that are servers of their own, in a run's configuration."""

from pathlib import Path
from typing import Any

import pytest

from actors.assembly import make_inference
from actors.telemetry.metrics import Metrics
from bus.run_folder import scratch_of, weights_folder
from schemas.config import warnings
from schemas.config.resume import class_of
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

URLS = ["http://one:8000", "http://two:8000"]


@pytest.mark.parametrize(
    ("engine", "up", "problem"),
    [
        ({"max_model_len": 64}, 1, None),
        ({"max_model_len": 12}, 1, "rollout.max_tokens: 12 leaves no room .* inference.engine.max_model_len 12"),
        ({"max_lora_rank": 2}, 1, "inference.engine.max_lora_rank: 2 is below model.lora.rank 4"),
        ({"urls": URLS}, 2, None),
        ({"urls": URLS}, 1, "inference.engine.urls: 2 servers for up.inference 1"),
        ({"urls": URLS}, 3, "inference.engine.urls: 2 servers for up.inference 3"),
    ],
)
def test_vllm_fits_the_rest_of_the_run(tmp_path: Path, engine: Any, up: int, problem: str | None) -> None:
    """Both keys are named."""
    model = {"path": "fake", "lora": {"rank": 4}}
    sections: Any = {"inference": {"engine": {"type": "vllm", **engine}}, "up": {"inference": up}, "model": model}
    if problem is None:
        assert isinstance(ring_config(tmp_path, **sections).inference.engine, VllmEngineConfig)
        return
    with pytest.raises(ConfigError, match=problem):
        ring_config(tmp_path, **sections)


def test_weights_stay_on_the_device_where_the_run_starts_the_engines(tmp_path: Path) -> None:
    """An existing server may be on another device than the inference actor in front of it."""
    weights = {"channel": "device"}
    for engine in ({"type": "fake"}, {"type": "embedded"}, {"type": "vllm"}):
        assert ring_config(tmp_path, weights=weights, inference={"engine": engine}).weights.channel == "device"
    for engine, words in (
        ({"type": "vllm", "urls": URLS[:1]}, "weights.channel: device needs engines that this run starts"),
        ({"type": "sglang"}, "weights.channel: device, but engine sglang takes weights by filesystem alone"),
    ):
        with pytest.raises(ConfigError, match=words):
            ring_config(tmp_path, weights=weights, inference={"engine": engine})


@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        ({"type": "fake"}, False),
        ({"type": "embedded"}, False),
        ({"type": "vllm"}, False),
        ({"type": "vllm", "urls": URLS[:1]}, True),
        ({"type": "sglang", "mem_fraction_static": 0.3}, True),
    ],
    ids=str,
)
def test_turns_are_for_engines_that_give_memory_back(tmp_path: Path, engine: Any, refused: bool) -> None:
    """Side by side all of them may share a GPU."""
    for colocate in (True, "turns"):
        sections: Any = {"inference": {"engine": engine}, "up": {"colocate": colocate}}
        if refused and colocate == "turns":
            with pytest.raises(ConfigError, match=r"up\.colocate: turns needs engine vllm or embedded"):
                ring_config(tmp_path, **sections)
        else:
            assert ring_config(tmp_path, **sections).up.colocate == colocate


@pytest.mark.parametrize(
    ("engine", "lora", "problem"),
    [
        ({"type": "embedded"}, True, None),
        ({"type": "vllm"}, True, None),
        ({"type": "vllm", "urls": URLS}, False, None),
        ({"type": "vllm", "urls": URLS}, True, "inference.noise: with model.lora .* or inference.engine.urls"),
        ({"type": "vllm", "pool": {"urls": URLS}}, True, "inference.noise: with model.lora .* or inference.pool"),
        (
            {"type": "vllm", "extra_args": ["--worker-extension-cls=mine.Own"]},
            True,
            "inference.engine.extra_args: .* inference.noise needs --worker-extension-cls",
        ),
        ({"type": "sglang", "urls": URLS}, False, "inference.noise: engine sglang can't add noise"),
    ],
)
def test_noise_is_for_engines_that_make_it(tmp_path: Path, engine: Any, lora: bool, problem: str | None) -> None:
    """Norms under an adapter take code of ours in the server, which one that is there already does not have."""
    pool = engine.pop("pool", None)
    model = {"path": "fake", "lora": {"rank": 4} if lora else None}
    inference = {"engine": engine, "pool": pool, "noise": {}}
    sections: Any = {"inference": inference, "up": {"inference": 2}, "model": model}
    if problem is None:
        assert ring_config(tmp_path, **sections).inference.noise is not None
        return
    with pytest.raises(ConfigError, match=problem):
        ring_config(tmp_path, **sections)


def test_the_engine_may_change_when_a_run_goes_on() -> None:
    """Where completions come from is no part of what they are."""
    assert class_of("inference.engine.type") == class_of("inference.engine.urls") == "free"


def test_an_actor_beyond_the_servers_is_refused(tmp_path: Path, model_folder: Any) -> None:
    """`actors run inference-2` with two servers."""
    model = {"path": str(model_folder("llama")), "lora": {"rank": 4}}
    config = ring_config(
        tmp_path, model=model, inference={"engine": {"type": "vllm", "urls": URLS}}, up={"inference": 2}
    )
    with pytest.raises(ConfigError, match=r"inference.engine.urls: has none for inference-2"):
        make_inference(config, "inference-2", Metrics("inference")).run()


def test_an_own_server_reads_from_this_hosts_memory_and_another_from_where_weights_lie(tmp_path: Path) -> None:
    """Each actor has a folder of its own, inside the run's own folder: on the same disk, whatever is mounted there."""
    vllm: Any = {"weights": {"directory": ""}, "inference": {"engine": {"type": "vllm"}}}
    here, apart = (ring_config(tmp_path, transport, **vllm) for transport in ("ipc", "tcp"))
    own, others = (scratch_of(apart, "inference-0", own=own).path for own in (True, False))
    assert own == scratch_of(here, "inference-0", own=True).path != scratch_of(here, "inference-1", own=True).path
    assert own.parent == weights_folder(here).path
    assert others.parent == weights_folder(apart).path
    assert others.parent.parent == tmp_path / "out" / "weights"
    chosen = ring_config(tmp_path, weights={"directory": str(tmp_path / "there")}, inference=vllm["inference"])
    scratch = scratch_of(chosen, "inference-0", own=True).path
    assert scratch.parent == weights_folder(chosen).path
    assert scratch.parent.parent == tmp_path / "there"


def test_servers_compute_an_exact_head_too(tmp_path: Path) -> None:
    """Those of the run are told so, which arguments of the user's must not replace; of others it is said."""
    model = {"path": "fake", "dtype": "bfloat16", "head_dtype": "float32"}
    words = ["--hf-overrides", "{}"]
    with pytest.raises(ConfigError, match=r"extra_args: model\.head_dtype float32 needs --hf-overrides for itself"):
        ring_config(tmp_path, model=model, inference={"engine": {"type": "vllm", "extra_args": words}})
    own = ring_config(tmp_path, model=model, inference={"engine": {"type": "vllm"}})
    assert [line for line in warnings(own) if "head_dtype" in line] == []
    for engine, argument in (("vllm", "--hf-overrides"), ("sglang", "--enable-fp32-lm-head")):
        attached = ring_config(tmp_path, model=model, inference={"engine": {"type": engine, "urls": URLS[:1]}})
        (line,) = [line for line in warnings(attached) if "head_dtype" in line]
        assert argument in line
