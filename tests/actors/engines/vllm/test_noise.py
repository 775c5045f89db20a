"""Noise on the norms that a vLLM server is given: what the engine has it read, in front of a stub."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.vllm.client import VllmClient
from actors.engines.vllm.inside.grpo_actors_worker import Extension
from bus.weights import Weights
from schemas.config.noise import NoiseConfig
from tests.actors.engines.engines import WAIT, ask, policy, sample
from tests.actors.engines.vllm.conftest import MakeVllm, ServableModel
from tests.actors.engines.vllm.stub import StubServer
from tests.actors.engines.vllm.test_process import wait_for

NOISE = NormNoise(NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3), total_steps=6, seed=4)
PROMPT = [1, 8, 9, 3]
ADAPTER = Weights("adapter", {"a": torch.zeros(1)}, {"adapter_config.json": "{}"})


def noisy(tensors: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """The norms of a model with the noise of a version."""
    return NOISE.on({name: tensor for name, tensor in tensors.items() if is_noisy_norm(name)}, version)


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors under the same names."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """What the server would have read at each call, whole folders and files with norms."""
    files: list[dict[str, Tensor]] = []
    reload, set_norms = VllmClient.reload, VllmClient.set_norms

    async def reload_seen(client: VllmClient, folder: Path) -> None:
        files.append(load_file(folder / "model.safetensors"))
        await reload(client, folder)

    async def set_norms_seen(client: VllmClient, path: Path) -> None:
        files.append(load_file(path))
        await set_norms(client, path)

    monkeypatch.setattr(VllmClient, "reload", reload_seen)
    monkeypatch.setattr(VllmClient, "set_norms", set_norms_seen)
    return files


@pytest.mark.parametrize("laid_out", [False, True])
def test_all_weights_are_laid_out_with_the_noise_of_their_version(
    make_vllm: MakeVllm,
    stub: StubServer,
    servable_model: ServableModel,
    read: list[dict[str, Tensor]],
    laid_out: bool,
    tmp_path: Path,
) -> None:
    """Also where the channel has laid out a file, which is clean and stays so; the norms alone differ."""
    source = servable_model(1)
    clean = load_file(source / "model.safetensors")
    weights = Weights("full", clean, directory=str(source) if laid_out else "")
    engine = make_vllm(noise=NOISE)
    for version in (0, 5, 2, 5):
        engine.load(policy(version), weights, WAIT)
        assert same(read[-1], clean | noisy(clean, version))
    assert same(read[0], clean)
    assert not torch.equal(read[1]["model.norm.weight"], read[2]["model.norm.weight"])
    assert same(load_file(source / "model.safetensors"), clean)
    folders = [call["kwargs"]["weights_path"] for call in stub.asked("/collective_rpc")]
    assert {Path(folder).parent for folder in folders} == {tmp_path / "run" / "scratch"}
    assert not list((tmp_path / "run" / "scratch").iterdir())


def test_an_adapter_is_switched_together_with_the_norms_under_it(
    make_vllm: MakeVllm, stub: StubServer, servable_model: ServableModel, read: list[dict[str, Tensor]]
) -> None:
    """The adapter is there before the server stands still; noise is always put on the norms of the model's files."""
    clean = load_file(servable_model() / "model.safetensors")
    engine = make_vllm(lora=True, noise=NOISE)
    assert not engine.holds_two_versions
    for update, version in enumerate((0, 5, 2, 5), start=1):
        stub.calls.clear()
        engine.load(policy(version), ADAPTER, WAIT)
        paths = [path for path in stub.paths() if path != "/v1/unload_lora_adapter"]
        whole = ["/pause", "/reset_prefix_cache", "/collective_rpc", "/update_weight_version", "/resume"]
        assert paths == ["/v1/load_lora_adapter", *whole]
        assert stub.asked("/collective_rpc")[0]["method"] == "set_norms"
        assert same(read[-1], noisy(clean, version))
        assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, version)]
        assert stub.asked("/inference/v1/generate")[0]["model"] == f"policy-1.{version}.{update}"
    assert same(read[0], noisy(clean, 0))
    assert torch.equal(read[0]["model.norm.weight"], clean["model.norm.weight"])
    assert not torch.equal(read[1]["model.norm.weight"], clean["model.norm.weight"])


