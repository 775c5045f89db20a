"""A run's progress as the packer tells it, for tests: 8 groups a step, 16 slots, and a trainer that waits 60 %."""

from typing import Any

PROGRESS: dict[str, Any] = {
    "phase": "running", "step": 12, "max_steps": 40, "reward": 0.5, "entropy": 1.25, "grad_norm": 0.375,
    "mismatch_kl": 1e-5, "lag": 1.0,
    "issued": 14, "settled": 2, "composed": 0, "tokens_per_second": 900.0, "idle": 0.6, "missing": [], "eval_open": 0,
    "peers": {"rollout": 1}, "dropped": {}, "failed_attempts": 0, "last_failure": "", "failure": "", "unwritten": [],
    "packer": "packer-0", "seconds": 65.0, "lease": 3.0, "served": 12, "durable": 10, "restarts": {}, "reissued": 0,
    "actors": [
        {"name": "inference-0", "kind": "inference", "age": 0.1, "phase": "running", "engine": "clean", "version": 12,
         "load": 200, "error": ""},
        {"name": "reward-0", "kind": "reward", "age": 0.2, "phase": "running", "load": 3},
        {"name": "rollout-0", "kind": "rollout", "age": 0.3, "phase": "running", "holds": 14, "free_slots": 2},
        {"name": "trainer-0", "kind": "trainer", "age": 0.4, "phase": "running", "next_step": 13},
    ],
    "queues": {"sampling": [14, 16], "scoring": [0, 8], "scored": [2, 16], "packed": [0, 16], "batches": [0, 2]},
    "means": {"sampling": 14.8, "scoring": 0.4, "scored": 0.8, "packed": 0.0},
    "engine_load": 250, "engine_slots": 256,
    "settings": {
        "rollout.max_concurrent_groups": 16, "reward.max_concurrent_groups": 8, "packer.groups_per_step": 8,
        "packer.order": "ordinal", "packer.max_async_level": 1, "packer.oversampling_factor": 1.0,
        "trainer.num_ranks": 1,
    },
}  # fmt: skip


def means(sampling: float = 0.0, scoring: float = 0.0, scored: float = 0.0, packed: float = 0.0) -> dict[str, Any]:
    """The mean numbers of groups in the stages."""
    return {"means": {"sampling": sampling, "scoring": scoring, "scored": scored, "packed": packed}}


def settings(**changes: Any) -> dict[str, Any]:
    """Settings of the packer's section, changed."""
    return {"settings": PROGRESS["settings"] | {f"packer.{key}": value for key, value in changes.items()}}
