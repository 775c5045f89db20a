"""Numbers of processes that follow the load, in real runs under `actors up`."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from schemas.config import RunConfig
from tests.ports import free_port
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    own_reward,
    processes,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow


def lines_of(config: RunConfig, log: str) -> list[dict[str, Any]]:
    """All lines of a log."""
    return [json.loads(line) for line in (config.output / "logs" / log).read_text().splitlines()]


def told(config: RunConfig, event: str) -> list[dict[str, Any]]:
    """Lines of up.log about an event."""
    return [line for line in lines_of(config, "up.log") if line["event"] == event]


def numbers(config: RunConfig) -> list[tuple[str, int, int]]:
    """All changes so far."""
    return [(line["role"], line["before"], line["wanted"]) for line in told(config, "scaled")]


def config_of(folder: Path, gate: Path, **sections: Any) -> RunConfig:
    """Rewards of a second for one group at a time while there is a gate; a second reward actor may come."""
    gate.touch()
    return ring_config(
        folder,
        inference={"engine": {"type": "fake", "token_seconds": 0.02}},
        reward=own_reward("slow_while", gate=str(gate)) | {"max_concurrent_groups": 1},
        trainer={"max_steps": 100_000, "checkpoint": {"interval": 20}},
        eval={"num_prompts": 0},
        scale={"window": 1.0, "reward": {"max": 2, "price": 0.5, "max_cost": 1.2}},
        telemetry={"metrics_port": 0},
        **sections,
    )


@pytest.mark.long
def test_reward_actors_come_while_rewards_are_slow_and_go_afterwards(tmp_path: Path) -> None:
    """Rewards of a second for one group at a time: a second actor comes; then it drains. Nothing is lost or twice."""
    gate = tmp_path / "gate"
    config = config_of(tmp_path, gate)
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: "reward-1" in children(up.pid), "a second reward actor")
        wanted = 'grpo_packer_scale_wanted{role="reward"}'
        wait_until(lambda: scraped(config, "packer-0", wanted) == 2, "the metric says so")
        gate.unlink()
        wait_until(lambda: "reward-1" not in children(up.pid), "the second reward actor is given back")
        assert numbers(config)[:2] == [("reward", 1, 2), ("reward", 2, 1)]
        step = steps_recorded(config)
        wait_until(lambda: steps_recorded(config) > step, "a step afterwards")
        os.kill(up.pid, signal.SIGTERM)
        assert up.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM, started.text("up")
        config = config.with_steps(steps_recorded(config) + 3)
        assert started.up(f"trainer.max_steps={config.trainer.max_steps}").wait(PATIENCE_SECONDS) == 0
        text = started.text("up")
    first, second = (line["because"] for line in told(config, "scaled")[:2])
    assert first.startswith("the trainer waits ")
    assert first.endswith(" of 1 reward are busy")
    assert second.startswith("for 6 windows at most ")
    assert f"reward: 1 → 2, since {first}" in text
    assert {line["how"] for line in told(config, "ended") if line["child"] == "reward-1"} == {"with exit code 0"}
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["trained_twice"] == 0


@pytest.mark.long
def test_a_node_starts_and_gives_back_what_the_run_wants_of_it(tmp_path: Path) -> None:
    """A node that has nothing to do at the start, gets a reward actor, gives it back, and ends with the run."""
    gate = tmp_path / "gate"
    config = config_of(tmp_path, gate, launch={"place": {"reward": [0, 1], "rollout": [0], "inference": [0]}})
    bus = config.bus.model_copy(update={"control": f"tcp://127.0.0.1:{free_port()}"})
    config = config.model_copy(update={"bus": bus})
    with processes(config, tmp_path) as started:
        hosts = ("--nodes", "127.0.0.1,127.0.0.2", str(started.config_path))
        first, second = (started.spawn(f"node-{rank}", "node", "--rank", str(rank), *hosts) for rank in (0, 1))
        wait_until(lambda: "reward-1" in children(second.pid), "a second reward actor")
        events = [line["event"] for line in lines_of(config, "node-1.log")]
        assert events.index("scaled") < events.index("started")
        gate.unlink()
        wait_until(lambda: not children(second.pid), "it is given back")
        assert second.poll() is None
        os.kill(first.pid, signal.SIGTERM)
        os.kill(second.pid, signal.SIGTERM)
        assert (first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)) == (143, 143), started.text("node-1")
        config = config.with_steps(steps_recorded(config) + 3)
        steps = f"trainer.max_steps={config.trainer.max_steps}"
        both = [started.spawn(f"node-{rank}", "node", "--rank", str(rank), *hosts, steps) for rank in (0, 1)]
        assert [node.wait(PATIENCE_SECONDS) for node in both] == [0, 0], started.text("node-1")
    assert check_promise(config).dropped == {}


def test_an_engine_that_gets_notice_finishes_what_it_samples_and_nothing_is_sampled_twice(tmp_path: Path) -> None:
    """SIGTERM under load: its completions end there, new ones go to the other engine, and no attempt is repeated."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.2}, "drain_timeout": 100.0},
        trainer={"max_steps": 5},
        eval={"num_prompts": 0},
    )
    running = "grpo_inference_running_completions"
    with processes(config, tmp_path) as started:
        for name in ("packer-0", "trainer-0", "reward-0", "inference-0", "inference-1"):
            started.run(name)
        served = 'grpo_packer_engines{state="clean"}'
        wait_until(lambda: scraped(config, "packer-0", served) == 2, "both engines serve")
        started.run("rollout-0")
        wait_until(lambda: scraped(config, "inference-1", running), "the engine has work")
        started.processes["inference-1"].terminate()
        assert started.processes["inference-1"].wait(PATIENCE_SECONDS) == 0, started.text("inference-1")
        assert started.processes["packer-0"].wait(PATIENCE_SECONDS) == 0, started.text("packer-0")
        last_words = started.text("inference-1")
        failures = started.text("rollout-0")
    assert "leaving with work unfinished" not in last_words
    assert "engine failed" not in failures
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0
