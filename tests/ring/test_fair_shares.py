"""Runs of the whole ring with a slow and a fast environment (P15, P16)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.store import LedgerReader
from schemas.config import RunConfig
from tests.ring.harness import Ring, check_promise, ring, ring_config, wait_until
from tests.ring.test_environments import WORLDS

STEPS = 24


def config_of(folder: Path, gate: Path, **packer: Any) -> RunConfig:
    """A run with an environment that answers at once, and one that waits for the gate."""
    common = {"type": "python", "weight": 1.0}
    return ring_config(
        folder,
        environments=[
            common | {"name": "fast", "path": f"{WORLDS}:Letters"},
            common | {"name": "slow", "path": f"{WORLDS}:Gated", "options": {"gate": str(gate)}},
        ],
        rollout={"group_timeout": 300.0, "max_concurrent_groups": 8},
        reward={"functions": []},
        packer={"sequence_len": 512, "order": "arrival", "max_off_policy_steps": 100} | packer,
        trainer={"max_steps": STEPS, "checkpoint": {"interval": 3}},
        eval={"num_prompts": 0},
    )


def under_way(run: Ring) -> Counter[str]:
    """Groups under way by environment."""
    return Counter({label: len(ordinals) for label, ordinals in run.packer.machine.groups.under_way.items()})


def trained_by_environment(config: RunConfig) -> Counter[str]:
    """Trained groups, as the ledger has them."""
    ledger = LedgerReader.of(config.ledger_path)
    labels = {group.ordinal: group.example.environment for group in ledger.groups()}
    found = Counter(labels[ordinal] for step in ledger.steps() for ordinal in step.ordinals if ordinal in labels)
    ledger.close()
    return found


@pytest.mark.slow
def test_a_slow_environment_holds_up_no_group_of_a_fast_one(tmp_path: Path) -> None:
    """While all groups of the one wait, the other trains step after step; then all are trained, each once."""
    gate = tmp_path / "gate"
    gate.touch()
    config = config_of(tmp_path, gate)
    with ring(config) as run:
        run.start()
        machine = run.packer.machine
        wait_until(lambda: machine.trained_step >= STEPS - 8, "steps of the fast environment alone")
        # four of eight slots: its share
        assert under_way(run)["slow"] == 4
        labels = {group.example.environment for group in machine.groups.rows.values() if group.step}
        assert labels == {"fast"}
        gate.unlink()
        run.wait()
    said = check_promise(config)
    assert not said.dropped
    assert trained_by_environment(config)["slow"] >= 4


@pytest.mark.slow
def test_a_step_waits_for_a_group_that_would_be_too_old_later(tmp_path: Path) -> None:
    """Limit 4: the fast environment runs ahead as far as the slow groups can still be trained, and none is stale."""
    gate = tmp_path / "gate"
    gate.touch()
    config = config_of(tmp_path, gate, max_off_policy_steps=4)
    with ring(config) as run:
        run.start()
        machine = run.packer.machine
        wait_until(lambda: machine.trained_step >= 3 and len(machine.groups.settled) >= 3, "a step that waits")
        # groups of version 0 must be in step 5 at the latest, and three of them fill it
        assert machine.steps.last <= 4
        gate.unlink()
        run.wait()
    assert not check_promise(config).dropped
