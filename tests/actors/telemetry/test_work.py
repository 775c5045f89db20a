"""Work of engines and reward actors between two steps."""

from typing import Any

import numpy as np

from actors.telemetry.work import COLUMNS, Work
from schemas.messages import InferenceHeartbeat, RewardHeartbeat, RolloutHeartbeat

COMMON: dict[str, Any] = {"run": "r", "boot_id": "b", "sequence": 1, "phase": "running"}
NO_HOLDS = np.zeros((0, 2), np.int64)


def engine(tokens: int, seconds: float) -> InferenceHeartbeat:
    """Report of an engine."""
    values: dict[str, Any] = {"engine_state": "clean", "policy": None, "load": 0, "holds_two_versions": False}
    return InferenceHeartbeat(
        name="e", url="", update_seconds={}, generated_tokens=tokens, busy_seconds=seconds, **values, **COMMON
    )


def reward(scored: int, seconds: float) -> RewardHeartbeat:
    """Report of a reward actor."""
    values: dict[str, Any] = {"address": "", "load": 0, "failures": [], "holds": NO_HOLDS}
    return RewardHeartbeat(name="r", scored=scored, busy_seconds=seconds, **values, **COMMON)


def test_only_the_increase_counts() -> None:
    """Heartbeats repeat all work since the start of their process; late ones change nothing."""
    work = Work()
    work.heard("e/1", engine(10, 1.0))
    work.heard("e/1", engine(30, 2.5))
    work.heard("e/1", engine(10, 1.0))
    work.heard("e/2", engine(5, 0.5))
    work.heard("r/1", reward(4, 0.2))
    work.heard("a/1", RolloutHeartbeat(name="a", free_slots=1, failures=[], holds=NO_HOLDS, **COMMON))
    assert work.since_step == dict(zip(COLUMNS, (35.0, 3.0, 4.0, 0.2), strict=True))


def test_a_step_starts_from_zero() -> None:
    """The next line has the work since the last one."""
    work = Work()
    work.heard("e/1", engine(10, 1.0))
    work.end_step()
    work.heard("e/1", engine(14, 1.5))
    assert work.since_step == dict(zip(COLUMNS, (4.0, 0.5, 0.0, 0.0), strict=True))
