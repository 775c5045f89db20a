"""Runs with a real vLLM lose nothing when a server or an engine goes (`make test-system`)."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config import RunConfig
from tests.actors.engines.vllm.conftest import ServableModel
from tests.actors.engines.vllm.runs import VLLM, Say
from tests.processes import running
from tests.ring.harness import (
    Processes,
    check_promise,
    children,
    held_by,
    processes,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STARTUP = 240.0
"""Seconds until a run with vLLM makes its first steps."""


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """GiB for keys and values."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def faulty_config(folder: Path, model: Path, lora: bool = False, **sections: Any) -> RunConfig:
    """A tiny real model, all weights, or an adapter, by broadcast in buckets that hold a tensor each."""
    weights = {"channel": "rendezvous", "bucket_bytes": 64, "timeout": 60.0, "directory": str(folder / "weights")}
    parts: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"} | ({"lora": {"rank": 8}} if lora else {}),
        "inference": {"engine": VLLM},
        "weights": weights,
        "trainer": {"max_steps": 40, "checkpoint": {"interval": 20}},
    }
    return ring_config(folder, **parts | sections)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`faults("inference-0@inference.received", "SIGSTOP")`: arms a point; returns the file that is there when hit."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("GRPO_FAULTS", str(folder))

    def arm(point: str, how: str) -> Path:
        (folder / point).write_text(how)
        return folder / f"{point}.hit"

    return arm


def core_of(actor: int) -> int:
    """Pid of the engine core below an inference actor: actor, guard, HTTP server, core."""
    below, found = {actor}, 0
    for process in running():
        if process.parent in below:
            below.add(process.pid)
            found = process.pid if "EngineCore" in " ".join(process.command) else found
    return found


PIPELINE = 3
"""Steps that may still come of what was sampled before a fault."""


def seconds_lost(config: RunConfig, what: str, timeout: float) -> float:
    """Wait until new work has gone through all of the ring; the longest pause between two steps since the fault."""
    before = steps_recorded(config)
    wait_until(lambda: steps_recorded(config) > before + PIPELINE, f"steps after {what}", timeout)
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines[max(0, before - 1) :]]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_a_vllm_that_is_killed_costs_time_and_nothing_else(
    servable_model: ServableModel, tmp_path: Path, faults: Callable[[str, str], Path], say: Say
) -> None:
    """kill -9 of its core in the middle of requests, and again in the middle of an update: a new server takes over."""
    config = faulty_config(tmp_path, servable_model(0))
    with processes(config, tmp_path) as started:
        up = started.up()
        actor = lambda: children(up.pid)["inference-0"]  # noqa: E731
        wait_until(lambda: steps_recorded(config) >= 3, "step 3", STARTUP)
        wait_until(lambda: held_by(config, "rollout-0"), "a group that is being sampled")
        os.kill(core_of(actor()), signal.SIGKILL)
        sampling = seconds_lost(config, "the death of a sampling vLLM", STARTUP)

        hit = faults("inference-0@inference.received", "SIGSTOP")
        wait_until(hit.exists, "an update")
        core = core_of(actor())
        os.kill(core, signal.SIGSTOP)  # so that the update is under way for as long as it takes to kill it
        os.kill(actor(), signal.SIGCONT)
        time.sleep(0.5)
        os.kill(core, signal.SIGKILL)
        updating = seconds_lost(config, "the death of an updating vLLM", STARTUP)
        assert up.wait(STARTUP) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    ledger = summary_of(config)["ledger"]
    say(
        f"kill -9 while sampling: {sampling:.1f} s between two steps; while updating: {updating:.1f} s; copies "
        f"dropped {ledger['copies_dropped']}, reissued {ledger['reissued']}"
    )


def test_a_trainer_that_is_killed_takes_the_shared_base_along_and_costs_time_alone(
    servable_model: ServableModel, tmp_path: Path, say: Say
) -> None:
    """kill -9 of the trainer whose memory vLLM has mapped (`up.share_base`): a new server maps the next trainer's."""
    config = faulty_config(
        tmp_path,
        servable_model(0),
        lora=True,
        trainer={"max_steps": 20, "checkpoint": {"interval": 5}},
        up={"share_base": True},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 6, "step 6", STARTUP)
        first = children(up.pid)["inference-0"]
        os.kill(children(up.pid)["trainer-0"], signal.SIGKILL)
        lost = seconds_lost(config, "the death of the trainer", STARTUP)
        assert children(up.pid)["inference-0"] != first
        assert up.wait(STARTUP) == 0, started.text("up")
    assert check_promise(config).dropped == {}
    say(f"kill -9 of the trainer with the shared base: {lost:.1f} s between two steps")


@pytest.fixture
def two_engines(servable_model: ServableModel, tmp_path: Path, faults: Any) -> Iterator[tuple[RunConfig, Processes]]:
    """A run that has begun, with vLLM as inference-0 and the embedded engine as inference-1."""
    config = faulty_config(tmp_path, servable_model(0), trainer={"max_steps": 200, "checkpoint": {"interval": 50}})
    with processes(config, tmp_path) as started:
        tree = yaml.safe_load(started.config_path.read_text())
        tree["inference"]["engine"] = {"type": "embedded", "max_sequence_len": 64}
        other = tmp_path / "embedded.yaml"
        other.write_text(yaml.safe_dump(tree))
        for name in ("packer-0", "inference-0"):
            started.run(name)
        started.spawn("inference-1", "run", "inference", "--config", str(other), "--name", "inference-1")
        for engine in ("inference-0", "inference-1"):  # else one of them would carry the run to its end alone
            wait_until(lambda name=engine: "engine serves" in started.text(name), f"{engine} is there", STARTUP)
        for name in ("trainer-0", "reward-0", "rollout-0"):
            started.run(name)
        yield config, started


def test_an_engine_frozen_in_the_middle_of_a_broadcast_holds_nobody_up(
    two_engines: tuple[RunConfig, Processes], faults: Callable[[str, str], Path], say: Say
) -> None:
    """First the embedded engine, then vLLM's: the other one and the trainer go on, and the frozen one comes back."""
    config, started = two_engines

    def version(name: str) -> float:
        return scraped(config, name, "grpo_inference_policy_version")

    wait_until(lambda: min(version("inference-0"), version("inference-1")) >= 2, "both serve", STARTUP)
    lost = {}
    for victim in ("inference-1", "inference-0"):
        hit = faults(f"{victim}@inference.receiving", "SIGSTOP")
        wait_until(hit.exists, "the fault", 30.0)
        lost[victim] = seconds_lost(config, f"the freezing of {victim}", config.weights.timeout + 60.0)
        assert lost[victim] < config.weights.timeout
        started.processes[victim].send_signal(signal.SIGCONT)
        behind = steps_recorded(config)
        wait_until(lambda name=victim, v=behind: version(name) > v, f"{victim} serves again", 60.0)
    assert started.processes["packer-0"].wait(STARTUP) == 0, started.text("packer-0")
    assert check_promise(config).dropped == {}
    ledger = summary_of(config)["ledger"]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in lost.items())
    say(f"frozen in a broadcast: {seconds} between two steps; copies dropped {ledger['copies_dropped']}")
