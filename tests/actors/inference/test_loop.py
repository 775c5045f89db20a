"""The inference actor around its engine: its port, and weights that can't be had."""

import socket
from typing import Any

import pytest
import torch

from actors.assembly import make_inference, replica_index
from actors.engines.fake import FakeEngine
from actors.engines.protocol import EngineStatus
from actors.inference.loop import InferenceActor
from actors.telemetry.metrics import Metrics
from bus.weights import Weights
from schemas.errors import ConfigError
from schemas.messages import Manifest, PolicyVersion, WeightUpdate
from tests.ring.harness import ring_config


class Receiver:
    """Gives weights, or the error that it was told to raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Any) -> Weights:
        """One small tensor."""
        if self.error:
            raise self.error
        return Weights("full", {"w": torch.zeros(1)})


def manifest(version: int) -> Manifest:
    """A published version."""
    policy = PolicyVersion(lineage=1, version=version)
    return Manifest(policy=policy, channel="filesystem", content="full", uri="/x", digest="d", num_bytes=1)


def test_weights_that_cannot_be_had_leave_the_old_version_serving(tmp_path):
    """Version 1 loads, version 2 does not: the engine serves 1, the failure is counted and said in the heartbeat."""
    config, metrics = ring_config(tmp_path, "inproc"), Metrics("inference")
    engine, receiver = FakeEngine(config.inference.engine), Receiver()
    actor = InferenceActor(config, "inference-0", metrics, lambda: engine, lambda boot_id: receiver)
    value = metrics.registry.get_sample_value
    assert value("grpo_inference_policy_version") == -1
    actor.updates.load(engine, manifest(1), None)
    receiver.error = OSError("pruned meanwhile")
    actor.updates.load(engine, manifest(2), None)
    assert engine.status().policy == PolicyVersion(lineage=1, version=1)
    assert value("grpo_inference_policy_version") == 1
    assert value("grpo_inference_weight_updates_total", {"outcome": "loaded"}) == 1
    assert value("grpo_inference_weight_updates_total", {"outcome": "failed"}) == 1
    actor.follow(engine)
    assert actor.membership.reported["error"] == "pruned meanwhile"
    engine.close()


def test_the_heartbeat_tells_the_work_of_the_engine(tmp_path, monkeypatch):
    """Tokens and seconds since the start, as the engine counts them."""
    config = ring_config(tmp_path, "inproc")
    engine = FakeEngine(config.inference.engine)
    actor = InferenceActor(config, "inference-0", Metrics("inference"), lambda: engine, lambda boot_id: Receiver())
    monkeypatch.setattr(engine, "status", lambda: EngineStatus(None, 2, 1, 40, 1.25))
    actor.report(engine)
    reported = actor.membership.reported
    assert (reported["generated_tokens"], reported["busy_seconds"], reported["load"]) == (40, 1.25, 3)
    engine.close()


def test_port_that_is_taken_is_a_configuration_error_by_name(tmp_path):
    """The message names both keys, the address, and what to set instead."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ring_config(tmp_path, "inproc", inference={"engine": {"type": "fake"}, "port": port})
        actor = make_inference(config, "inference-0", Metrics("inference"))
        with pytest.raises(ConfigError, match=rf"inference.host, inference.port: 127.0.0.1:{port} can't be bound"):
            actor.run()


def test_each_inference_actor_takes_the_next_port(tmp_path):
    """Port 9000 is that of inference-0, 9002 that of inference-2; 0 stays 0, any free one."""
    config = ring_config(tmp_path, "inproc", inference={"engine": {"type": "fake"}, "port": 9000})
    assert make_inference(config, "inference-2", Metrics("inference")).port == 9002
    assert make_inference(ring_config(tmp_path, "inproc"), "inference-2", Metrics("inference")).port == 0
    assert [replica_index(name) for name in ("inference-12", "engine", "a100-3")] == [12, 0, 3]
