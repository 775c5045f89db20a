"""The inference actor around a vLLM engine whose weights are not its own any more."""

from pathlib import Path
from typing import Any

import torch

from actors.inference import InferenceActor
from actors.telemetry.metrics import Metrics
from bus.weights import Weights
from schemas.messages import InferenceState, Manifest
from tests.actors.engines.engines import ask, policy
from tests.actors.engines.vllm.conftest import MakeVllm
from tests.actors.engines.vllm.stub import StubServer
from tests.actors.engines.vllm.test_process import wait_for
from tests.ring.harness import ring_config


class Receiver:
    """An adapter, whatever is asked for."""

    def receive(self, *_: Any) -> Weights:
        """One small tensor."""
        return Weights("adapter", {"a": torch.zeros(1)}, {"adapter_config.json": "{}"})


def test_a_quarantined_engine_says_so_and_loads_again(
    make_vllm: MakeVllm, stub: StubServer, tmp_path: Path, monkeypatch: Any
) -> None:
    """The beat says `quarantined`, the version that State still names is loaded, and the beat says `clean`."""
    engine, config = make_vllm(lora=True), ring_config(tmp_path, "inproc")
    actor = InferenceActor(config, "inference-0", Metrics("inference"), lambda: engine, lambda _: Receiver())
    manifest = Manifest(policy=policy(4), channel="filesystem", content="adapter", uri="/x", digest="d", num_bytes=1)
    fields = {"update_id": 1, "manifest": manifest, "phase": "running"}
    states: list[str] = []
    monkeypatch.setattr(actor.membership, "report", lambda **told: states.append(told.get("engine_state", "")))
    monkeypatch.setattr(actor.membership, "latest", lambda: InferenceState.model_construct(update=None, **fields))
    actor._follow(engine)
    stub.label = "somebody"
    future = engine.submit(ask([1, 5]))
    wait_for(lambda: engine.status().state == "quarantined")
    actor._report(engine)
    actor._follow(engine)
    assert [state for state in states if state] == ["clean", "quarantined", "clean"]
    assert future.result(10)[0].segments == [(0, 1, 4)]
    assert len(stub.asked("/v1/load_lora_adapter")) == 2
