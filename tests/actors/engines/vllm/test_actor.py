"""The inference actor around a vLLM engine whose weights are not its own any more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import EngineStoppedError
from actors.engines.vllm.engine import VllmEngine
from actors.inference.loop import InferenceActor
from actors.ledger.weight_updates import MAX_FAILURES
from actors.telemetry.metrics import Metrics
from bus.weights import Weights
from schemas.messages import InferenceDirective, Manifest, WeightMember, WeightUpdate
from tests.actors.engines.engines import WAIT, ask, policy
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
    """The heartbeat says `quarantined`; the version that the directive still names is loaded; then it says `clean`."""
    engine, config = make_vllm(lora=True), ring_config(tmp_path, "inproc")
    actor = InferenceActor(config, "inference-0", Metrics("inference"), lambda: engine, lambda _: Receiver())
    manifest = Manifest(policy=policy(4), channel="filesystem", content="adapter", uri="/x", digest="d", num_bytes=1)
    fields = {"update_id": 1, "manifest": manifest, "phase": "running"}
    states: list[str] = []
    monkeypatch.setattr(actor.membership, "report", lambda **told: states.append(told.get("engine_state", "")))
    monkeypatch.setattr(actor.membership, "latest", lambda: InferenceDirective.model_construct(update=None, **fields))
    actor.follow(engine)
    stub.label = "somebody"
    future = engine.submit(ask([1, 5]))
    wait_for(lambda: engine.status().state == "quarantined")
    actor.report(engine)
    actor.follow(engine)
    assert [state for state in states if state] == ["clean", "quarantined", "clean"]
    assert future.result(WAIT)[0].segments == [(0, 1, 4)]
    assert len(stub.asked("/v1/load_lora_adapter")) == 2


class Scene:
    """An actor of the rendezvous channel with all that its heartbeats have said, and the directive that it is told."""

    def __init__(self, engine: VllmEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = ring_config(folder, "inproc", weights={"channel": "rendezvous"})
        self.actor = InferenceActor(config, "inference-0", Metrics("inference"), lambda: engine, lambda _: Receiver())
        self.engine, self.heartbeat = engine, dict[str, Any]()
        manifest = Manifest(
            policy=policy(4), channel="rendezvous", content="adapter", uri="tcp://a:1", digest="d", num_bytes=1
        )
        self._directive = {"update_id": 1, "manifest": manifest, "phase": "running", "update": None}
        monkeypatch.setattr(self.actor.membership, "report", lambda **told: self.heartbeat.update(told))
        monkeypatch.setattr(
            self.actor.membership, "latest", lambda: InferenceDirective.model_construct(**dict(self._directive))
        )

    def named(self, update: str) -> None:
        """The directive names this one, for this engine alone; the actor takes a turn."""
        member = WeightMember(boot_id=self.actor.membership.boot_id, num_ranks=1)
        self._directive["update"] = WeightUpdate(
            update=update, process_group=update, policy=policy(4), members=[member]
        )
        self.actor.follow(self.engine)


def test_a_quarantined_engine_serves_no_policy_and_takes_the_next_update_that_names_it(
    make_vllm: MakeVllm, stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By broadcast it can't help itself: its heartbeat is that of a joiner, and ends the update that it was in.

    Without that the packer would wait for ever for the success of one whose success it had not heard of.
    """
    scene = Scene(make_vllm(lora=True), tmp_path, monkeypatch)
    scene.named("3.1")
    assert (scene.heartbeat["engine_state"], scene.heartbeat["policy"]) == ("clean", policy(4))
    assert scene.heartbeat["update_seconds"].keys() == {"pause", "wire", "load"}
    stub.label = "somebody"
    future = scene.engine.submit(ask([1, 5]))
    wait_for(lambda: scene.engine.status().state == "quarantined")
    scene.actor.report(scene.engine)
    assert (scene.heartbeat["engine_state"], scene.heartbeat["policy"]) == ("quarantined", None)
    assert scene.heartbeat["update_seconds"] == {}
    assert scene.heartbeat["failed_update"].update == "3.1"
    scene.named("3.1")
    assert scene.heartbeat["policy"] is None  # an update is entered once
    scene.named("3.2")
    assert (scene.heartbeat["engine_state"], scene.heartbeat["policy"]) == ("clean", policy(4))
    assert future.result(WAIT)[0].segments == [(0, 1, 4)]


def test_an_engine_that_can_load_nothing_ends_and_says_why(
    make_vllm: MakeVllm, stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packer names it no more after so many failures; a new process is named again."""
    scene = Scene(make_vllm(lora=True), tmp_path, monkeypatch)
    stub.refuse["/v1/load_lora_adapter"] = (500, {"error": {"message": "rank 64 is too large"}})
    for number in range(1, MAX_FAILURES):
        scene.named(f"3.{number}")
        assert scene.heartbeat["failed_update"].update == f"3.{number}"
    with pytest.raises(EngineStoppedError, match=r"3 times in a row: .* rank 64 is too large"):
        scene.named(f"3.{MAX_FAILURES}")
