"""Which heartbeats wake the packer, and which wait for its next round."""

import time
from typing import Any

import numpy as np
import pytest

from actors.packer import inflow
from actors.packer.inflow import BeatHeard, Inflow, PeerLost
from schemas.messages import (
    AttemptFailure,
    Heartbeat,
    InferenceHeartbeat,
    ObserverHeartbeat,
    PolicyVersion,
    RewardHeartbeat,
    RolloutHeartbeat,
)

NONE = np.zeros((0, 2), np.int64)
WAIT = 0.2
FAILURE = AttemptFailure(ordinal=3, attempt=1, reason="timeout", detail="an engine is away")


def common(name: str, sequence: int, **changes: Any) -> dict[str, Any]:
    """Fields of all heartbeats."""
    return {"run": "r", "term": 1, "name": name, "boot_id": "1", "sequence": sequence, "phase": "running"} | changes


def rollout(sequence: int, number: int = 0, **changes: Any) -> RolloutHeartbeat:
    """A rollout actor without work, unless said otherwise."""
    fields = {"free_slots": 4, "failures": [], "holds": NONE} | changes
    return RolloutHeartbeat(**common(f"rollout-{number}", sequence), **fields)


def reward(sequence: int, **changes: Any) -> RewardHeartbeat:
    """A reward actor without work, unless said otherwise."""
    fields = {"address": "tcp://10.0.0.1:7000", "load": 0, "failures": [], "holds": NONE} | changes
    return RewardHeartbeat(**common("reward-0", sequence), **fields)


def engine(sequence: int, **changes: Any) -> InferenceHeartbeat:
    """An engine that serves version 1, unless said otherwise."""
    fields = {
        "url": "http://10.0.0.1:8000",
        "engine_state": "clean",
        "policy": PolicyVersion(lineage=1, version=1),
        "load": 0,
        "generated_tokens": 0,
        "holds_two_versions": False,
        "update_seconds": {},
    }
    return InferenceHeartbeat(**common("inference-0", sequence), **fields | changes)


def heard(heartbeat: Heartbeat) -> BeatHeard:
    """The heartbeat as an event."""
    return BeatHeard(f"{heartbeat.name}/{heartbeat.boot_id}", heartbeat, float(heartbeat.sequence))


def wakes(first: Heartbeat, second: Heartbeat) -> bool:
    """Whether a heartbeat after another ends the wait for the next round; either way, the round has it."""
    events = Inflow()
    events.heard(heard(first))
    assert events.take(WAIT) == [heard(first)]
    events.heard(heard(second))
    started = time.monotonic()
    assert events.take(WAIT) == [heard(second)]
    return time.monotonic() - started < WAIT / 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (rollout(1), rollout(2)),
        (rollout(1, failures=[FAILURE]), rollout(2, failures=[FAILURE])),
        (reward(1), reward(2, load=3, calls=9, scored=8, busy_seconds=1.5)),
        (engine(1), engine(2, load=3, generated_tokens=99, busy_seconds=1.5)),
    ],
)
def test_a_heartbeat_that_says_nothing_new_waits_for_the_next_round(first: Heartbeat, second: Heartbeat) -> None:
    """Of a thousand idle actors the packer would otherwise be woken a thousand times a second."""
    assert not wakes(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (rollout(1), rollout(2, free_slots=3)),
        (rollout(1), rollout(2, failures=[FAILURE])),
        (rollout(1), rollout(2, holds=np.array([[3, 1]]))),
        (rollout(1, holds=np.array([[3, 1]])), rollout(2)),
        (rollout(1), rollout(2).model_copy(update={"phase": "done"})),
        (rollout(1), rollout(2).model_copy(update={"term": 2})),
        (reward(1), reward(2, address="tcp://10.0.0.2:7000")),
        (reward(1), reward(2, late_calls=1)),
        (engine(1), engine(2, engine_state="dirty")),
        (engine(1), engine(2, policy=PolicyVersion(lineage=1, version=2))),
        (engine(1), engine(2, update_progress=1)),
        (engine(1), engine(2, error="out of memory")),
        (rollout(1), RewardHeartbeat(**common("rollout-0", 2), address="", load=0, failures=[], holds=NONE)),
        (ObserverHeartbeat(**common("top", 1)), ObserverHeartbeat(**common("top", 2))),
    ],
)
def test_a_heartbeat_that_says_anything_new_wakes_the_packer(first: Heartbeat, second: Heartbeat) -> None:
    """So does every heartbeat of a screen, which wants new figures."""
    assert wakes(first, second)


@pytest.mark.parametrize("number", [1, 30, 1000])
def test_the_next_round_has_all_that_waited_behind_what_is_new(number: int) -> None:
    """A lost peer comes first, so that an older heartbeat of the process never counts after it as a new one."""
    events = Inflow()
    for sequence in (1, 2, 3):
        for each in range(number):
            events.heard(heard(rollout(sequence, each)))
    events.put(PeerLost("rollout-0/1"))
    taken = events.take(WAIT)
    assert taken[number] == PeerLost("rollout-0/1")
    assert [event.heartbeat.sequence for event in taken if isinstance(event, BeatHeard)] == [
        sequence for sequence in (1, 2, 3) for _ in range(number)
    ]
    assert events.take(0.0) == []


def test_what_is_remembered_of_processes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes that come and go the oldest is forgotten; its next heartbeat counts as new."""
    monkeypatch.setattr(inflow, "MAX_REMEMBERED", 10)
    events = Inflow()
    for each in range(30):
        events.heard(heard(rollout(1, each)))
    events.take(0.0)
    for each in (29, 0):
        events.heard(heard(rollout(2, each)))
    # the one that is new comes first
    assert events.take(0.0) == [heard(rollout(2, 0)), heard(rollout(2, 29))]
