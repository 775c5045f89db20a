"""The whole ring as threads, on every transport."""

import pytest

from schemas.messages import DIRECTIVE_KINDS, HEARTBEAT_KINDS
from tests.dropping import DroppingTransport
from tests.ring.harness import (
    PATIENCE_SECONDS,
    TRANSPORTS,
    Stand,
    check_promise,
    own_reward,
    ring,
    ring_config,
    summary_of,
    wait_until,
    watching,
)

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.slow
def test_run_ends_by_itself_with_nothing_lost_and_nothing_trained_twice(tmp_path, transport):
    """8 steps of 3 groups: 24 ordinals trained once each, say ledger and witnesses; both evaluations are there."""
    config = ring_config(tmp_path, transport)
    with ring(config) as run:
        run.start().wait()
    said = check_promise(config)
    summary = summary_of(config)
    assert said.trained == list(range(24))
    assert said.dropped == {}
    assert summary["lag_max"] <= config.packer.max_async_level
    assert summary["eval_before"]["reverse_text"]["num_prompts"] == 3
    assert summary["eval_after"]["reverse_text"]["num_prompts"] == 3
    assert summary["eval_ledger"]["issued"] == summary["eval_ledger"]["trained"] == 6


@pytest.mark.slow
def test_slow_consumers_hold_the_run_up_and_nothing_else(tmp_path, transport):
    """Rewards that take longer than sampling, and a high-water mark of 1: the same result."""
    config = ring_config(
        tmp_path,
        transport,
        reward=own_reward("slow", seconds=0.02) | {"max_concurrent_groups": 1},
        bus={"high_water_mark": 1, "socket_buffer_bytes": 4096},
    )
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_late_joiners_get_work(tmp_path, transport):
    """A second rollout, reward and inference actor that join after the first step all take part."""
    config = ring_config(
        tmp_path,
        transport,
        trainer={"max_steps": 10},
        reward=own_reward("slow", seconds=0.02) | {"max_concurrent_groups": 1},
        inference={"engine": {"type": "fake", "token_seconds": 0.005}},
        eval={"num_prompts": 0},
    )
    stand = Stand(step=2)
    with ring(config) as run:
        run.start("packer-0", "inference-0", "reward-0", "rollout-0").start("trainer-0", learner=stand.learner)
        assert stand.reached.wait(PATIENCE_SECONDS)
        run.start("rollout-1", "reward-1", "inference-1")
        peers = lambda role: run["packer-0"].value("grpo_packer_peers", role=role)  # noqa: E731
        wait_until(lambda: all(peers(role) == 2 for role in ("rollout", "reward", "inference")), "all are there")
        wait_until(lambda: run["inference-1"].value("grpo_inference_policy_version") >= 1, "the engine serves")
        stand.go_on.set()
        run.wait(PATIENCE_SECONDS)
        assert run["rollout-1"].value("grpo_rollout_groups_total", purpose="train") > 0
        assert run["reward-1"].value("grpo_reward_groups_total", purpose="train") > 0
        assert run["inference-1"].value("grpo_inference_generated_tokens_total") > 0
    assert check_promise(config).dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "reward", "inference", "trainer"])
def test_peer_that_crashes_and_starts_again_costs_nothing_but_time(tmp_path, transport, kind):
    """Each kind of peer is crashed after step 2 and started anew under its name; no ordinal is lost or repeated."""
    config = ring_config(
        tmp_path,
        transport,
        trainer={"max_steps": 6},
        inference={"engine": {"type": "fake", "token_seconds": 0.005}},
        eval={"num_prompts": 0},
    )
    with ring(config) as run:
        run.start().crash(f"{kind}-0", step=2)
        run.start(f"{kind}-0").wait()
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_half_of_all_beats_and_states_may_be_lost(tmp_path, transport, monkeypatch):
    """Every kind of heartbeat and directive is lost with probability 0.5 for a whole run, which ends as it should."""
    control = DroppingTransport(0.5, seed=7)
    control.replace_sending(monkeypatch)
    config = ring_config(tmp_path, transport, trainer={"max_steps": 3}, bus={"beat_interval": 0.1, "lease": 3.0})
    with ring(config) as run, watching(config):
        run.start().wait(PATIENCE_SECONDS)
    kinds = {kind.kind for kind in (*HEARTBEAT_KINDS, *DIRECTIVE_KINDS)}
    # a table of neighbours is sent only until it has arrived
    assert kinds | {"neighbours"} == set(control.sent)
    assert kinds == set(control.lost) - {"neighbours"}
    assert check_promise(config).dropped == {}
