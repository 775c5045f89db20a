"""Weights by broadcast through whole runs: engines that come, freeze, die, and a trainer that starts anew."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bus.weights.rendezvous import RendezvousReceiver
from schemas.config import RunConfig
from schemas.messages import Manifest
from tests.marks import first_of
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    check_promise,
    children,
    go_on,
    held_reward,
    processes,
    ring,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

UPDATES = "grpo_inference_weight_updates_total"


def broadcast_config(folder: Path, transport: str = "ipc", channel: str = "rendezvous", **sections: Any) -> RunConfig:
    """Two engines, weights by broadcast, in buckets that hold a tensor each."""
    weights = {"channel": channel, "bucket_bytes": 64, "timeout": 20.0, "directory": str(folder / "weights")}
    return ring_config(folder, transport, **{"weights": weights, "up": {"inference": 2}} | sections)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("channel", ["rendezvous", "device"])
def test_two_engines_are_served_by_broadcast_and_nothing_is_written(tmp_path: Path, channel: str, level: int) -> None:
    """Every version that an engine serves came over the wire, or from the trainer's memory; lag is as with files."""
    config = broadcast_config(
        tmp_path, channel=channel, packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": level}
    )
    with ring(config) as running:
        running.start("packer-0", "trainer-0", "inference-0", "inference-1", "reward-0", "rollout-0")
        running.wait(PATIENCE_SECONDS)
        assert running["trainer-0"].value("grpo_trainer_weight_broadcasts_total", outcome="sent") >= 8
        loads = [running[name].value(UPDATES, outcome="loaded") for name in ("inference-0", "inference-1")]
    check_promise(config)
    assert min(loads) >= 2
    assert summary_of(config)["lag_max"] <= level
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
def test_an_engine_that_can_not_map_the_trainers_memory_is_served_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed update or two, and then none."""

    def refused(handle: Any) -> None:
        raise PermissionError(13, "Permission denied", handle["file"])

    monkeypatch.setattr("bus.weights.device_memory.opened", refused)
    config = broadcast_config(tmp_path, channel="device")
    with ring(config) as running:
        running.start("packer-0", "trainer-0", "inference-0", "inference-1", "reward-0", "rollout-0")
        running.wait(PATIENCE_SECONDS)
        engines = [running["inference-0"], running["inference-1"]]
        # an update that the other engine has ended may end this engine's own failure too
        assert all(engine.value(UPDATES, outcome="failed") <= 2 for engine in engines)
        assert sum(engine.value(UPDATES, outcome="failed") for engine in engines) >= 1
        assert min(engine.value(UPDATES, outcome="loaded") for engine in engines) >= 2
    check_promise(config)


@pytest.mark.slow
def test_an_update_that_an_engine_alone_has_given_up_is_followed_by_another_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer waits for an engine that never comes: without a word of it, for `weights.timeout`."""
    read, reads = RendezvousReceiver.read_header, itertools.count(1)

    def read_or_not(receiver: RendezvousReceiver, manifest: Manifest) -> Any:
        if next(reads) == 5:
            raise MemoryError("no room")
        return read(receiver, manifest)

    monkeypatch.setattr(RendezvousReceiver, "read_header", read_or_not)
    for_ever = 20 * PATIENCE_SECONDS
    config = broadcast_config(tmp_path, weights={"channel": "rendezvous", "timeout": for_ever})
    with ring(config) as running:
        running.start("packer-0", "trainer-0", "inference-0", "inference-1", "reward-0", "rollout-0")
        running.wait(PATIENCE_SECONDS)
        abandoned = [running[name].value(UPDATES, outcome="abandoned") for name in ("inference-0", "inference-1")]
    check_promise(config)
    assert max(abandoned) >= 1


def test_an_engine_that_is_to_leave_waits_no_longer_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in a broadcast of which nothing comes, and would stay there for `weights.timeout`."""
    reads, opened = threading.Event(), threading.Event()

    def read(receiver: RendezvousReceiver, manifest: Manifest) -> None:
        reads.set()
        assert opened.wait(20 * PATIENCE_SECONDS)

    monkeypatch.setattr(RendezvousReceiver, "read_header", read)
    config = broadcast_config(tmp_path, weights={"channel": "rendezvous", "timeout": 20 * PATIENCE_SECONDS})
    with ring(config) as running:
        running.start("packer-0", "trainer-0", "inference-0")
        assert reads.wait(PATIENCE_SECONDS)
        running["inference-0"].actor.drain()
        running["inference-0"].thread.join(PATIENCE_SECONDS)
        opened.set()
        assert not running["inference-0"].thread.is_alive()
        assert running["inference-0"].error is None


@pytest.mark.slow
def test_engines_that_come_and_go_cost_nothing(tmp_path: Path) -> None:
    """A run begins with one engine, gets a second one, and loses the first for good: the second carries it on."""
    slow = {"engine": {"type": "fake", "token_seconds": 0.02}}
    config = broadcast_config(
        tmp_path,
        trainer={"max_steps": 40, "checkpoint": {"interval": 10}},
        inference=slow,
        reward=held_reward(tmp_path, calls=18),  # so that the run outlasts the start of an engine, and the end of one
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        for name in ("packer-0", "trainer-0", "inference-0", "reward-0", "rollout-0"):
            started.run(name)
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        started.run("inference-1")
        wait_until(lambda: scraped(config, "inference-1", "grpo_inference_policy_version") >= 4, "it serves")
        started.processes["inference-0"].send_signal(signal.SIGTERM)
        assert started.processes["inference-0"].wait(PATIENCE_SECONDS) == 0, started.text("inference-0")
        go_on(tmp_path)
        assert started.processes["packer-0"].wait(PATIENCE_SECONDS) == 0, started.text("packer-0")
    assert check_promise(config).dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize("channel", first_of(["device", "rendezvous"]))
@pytest.mark.parametrize("how", first_of(["SIGKILL", "SIGSTOP"]))
def test_an_engine_lost_in_the_middle_of_a_broadcast_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, channel: str
) -> None:
    """The other engine and the trainer go on as soon as the lease is over; the same ordinals are trained."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(faults))
    slow = {"engine": {"type": "fake", "token_seconds": 0.01}}
    config = broadcast_config(
        tmp_path,
        channel=channel,
        trainer={"max_steps": 60, "checkpoint": {"interval": 10}},
        inference=slow,
        bus=SHORT_LEASE,
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        (faults / "inference-1@inference.receiving").write_text(how)
        hit = faults / "inference-1@inference.receiving.hit"
        wait_until(hit.exists, "the fault")
        before = steps_recorded(config)
        victim = children(up.pid).get("inference-1")
        wait_until(lambda: steps_recorded(config) >= before + 3, "three more steps")
        if how == "SIGSTOP" and victim is not None:
            os.kill(victim, signal.SIGCONT)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_a_trainer_that_starts_anew_broadcasts_from_a_new_store(tmp_path: Path) -> None:
    """The versions of the dead one went with it; engines serve on and take the first that is not older."""
    config = broadcast_config(
        tmp_path,
        trainer={"max_steps": 30, "checkpoint": {"interval": 4}},
        reward=held_reward(tmp_path, calls=24),
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 6, "step 6")
        os.kill(children(up.pid)["trainer-0"], signal.SIGKILL)
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}
