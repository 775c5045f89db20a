"""The packer's metrics of the run, set from the machine's state and from the record.

A restarted packer shows correct values from the first scrape on, read from ledger and record. A reward of 0
would look like a collapse, and a counter starting at 0 like a jump.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.algorithms.scaling import ROLES as SCALED_ROLES
from actors.ledger import GroupState, Machine, payload_files
from actors.ledger.replies import heartbeats_by_role
from actors.telemetry.metrics import (
    DROPS,
    ENGINE_STATES,
    PURPOSES,
    STEP_GAUGES,
    TRAJECTORY_GAUGES,
    TURN_HOLDERS,
    Metrics,
)
from schemas.config import RunConfig
from schemas.messages import InferenceHeartbeat

ROLES = ("rollout", "reward", "trainer", "inference", "observer")
REWARD_COLUMN = "reward/"
"""Prefix of a reward function's column in metrics.jsonl."""


class Gauges:
    """Metrics of the run, shown by the packer.

    Args:
        config: configuration of the run.
        machine: the ledger's state machine.
        metrics: destination.
        ledger: path of the ledger's file, or `:memory:`.
    """

    def __init__(self, config: RunConfig, machine: Machine, metrics: Metrics, ledger: Path | str) -> None:
        self._machine, self._metrics, self._ledger = machine, metrics, ledger
        self._counted: dict[str, float] = {}
        """Value of each counter so far, by name and labels; as many entries as the table of metrics has."""
        metrics.set("grpo_packer_lag_budget_steps", config.packer.max_async_level)
        metrics.set("grpo_packer_max_steps", config.trainer.max_steps)
        metrics.set("grpo_packer_eval_version", -1)  # no evaluation yet; version 0 is the model as configured
        self._show_totals()

    def show_run(self) -> None:
        """Set the gauges of the run's current state."""
        machine, m = self._machine, self._metrics
        for purpose in PURPOSES:
            counts = machine.groups.counts(purpose)
            for state in GroupState:
                m.set("grpo_packer_groups", counts[state], purpose=purpose, state=state.value)
        m.set("grpo_packer_step", machine.trained_step)
        m.set("grpo_packer_durable_step", machine.durable_step)
        held = [machine.groups.rows[o].issued_at for ordinals in machine.groups.held_by.values() for o in ordinals]
        # issued_at is monotonic and not stored: ages start again with each packer
        m.set("grpo_packer_oldest_group_age_seconds", time.monotonic() - min(held) if held else 0.0)
        self._show_totals()
        served = machine.engines.served_version(machine.peers.all(InferenceHeartbeat))
        # -1: no engine takes new work; 0 is the model as configured
        m.set("grpo_packer_served_version", -1 if served is None else served)
        roles, states = heartbeats_by_role(machine), engine_states(machine)
        # every role and state, also without a peer: a gauge that is not set keeps its last value
        for role in ROLES:
            m.set("grpo_packer_peers", len(roles.get(role, [])), role=role)
        for engine_state in ENGINE_STATES:
            m.set("grpo_packer_engines", states[engine_state], state=engine_state)
        if machine.turns.enabled:
            holder = machine.turns.holder or "handover"
            for name in TURN_HOLDERS:
                m.set("grpo_packer_turn", int(name == holder), holder=name)
        if self._ledger != ":memory:":
            files = payload_files.num_bytes(payload_files.folder_of(Path(self._ledger)))
            m.set("grpo_packer_ledger_bytes", Path(self._ledger).stat().st_size + files)

    def show_scale(self, wanted: Mapping[str, int]) -> None:
        """Set the gauges of the processes wanted; NaN for a role that keeps its number."""
        for role in SCALED_ROLES:
            self._metrics.set("grpo_packer_scale_wanted", wanted.get(role, math.nan), role=role)

    def show_step(self, values: Mapping[str, Any]) -> None:
        """Set the gauges of the newest recorded step.

        Args:
            values: the step's line of metrics.jsonl; empty before the first step.
        """
        for name in STEP_GAUGES:
            if name in values:
                self._metrics.set(f"grpo_packer_{name}", _number(values[name]))
        for name in TRAJECTORY_GAUGES:
            # a step without trajectories has no such columns, and must not show those of an earlier step
            self._metrics.set(f"grpo_packer_{name}", _number(values.get(name)))
        for name, value in values.items():
            if name.startswith(REWARD_COLUMN):
                function = name.removeprefix(REWARD_COLUMN)
                self._metrics.set("grpo_packer_function_reward_mean", _number(value), function=function)

    def show_eval(self, version: int, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Set the gauges of the newest evaluation; `results` by environment, as in evals.jsonl."""
        self._metrics.set("grpo_packer_eval_version", version)
        for label, values in results.items():
            for name in ("exact_match", "mean_reward"):
                self._metrics.set(f"grpo_packer_eval_{name}", _number(values[name]), environment=label)

    def _show_totals(self) -> None:
        """Raise counters to the totals of the ledger."""
        groups = self._machine.groups
        for purpose in PURPOSES:
            self._count_up("grpo_packer_issued_total", groups.num_issued[purpose], purpose=purpose)
            for reason in DROPS:
                dropped = groups.dropped[purpose][reason]
                self._count_up("grpo_packer_drops_total", dropped, purpose=purpose, reason=reason)
        self._count_up("grpo_packer_copies_dropped_total", groups.counters["copies_dropped"])
        self._count_up("grpo_packer_reissued_total", groups.counters["reissued"])
        self._count_up("grpo_packer_resampled_in_vain_total", groups.counters["resampled_in_vain"])
        self._count_up("grpo_packer_holder_deaths_total", groups.counters["deaths"])

    def _count_up(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to a total counted elsewhere. A smaller total, as after a fork, changes nothing."""
        key = name + str(labels)
        # Prometheus takes a falling counter for a restart of the process, and would add it all again
        self._metrics.count(name, max(0.0, total - self._counted.get(key, 0.0)), **labels)
        self._counted[key] = total


def engine_states(machine: Machine) -> Counter[str]:
    """Count live engines by state. An engine excluded from updates counts as quarantined, whatever it says."""
    quarantined = machine.updates.quarantined
    engines = machine.peers.all(InferenceHeartbeat).values()
    return Counter(
        "quarantined" if heartbeat.boot_id in quarantined else heartbeat.engine_state for heartbeat in engines
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
