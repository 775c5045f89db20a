"""Speed, memory and file size of packer and ledger over millions of groups.

    python -m benchmarks.soak [--groups 2000000] [--sync process|node] [--json PATH]

The rounds of the packer are real (machine, ledger on a disk, payloads, batches, record); `benchmarks.peers` has the
other actors, without sockets and without models. A step has 64 groups of 4 completions with 128 tokens each. An
evaluation of 16 prompts runs every 100 steps; a checkpoint is saved every 50 steps, and 3 are kept. One attempt in 997
fails, one group in 1 009 arrives twice, one in 20 011 never succeeds, and a rollout dies about every 10 000 groups.

`groups/s` is the speed of the packer's rounds, `of all` their share of the whole time. Two threads of a packer are
absent: they decode groups and heartbeats and encode directives. `decode us` is the decoding time of a group.

`flat`: a straight line through the samples after the first tenth of the run rises by less than 2 % of its start.
"""

import argparse
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from benchmarks.machine import microseconds, scratch, table, write
from benchmarks.peers import LonePacker, lone_packer, template
from bus import codec
from schemas.config import RunConfig, check_tree

GROUPS_PER_STEP = 64
SAMPLE_EVERY = 100_000
WARM_UP, FLAT = 0.1, 0.02
HEAD = ["groups", "groups/s", "of all", "RSS MiB", "ledger MiB", "WAL MiB", "rows", "pages"]


def config(folder: Path, num_steps: int, sync: str = "process", **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run without a model, with `sections` merged in."""
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "model": {"path": "none"},
        "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 4, "max_tokens": 128},
        "reward": {"functions": [{"path": "exact_match"}]},
        "packer": {"groups_per_step": GROUPS_PER_STEP, "sequence_len": 8192},
        "trainer": {"max_steps": num_steps, "checkpoint": {"interval": 50, "keep_last": 3}},
        "inference": {"engine": {"type": "fake"}},
        "eval": {"num_prompts": 16, "every_steps": 100},
        "ledger": {"sync": sync},
        "bus": {"control": "inproc"},
    }
    return check_tree(tree | {name: {**tree.get(name, {}), **section} for name, section in sections.items()})


def sample(ring: LonePacker, seconds: float, before: dict[str, float]) -> dict[str, float]:
    """Return the figures of a sample, taken every 100 000 groups; speeds are since the previous sample."""
    path = ring.config.ledger_path
    groups, busy = ring.num_trained, ring.packer_seconds
    num_groups, since = groups - before.get("groups", 0), busy - before.get("packer_seconds", 0.0)
    (rows,), (pages,) = (
        ring.packer.store.database.execute(query).fetchone()
        for query in ("SELECT COUNT(*) FROM groups", "PRAGMA page_count")
    )
    return {
        "groups": groups,
        "seconds": seconds,
        "packer_seconds": busy,
        "packer_cpu_seconds": ring.packer_cpu_seconds,
        "groups_per_second": num_groups / since,
        "packer_share": since / (seconds - before.get("seconds", 0.0)),
        "rss_bytes": resident_bytes(),
        "ledger_bytes": path.stat().st_size,
        "wal_bytes": path.with_name(path.name + "-wal").stat().st_size,
        "rows": rows,
        "pages": pages,
    }


def resident_bytes() -> int:
    """Return the RSS of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(samples: list[dict[str, float]], key: str) -> float:
    """Return the relative rise of a straight line through the samples after warm-up."""
    start = WARM_UP * samples[-1]["groups"]
    x, y = np.array([(s["groups"], s[key]) for s in samples if s["groups"] >= start], float).T
    if x.size < 2:
        return 0.0
    slope, level = np.polyfit(x - x[0], y, 1)
    return float(slope * (x[-1] - x[0]) / level)


def measure(num_groups: int, sync: str) -> dict[str, Any]:
    """Run to the end; print a line at each sample."""
    samples: list[dict[str, float]] = []
    every = min(SAMPLE_EVERY, max(GROUPS_PER_STEP, num_groups // 20))
    with scratch() as folder:
        run = config(folder, num_groups // GROUPS_PER_STEP, sync)
        with lone_packer(run) as ring:
            started = time.perf_counter()
            while not ring.over:
                ring.turn()
                if ring.num_trained >= every * (len(samples) + 1):
                    before = samples[-1] if samples else {}
                    samples.append(sample(ring, time.perf_counter() - started, before))
                    print(line(samples[-1]), flush=True)
        group = template(run, "0123456789abcdef")
    frames = [bytes(frame) for frame in codec.encode(group)]
    last = samples[-1]
    return {
        "sync": sync,
        "samples": samples,
        "growth": {key: growth(samples, key) for key in ("rss_bytes", "ledger_bytes", "wal_bytes", "rows")},
        "packer_groups_per_second": last["groups"] / last["packer_seconds"],
        "packer_groups_per_cpu_second": last["groups"] / last["packer_cpu_seconds"],
        "packer_share": last["packer_seconds"] / last["seconds"],
        "decode_us": microseconds(lambda: codec.decode(frames)),
        "payload_bytes": codec.num_bytes(frames),
    }


def line(s: dict[str, float]) -> str:
    """Return a sample as a line of text."""
    sizes = [s[key] / 2**20 for key in ("rss_bytes", "ledger_bytes", "wal_bytes")]
    cells = [s["groups"], round(s["groups_per_second"]), f"{s['packer_share']:.0%}", *sizes, s["rows"], s["pages"]]
    return "  ".join(f"{cell:>10.1f}" if isinstance(cell, float) else f"{cell:>10}" for cell in cells)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2_000_000)
    parser.add_argument("--sync", choices=("process", "node"), default="process")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # no line per evaluation
    print("  ".join(f"{name:>10}" for name in HEAD))
    results = measure(arguments.groups, arguments.sync)
    grown = [["grown after warm-up", "by", "flat"]]
    grown += [[key, f"{by:+.2%}", "yes" if by < FLAT else "NO"] for key, by in results["growth"].items()]
    print(f"\n{table(grown)}\n")
    print(
        f"packer alone: {results['packer_groups_per_second']:,.0f} groups/s, "
        f"{results['packer_groups_per_cpu_second']:,.0f} a CPU second, {results['packer_share']:.0%} of all; "
        f"decode {results['decode_us']:.0f} us a group of {results['payload_bytes']} bytes"
    )
    write(results, arguments.json)


if __name__ == "__main__":
    main()
