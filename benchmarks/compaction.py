"""Duration of the packer's rounds while the payloads of a long history are deleted.

    python -m benchmarks.compaction [--gib 3] [--json PATH]

The packer is the real one, with its ledger on a disk; `benchmarks.peers` has the other actors. Groups of 16 completions
with 4 096 tokens each fill the ledger until the first checkpoint. The run keeps two checkpoints, so the second
checkpoint compacts all groups before the first: the packer deletes their payloads in slices, one slice per round, while
small groups are sampled, scored and trained. A second run with almost nothing to delete shows the rounds without
deletion.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import publish, scratch
from benchmarks.peers import LonePacker, lone_packer, template
from bus import codec
from schemas.config import RunConfig, check_tree

GROUPS_PER_STEP = 8
LIVE_STEPS = 400
"""Steps of small groups after the checkpoint."""
LARGE, SMALL = 4096, 128
"""Tokens of a completion."""


def config(folder: Path, checkpoint_step: int) -> RunConfig:
    """Return the configuration of a run without a model."""
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "model": {"path": "none"},
        "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 16, "max_tokens": LARGE},
        "reward": {"functions": [{"path": "exact_match"}]},
        "packer": {"groups_per_step": GROUPS_PER_STEP, "sequence_len": 8192},
        "trainer": {
            "max_steps": 2 * checkpoint_step + LIVE_STEPS,
            "checkpoint": {"interval": checkpoint_step, "keep_last": 2},
        },
        "inference": {"engine": {"type": "fake"}},
        "eval": {"num_prompts": 0},
        "bus": {"control": "inproc"},
    }
    return check_tree(tree)


def turn(ring: LonePacker) -> tuple[float, bool]:
    """Run one round of the packer; return its seconds, and whether the round deleted payloads."""
    before, unswept = ring.packer_seconds, ring.packer.store.unswept
    ring.turn()
    return ring.packer_seconds - before, ring.packer.store.unswept < unswept


def measure(folder: Path, checkpoint_step: int) -> dict[str, Any]:
    """Fill the ledger, compact it, and time all rounds after the checkpoint."""
    run = config(folder, checkpoint_step)
    rounds: list[tuple[float, bool]] = []
    with lone_packer(run) as ring:
        large = ring._template
        small = template(run.model_copy(update={"rollout": run.rollout.model_copy(update={"max_tokens": SMALL})}), "")
        small = small.model_copy(update={"run": large.run})
        while ring.packer.machine.trained_step < checkpoint_step:
            ring.turn()
        large_bytes = ring.num_trained * codec.num_bytes([bytes(frame) for frame in codec.encode(large)])
        ring._template = small
        while ring.packer.machine.trained_step < 2 * checkpoint_step - 1:
            ring.turn()
        started = time.perf_counter()
        while not ring.over:
            rounds.append(turn(ring))
        seconds, unswept = time.perf_counter() - started, ring.packer.store.unswept
    sweeping = [took for took, swept in rounds if swept]
    return {
        "checkpoint_step": checkpoint_step,
        "folded_bytes": large_bytes,
        "seconds": seconds,
        "rounds": len(rounds),
        "sweeping_rounds": len(sweeping),
        "longest_round_ms": 1e3 * max(took for took, _ in rounds),
        "longest_sweeping_round_ms": 1e3 * max(sweeping, default=0.0),
        "median_round_ms": 1e3 * statistics.median(took for took, _ in rounds),
        "unswept_at_the_end": unswept,
    }


def main() -> None:
    """Measure with a long history and with almost none; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with scratch() as folder:
        run = config(folder / "size", 1)
        step_bytes = GROUPS_PER_STEP * codec.num_bytes(
            [bytes(frame) for frame in codec.encode(template(run, "0" * 16))]
        )
        long = max(2, round(arguments.gib * 2**30 / step_bytes))
        rows = [measure(folder / f"{steps}", steps) for steps in (2, long)]
    publish({"rows": rows}, rows, arguments.json)


if __name__ == "__main__":
    main()
