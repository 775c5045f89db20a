"""The whole ring over tcp with keys: it trains as ever, while strangers knock and keys are rotated."""

import threading

import pytest
import zmq

from bus import keys
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    go_on,
    held_reward,
    processes,
    ring,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
    watching,
)
from tests.strangers import knock


@pytest.mark.slow
def test_run_with_keys_ends_with_nothing_trained_twice_while_strangers_knock_and_keys_are_rotated(tmp_path):
    """12 steps of 3 groups; a peer without a key keeps knocking; a rotation starts after step 2, ends after 4."""
    folder = tmp_path / "keys"
    keys.make(folder)
    config = ring_config(
        tmp_path,
        "tcp",
        bus={"keys": str(folder)},
        trainer={"max_steps": 12},
        inference={"engine": {"type": "fake", "token_seconds": 0.005}},
    )
    done = threading.Event()

    def knocks() -> None:
        while not done.wait(0.02):
            with zmq.Context.instance().socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.connect(config.bus.control)
                knock(stranger, [b"heartbeat"])
                stranger.poll(50)

    with ring(config) as run, watching(config) as watcher:
        run.start()
        threading.Thread(target=knocks, daemon=True).start()
        wait_until(lambda: watcher.progress().get("step", 0) >= 2, "step 2")
        keys.rotate(folder)
        wait_until(lambda: watcher.progress().get("step", 0) >= 4, "step 4")
        keys.finish(folder)
        run.wait(PATIENCE_SECONDS)
        done.set()
        packer = run["packer-0"]
        refused = [counts.refused.total() for counts in packer.actor.edges]
    assert max(refused) > 5
    said = check_promise(config)
    assert said.trained == list(range(36))
    assert said.dropped == {}
    assert summary_of(config)["ledger"]["trained_twice"] == 0


@pytest.mark.slow
def test_processes_with_keys_train_and_count_those_they_refuse(tmp_path):
    """`actors up` on tcp with keys ends with 0; a stranger that knocks meanwhile is in the packer's metrics."""
    folder = tmp_path / "keys"
    keys.make(folder)
    config = ring_config(
        tmp_path,
        "tcp",
        bus={"keys": str(folder)},
        reward=held_reward(tmp_path, calls=6),  # the run does not end before the stranger has knocked
        trainer={"max_steps": 6},
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 1, "the first step")
        with zmq.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(config.bus.control)
            knock(stranger, [b"heartbeat"])
            name = "grpo_bus_refused_connections_total"
            samples = [f'{name}{{reason="{reason}"}}' for reason in ("plaintext", "incomplete")]
            wait_until(lambda: sum(scraped(config, "packer-0", each) for each in samples), "the stranger is counted")
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0
    assert summary_of(config)["ledger"]["trained_twice"] == 0
    check_promise(config)
