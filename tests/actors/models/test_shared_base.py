"""The frozen base, held once: the trainer's memory, which engines map (`up.share_base`)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import EngineStoppedError, SampleRequest
from actors.learner.learner import TorchLearner
from actors.models import shared_base
from actors.models.shared_base import Manifest
from actors.process.devices import Gpu
from bus.weights.inside.grpo_actors_handles import opened, tensors_in
from schemas.config import RunConfig, check_tree
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.learner.steps import batches_of, run_config, scored_group
from tests.conftest import ModelFolder

CPU = torch.device("cpu")
OWNER = """
import sys, time
from pathlib import Path
import torch
from actors.models import shared_base
from actors.models.shared_base import Manifest
from actors.process.devices import Gpu
from tests import models
block = shared_base.share(models.plain(Path(sys.argv[1])), torch.device("cpu"), Path(sys.argv[2]))
print("ready", flush=True)
time.sleep(600)
"""


def run(folder: Path, tmp_path: Path, family: str = "qwen3") -> RunConfig:
    """A run with an adapter, whose folder is empty."""
    made = run_config(folder, lora={"rank": 4}, learning_rate=1e-2)
    return made.model_copy(update={"output_dir": str(tmp_path / "run")})


@pytest.mark.parametrize("family", ["qwen3", "llama", "biased_llama", "qwen3_moe"])
def test_all_weights_are_where_the_manifest_says(model_folder: ModelFolder, tmp_path: Path, family: str) -> None:
    """The same values, at addresses at which sums are not rounded otherwise; joined ones follow each other."""
    model, own = models.plain(model_folder(family)), models.plain(model_folder(family))
    block = shared_base.share(model, CPU, tmp_path)
    found = shared_base.find(tmp_path, 1.0)
    assert found is not None
    shared = tensors_in(opened(found.handle), found.tensors)
    for name, parameter in own.named_parameters():
        assert torch.equal(shared[name], parameter)
        assert torch.equal(dict(model.named_parameters())[name], parameter)
    assert all(start % 16 == 0 for *_, start in found.tensors)
    starts = {name: start for name, *_, start in found.tensors}
    sizes = {name: tensor.nbytes for name, tensor in shared.items()}
    layer = "model.layers.1.self_attn."
    for before, after in (("q_proj", "k_proj"), ("k_proj", "v_proj")):
        end = starts[f"{layer}{before}.weight"] + sizes[f"{layer}{before}.weight"]
        assert starts[f"{layer}{after}.weight"] == end
    # a vocabulary of 30 gets room for 64
    size = own.get_input_embeddings().weight[0].nbytes
    assert found.rooms["model.embed_tokens.weight"] == (-len(models.VOCABULARY) % 64) * size
    del block


def test_an_engine_computes_with_the_memory_of_the_trainer(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The base is mapped and not copied, norms are copied; after steps of training both have the same logprobs."""
    config = run(model_folder("qwen3"), tmp_path)
    learner = TorchLearner(config, shares_base=True)
    whole = TorchLearner(config)
    for step in (1, 2):
        (batch,) = batches_of([scored_group(ordinal) for ordinal in range(4)], 1, 1, step)
        assert learner.step(batch)["loss"] == whole.step(batch)["loss"]
    for name, tensor in whole.weights().tensors.items():
        assert torch.equal(learner.weights().tensors[name], tensor), name
    manifest = shared_base.find(config.output, 1.0)
    assert manifest is not None
    limits = EmbeddedEngineConfig(type="embedded")
    decoder, own = Decoder(config.model, limits, shared_base=manifest), Decoder(config.model, limits)
    for each in (decoder, own):
        each.load(learner.weights(), 2)
    tokens = scored_group(0).token_ids[:6]
    # weights of a file are mapped at other addresses, and some processors' products depend on these in their last bits
    torch.testing.assert_close(decoder.prefill([tokens], [0]), own.prefill([tokens], [0]), rtol=0, atol=1e-5)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "grpo-actors-weights" in line]
    assert mapped
    inside = {name for name, p in decoder.model.named_parameters() if _is_inside(p, mapped)}
    base = {name for name, p in decoder.model.named_parameters() if "lora_" not in name}
    assert inside == {name for name in base if "norm" not in name}
    # the memory is the trainer's: a change there is seen here
    with torch.no_grad():
        before = decoder.prefill([tokens], [0])
        dict(learner.model.named_parameters())[next(iter(inside))].mul_(2.0)
        assert not torch.equal(decoder.prefill([tokens], [0]), before)


def _is_inside(tensor: Tensor, mapped: list[str]) -> bool:
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    return any(low <= tensor.data_ptr() < high for low, high in ranges)


@pytest.fixture
def owner(model_folder: ModelFolder, tmp_path: Path) -> Any:
    """A process that holds the base."""
    command = [sys.executable, "-c", OWNER, str(model_folder("qwen3")), str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)  # behind a line of the log
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_an_engine_stops_when_the_owner_is_killed(owner: Any, model_folder: ModelFolder, tmp_path: Path) -> None:
    """No completion is given out that may have been computed with memory that is gone."""
    config = run(model_folder("qwen3"), tmp_path)
    manifest = shared_base.find(config.output, 10.0)
    limits = EmbeddedEngineConfig(type="embedded")
    engine = EmbeddedEngine(config.model, limits, "interrupt", Decoder(config.model, limits, shared_base=manifest))
    try:
        engine.load(PolicyVersion(lineage=0, version=0), TorchLearner(config).weights(), 30.0)
        [answer] = engine.submit(SampleRequest([1, 2, 3], 1, 4, seed=0)).result(60.0)
        assert len(answer.token_ids) <= 4
        running = engine.submit(SampleRequest([1, 2, 3], 64, 80, seed=0, ignore_eos=True))
        owner.kill()
        with pytest.raises(EngineStoppedError, match="the trainer with the shared base has ended"):
            running.result(60.0)
        with pytest.raises(EngineStoppedError, match="the trainer with the shared base has ended"):
            engine.status()
    finally:
        engine.close()
    # killed and not yet waited for is dead too
    with pytest.raises(TimeoutError, match=r"up.share_base: no living trainer .* within 0.3 s; start trainer-0"):
        shared_base.find(config.output, 0.3)


