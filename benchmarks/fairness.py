"""Groups per second of a fast environment, alone and in one run with a slow one.

A step of the fast environment takes 0.01 s, of the slow one 6 s; an episode is one step, the group size is 2, and both
have weight 1. The engine is a double that takes 5 ms for each token, and the trainer a double that takes no time: the
run is bound by sampling. Each run has the actors of a run as threads of this process, and 32 sampling slots. Groups are
counted in trained steps, over 30 s after 15 s of warming up.

    python -m benchmarks.fairness [--json PATH]

`alone` has the fast environment only. `arrival` has both, with `packer.order: arrival` and a limit of lag that no group
reaches; `limit 8` is the same with `max_off_policy_steps: 8`, where steps wait for slow groups that would be too old;
`ordinal` has `packer.order: ordinal`. `of alone` is the rate of the fast environment ÷ its rate alone.
"""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import structlog

from benchmarks.machine import finish, table
from tests.ring.harness import ring, ring_config

WARM_SECONDS, SECONDS = 15.0, 30.0
SECONDS_OF_STEP = {"fast": 0.01, "slow": 6.0}
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "alone": (("fast",), {"order": "arrival", "max_off_policy_steps": 100_000}),
    "arrival": (("fast", "slow"), {"order": "arrival", "max_off_policy_steps": 100_000}),
    "limit 8": (("fast", "slow"), {"order": "arrival", "max_off_policy_steps": 8}),
    "ordinal": (("fast", "slow"), {"order": "ordinal"}),
}
"""Environments, and keys of `packer`, by run."""
WORLD = """
import asyncio

class World:
    def __init__(self, seconds):
        self.seconds = seconds

    def reset(self, seed, **row):
        return f"Write letters {seed % 7}."

    async def step(self, answer):
        await asyncio.sleep(self.seconds)
        return "", sum(letter < "m" for letter in answer) / max(1, len(answer)), True
"""


def measured(folder: Path, name: str) -> dict[str, Any]:
    """Return the row of a run."""
    labels, packer = RUNS[name]
    path = folder / "world.py"
    path.write_text(WORLD)
    common = {"type": "python", "path": f"{path}:World", "weight": 1.0, "episodes_per_worker": 64}
    config = ring_config(
        folder,
        environments=[common | {"name": one, "options": {"seconds": SECONDS_OF_STEP[one]}} for one in labels],
        rollout={"group_timeout": 300.0, "max_concurrent_groups": 32},
        reward={"functions": [], "max_concurrent_groups": 16},
        packer={"sequence_len": 512, "groups_per_step": 8} | packer,
        trainer={"max_steps": 1_000_000, "checkpoint": {"interval": 1000}},
        inference={"engine": {"type": "fake", "token_seconds": 0.005}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 1_000_000},
    )
    with ring(config) as run:
        run.start()
        machine = run.packer.machine

        def trained() -> Counter[str]:
            steps = [machine.steps.composed[number] for number in range(1, machine.trained_step + 1)]
            return Counter(machine.groups.rows[o].example.environment for step in steps for o in step.ordinals)

        while not machine.trained_step:
            time.sleep(0.1)
        time.sleep(WARM_SECONDS)
        before, started = trained(), time.monotonic()
        time.sleep(SECONDS)
        groups, seconds = trained() - before, time.monotonic() - started
        dropped = machine.groups.num_dropped("train")
    return {label: round(groups[label] / seconds, 2) for label in SECONDS_OF_STEP} | {"dropped": dropped}


def measure() -> dict[str, Any]:
    """Measure all runs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    rows = []
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"run": name} | measured(Path(folder), name))
    return {"fairness": [row | {"of alone": round(row["fast"] / rows[0]["fast"], 2)} for row in rows]}


def show(results: dict[str, Any]) -> str:
    """Return the table."""
    rows = results["fairness"]
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    finish(__doc__, measure, show)