def test_nothing_goes_on_with_an_adapter_whose_norms_are_gone(make_vllm: MakeVllm, stub: StubServer) -> None:
    """A request under way is interrupted before the norms change, and goes on with the new adapter."""
    engine = make_vllm(lora=True, noise=NOISE)
    stub.calls.clear()
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT, max_tokens=5))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    engine.load(policy(5), ADAPTER, WAIT)
    stub.release()
    [completion] = old.result(WAIT)
    assert (completion.segments, len(completion.token_ids)) == ([(0, 1, 1), (2, 1, 5)], 5)
    assert stub.paths().index("/abort_requests") < stub.paths().index("/pause", stub.paths().index("/resume"))
    assert stub.asked("/inference/v1/generate")[1]["model"] == "policy-1.5.2"


def test_with_drain_what_is_under_way_ends_first(make_vllm: MakeVllm, stub: StubServer) -> None:
    """If it does not in time, the old version serves on with its norms."""
    engine = make_vllm(lora=True, mode="drain", noise=NOISE)
    engine.load(policy(1), ADAPTER, WAIT)
    stub.holding = True
    old = engine.submit(ask(PROMPT))
    wait_for(lambda: len(stub.asked("/inference/v1/generate")) == 1)
    with pytest.raises(TimeoutError, match=r"weights.timeout, weights.update_mode drain"):
        engine.load(policy(5), ADAPTER, 0.2)
    assert engine.status().policy == policy(1)
    assert len(stub.asked("/collective_rpc")) == 1
    stub.release()
    assert old.result(WAIT)[0].segments == [(0, 1, 1)]
    engine.load(policy(5), ADAPTER, WAIT)
    assert sample(engine, ask(PROMPT))[0][0].segments == [(0, 1, 5)]


def test_norms_that_can_not_be_set_leave_a_dirty_engine(make_vllm: MakeVllm, stub: StubServer) -> None:
    """In the server's words; the next version makes it clean."""
    engine = make_vllm(lora=True, noise=NOISE)
    stub.calls.clear()
    stub.refuse["/collective_rpc"] = (500, {"error": {"message": "no weights ['model.norm.weight']"}})
    with pytest.raises(ValueError, match="no weights"):
        engine.load(policy(1), ADAPTER, WAIT)
    assert (engine.status().state, engine.status().policy) == ("dirty", None)
    assert "/resume" not in stub.paths()
    stub.refuse.clear()
    engine.load(policy(2), ADAPTER, WAIT)
    assert engine.status().policy == policy(2)


def test_a_worker_overwrites_its_norms_by_name_or_none_of_them(tmp_path: Path) -> None:
    """What the server runs: a weight of another name or shape leaves all as they are."""
    model = nn.ModuleDict({"norm": nn.RMSNorm(4), "other": nn.RMSNorm(4)})

    class Worker(Extension):
        get_model: Any = SimpleNamespace

    worker = Worker()
    worker.get_model = lambda: model
    for strange in ({"gone.weight": torch.zeros(4)}, {"other.weight": torch.zeros(5)}):
        save_file({"norm.weight": torch.zeros(4), **strange}, tmp_path / "norms.safetensors")
        with pytest.raises(ValueError, match=rf"inference.noise: .* \['{next(iter(strange))}'\]"):
            worker.set_norms(str(tmp_path / "norms.safetensors"))
        assert model["norm"].weight.tolist() == [1.0] * 4
    save_file({"norm.weight": torch.arange(4.0)}, tmp_path / "norms.safetensors")
    worker.set_norms(str(tmp_path / "norms.safetensors"))
    assert model["norm"].weight.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model["other"].weight.tolist() == [1.0] * 4