def test_an_engine_waits_for_the_first_trainer(tmp_path: Path, model_folder: ModelFolder) -> None:
    """It may be started first; a manifest of an earlier run is not taken."""
    tmp_path.joinpath("run").mkdir()
    late = {"owner": "1:0", "handle": {"file": "/proc/1/fd/3", "num_bytes": 1}, "tensors": [], "rooms": {}}
    (tmp_path / "run" / shared_base.MANIFEST).write_text(json.dumps(late))
    with pytest.raises(TimeoutError, match="no living trainer"):
        shared_base.find(tmp_path / "run", 0.3)
    begun = time.monotonic()
    command = [sys.executable, "-c", OWNER, str(model_folder("qwen3")), str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        found = shared_base.find(tmp_path / "run", 120.0)
        assert found is not None
        assert found.owner.startswith(f"{process.pid}:")
        assert time.monotonic() - begun > 0.2
    finally:
        process.kill()
        process.wait()


def test_a_base_on_another_gpu_is_not_waited_for(tmp_path: Path) -> None:
    """The engine has a GPU to itself then, and loads its own."""
    record = {
        "owner": shared_base.process_of(os.getpid()),
        "handle": {"gpu": "GPU-of-another-machine", "num_bytes": 1},
        "tensors": [],
        "rooms": {},
    }
    (tmp_path / shared_base.MANIFEST).write_text(json.dumps(record))
    assert shared_base.find(tmp_path, 0.1) is None


def test_a_completion_of_one_token_is_not_given_out_either(
    owner: Any, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """It ends with the prefill."""
    config = run(model_folder("qwen3"), tmp_path)
    limits = EmbeddedEngineConfig(type="embedded")
    manifest = shared_base.find(config.output, 10.0)
    engine = EmbeddedEngine(config.model, limits, "interrupt", Decoder(config.model, limits, shared_base=manifest))
    owner.kill()
    owner.wait()
    with pytest.raises(EngineStoppedError, match="the trainer with the shared base has ended"):
        engine.submit(SampleRequest([1, 2, 3], 1, 1, seed=0)).result(60.0)
    engine.close()


@pytest.mark.parametrize("told", ["GPU-aa-bb", "aa-bb"])
def test_a_base_on_a_gpu_of_this_process_is_here(told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver writes GPU- in front of the name, and torch does not."""
    monkeypatch.setattr(shared_base, "visible_gpus", lambda: [Gpu("0", uuid="GPU-xx"), Gpu("1", uuid="GPU-aa-bb")])
    found = Manifest(tmp_path, "1:1:x", {"gpu": told, "num_bytes": 1}, [], {})
    assert found.is_here()
    monkeypatch.setattr(shared_base, "visible_gpus", lambda: [Gpu("0", uuid="GPU-xx")])
    assert not found.is_here()


def test_another_model_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    """By the names and shapes, before anything is replaced."""
    block = shared_base.share(models.plain(model_folder("qwen3")), CPU, tmp_path)
    found = shared_base.find(tmp_path, 1.0)
    assert found is not None
    with pytest.raises(ConfigError, match=r"another model; are model\.path and model\.dtype the same"):
        shared_base.use(models.plain(model_folder("llama")), found)
    del block


def test_processes_are_told_apart() -> None:
    """By number and start; none has the number of a process that has ended."""
    assert shared_base.process_of(os.getpid()) == shared_base.process_of(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.5)  # not waited for: a zombie has no memory any more
    assert shared_base.process_of(ended.pid) == ""
    ended.wait()
    assert shared_base.process_of(ended.pid) == ""


def _tree(**sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {"path": "some/model", "lora": {}},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 1},
        "up": {"share_base": True},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return tree


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"lora": None}}, "up.share_base: needs model.lora"),
        ({"model": {"quantization": {"type": "nf4"}}}, "up.share_base: needs model.lora, without model.quantization"),
        ({"trainer": {"num_ranks": 2}}, "up.share_base: needs trainer.num_ranks 1"),
        ({"inference": {"engine": {"type": "fake"}}}, "up.share_base: needs engine vllm or embedded"),
        ({"inference": {"engine": {"type": "vllm", "tensor_parallel_size": 2}}}, "up.share_base: needs engine vllm"),
        ({"inference": {"engine": {"type": "vllm", "urls": ["http://h:1"]}}}, "up.share_base: needs engine vllm or"),
        (
            {"inference": {"engine": {"type": "vllm", "quantization": "fp8"}}},
            "up.share_base: .* without inference.engine.quantization",
        ),
        (
            {"inference": {"engine": {"type": "vllm", "extra_args": ["--load-format=auto"]}}},
            "share_base: .* without --load-format",
        ),
        ({"up": {"colocate": "turns"}}, "up.share_base: not with up.colocate: turns"),
    ],
)
def test_runs_whose_base_can_not_be_shared_are_refused_by_key(sections: dict[str, Any], problem: str) -> None:
    """Before anything is loaded."""
    check_tree(_tree())
    with pytest.raises(ConfigError, match=problem):
        check_tree(_tree(**sections))
