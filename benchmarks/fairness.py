"""Groups per second of a fast environment, alone and in one run with a slow one.

A step of the fast environment takes 0.01 s and of the slow one 6 s, then 0.1 s and 60 s; an episode is one step, the
group size is 2, and both have weight 1. The engine is a double that takes 5 ms for each token, and the trainer a double
that takes no time: the run is bound by sampling. Each run has the actors of a run as threads of this process, and 32
sampling slots. Groups are counted in trained steps, over 30 s after 15 s of warming up; with the slower pair over 120 s
after 75 s, in the first three runs alone.

    python -m benchmarks.fairness [--json PATH]

`alone` has the fast environment only, `alone in half` too, with the 16 slots that are its share beside the slow one.
`arrival` has both, with `packer.order: arrival` and a limit of lag that no group
reaches; `limit 8` is the same with `max_off_policy_steps: 8`, where steps wait for slow groups that would be too old;
`ordinal` has `packer.order: ordinal`. `of alone` is the rate of the fast environment ÷ its rate alone.
"""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from benchmarks.machine import finish, table
from tests.ring.harness import ring, ring_config


class Pair(NamedTuple):
    """Seconds of a step of the fast and of the slow environment, of warming up, and of the measurement."""

    fast: float
    slow: float
    warm: float
    measured: float


SLOTS = 32
RUNS: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "alone": (("fast",), SLOTS, {"order": "arrival", "max_off_policy_steps": 100_000}),
    "alone in half": (("fast",), SLOTS // 2, {"order": "arrival", "max_off_policy_steps": 100_000}),
    "arrival": (("fast", "slow"), SLOTS, {"order": "arrival", "max_off_policy_steps": 100_000}),
    "limit 8": (("fast", "slow"), SLOTS, {"order": "arrival", "max_off_policy_steps": 8}),
    "ordinal": (("fast", "slow"), SLOTS, {"order": "ordinal"}),
}
"""Environments, sampling slots, and keys of `packer`, by run."""
PAIRS = {Pair(0.01, 6.0, 15.0, 30.0): tuple(RUNS), Pair(0.1, 60.0, 75.0, 120.0): ("alone", "alone in half", "arrival")}
"""Runs of each pair."""
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


def measured(folder: Path, name: str, pair: Pair) -> dict[str, Any]:
    """Return the row of a run."""
    seconds_of_step = {"fast": pair.fast, "slow": pair.slow}
    labels, slots, packer = RUNS[name]
    path = folder / "world.py"
    path.write_text(WORLD)
    common = {"type": "python", "path": f"{path}:World", "weight": 1.0, "episodes_per_worker": 64}
    config = ring_config(
        folder,
        environments=[common | {"name": one, "options": {"seconds": seconds_of_step[one]}} for one in labels],
        rollout={"group_timeout": 300.0, "max_concurrent_groups": slots},
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
        time.sleep(pair.warm)
        before, started = trained(), time.monotonic()
        time.sleep(pair.measured)
        groups, seconds = trained() - before, time.monotonic() - started
        dropped = machine.groups.num_dropped("train")
    rates = {label: round(groups[label] / seconds, 2) for label in seconds_of_step}
    return {"seconds of a step": f"{pair.fast:g}, {pair.slow:g}"} | rates | {"dropped": dropped}


def measure() -> dict[str, Any]:
    """Measure all runs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    rows, fast_alone = [], 0.0
    for pair, names in PAIRS.items():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                row = {"run": name} | measured(Path(folder), name, pair)
            fast_alone = row["fast"] if name == "alone" else fast_alone
            rows.append(row | {"of alone": round(row["fast"] / fast_alone, 2)})
    return {"fairness": rows}


def show(results: dict[str, Any]) -> str:
    """Return the table."""
    rows = results["fairness"]
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    finish(__doc__, measure, show)
