"""Quality and speed of `actors.algorithms.packing.pack`, compared with its lower bound and with first-fit decreasing.

    python -m benchmarks.packing [--json PATH]

One stream, numpy.random.default_rng(0), generates 200 cases: 50 for each median in (1000, 4000) and n in (128, 2048),
in this order. Lengths are lognormal with sigma 1, cut to integers and clipped to [1, 16384]; 16384 is the capacity.
`gap` is the number of micro-batches above `lower_bound`; for 8 ranks the bound is rounded up to a multiple of 8. `cost`
is the cost of the costliest rank divided by the mean cost of the ranks, in the median case and the worst case. `10k ms`
is measured on five further draws of 10 000 samples for each median. The benchmark has one process and one thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from actors.algorithms.packing import cost, lower_bound, pack
from benchmarks.machine import finish

CAPACITY = 16384
MEDIANS, SIZES = (1000, 4000), (128, 2048)
CASES, LARGE_CASES, LARGE = 50, 5, 10_000
RANKS = 8

Packer = Callable[[Sequence[int], int], int]


def draw(rng: np.random.Generator, median: int, n: int) -> list[int]:
    """Return n lengths in tokens."""
    lengths: list[int] = np.clip(rng.lognormal(np.log(median), 1.0, n), 1, CAPACITY).astype(int).tolist()
    return lengths


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> int:
    """Return the number of micro-batches of the textbook algorithm, O(n * micro-batches)."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((b for b, room in enumerate(rooms) if room >= length), len(rooms))
        if at == len(rooms):
            rooms.append(capacity)
        rooms[at] -= length
    return len(rooms)


def packed(lengths: Sequence[int], capacity: int) -> int:
    """Return the number of micro-batches of `pack` for one rank."""
    return len(pack(lengths, capacity)[0])


def timed(packer: Packer, cases: Iterable[Sequence[int]]) -> tuple[list[int], list[float]]:
    """Return the micro-batches and the milliseconds of each case."""
    counts, milliseconds = [], []
    for lengths in cases:
        start = time.perf_counter()
        counts.append(packer(lengths, CAPACITY))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return counts, milliseconds


def on_ranks(lengths: Sequence[int], bound: int) -> tuple[bool, float]:
    """Return whether 8 ranks get at most the rounded bound of micro-batches, and their max/mean cost."""
    ranks = pack(lengths, CAPACITY, RANKS)
    costs = [sum(cost(micro_batch, lengths) for micro_batch in rank) for rank in ranks]
    return len(ranks[0]) == -(-bound // RANKS), max(costs) * RANKS / sum(costs)


def measure(packer: Packer, cases: list[list[int]], bounds: list[int], large: list[list[int]]) -> dict[str, float]:
    """Compare one packer with the bound over the cases of one combination."""
    counts, milliseconds = timed(packer, cases)
    _, large_milliseconds = timed(packer, large)
    gaps = np.subtract(counts, bounds)
    return {
        "meets": float(np.mean(gaps == 0)),
        "mean_gap": float(gaps.mean()),
        "worst_gap": int(gaps.max()),
        "mean_ms": float(np.mean(milliseconds)),
        "worst_ms": max(milliseconds),
        "large_mean_ms": float(np.mean(large_milliseconds)),
        "large_worst_ms": max(large_milliseconds),
    }


def combination(rng: np.random.Generator, large: list[list[int]], median: int, n: int) -> dict[str, Any]:
    """Measure both packers on the cases of one median and size."""
    cases = [draw(rng, median, n) for _ in range(CASES)]
    bounds = [lower_bound(lengths, CAPACITY) for lengths in cases]
    meets, imbalances = zip(*(on_ranks(*case) for case in zip(cases, bounds, strict=True)), strict=True)
    return {
        "median": median,
        "n": n,
        "cases": CASES,
        "pack": measure(packed, cases, bounds, large),
        "first_fit_decreasing": measure(first_fit_decreasing, cases, bounds, large),
        "pack_meets_on_8_ranks": float(np.mean(meets)),
        "imbalance_of_8_ranks": {"median": float(np.median(imbalances)), "worst": max(imbalances)},
    }


def measure_all() -> dict[str, Any]:
    """Measure all combinations."""
    rng, large_rng = np.random.default_rng(0), np.random.default_rng(1)
    large = {median: [draw(large_rng, median, LARGE) for _ in range(LARGE_CASES)] for median in MEDIANS}
    results = [combination(rng, large[median], median, n) for median in MEDIANS for n in SIZES]
    return {"capacity": CAPACITY, "results": results}


def table(measured: dict[str, Any]) -> str:
    """Return the results as text, with a line per combination and packer."""
    results = measured["results"]
    head = "median     n  cases  packer  meets  8 ranks   cost  worst"
    lines = [head + "   gap mean  worst    ms mean   worst   10k ms   worst"]
    for r in results:
        for name, key in (("pack", "pack"), ("FFD", "first_fit_decreasing")):
            m = r[key]
            ranks = f"{'-':>8} {'-':>6} {'-':>6}"
            if name == "pack":
                imbalance = r["imbalance_of_8_ranks"]
                ranks = f"{r['pack_meets_on_8_ranks']:8.1%} {imbalance['median']:6.3f} {imbalance['worst']:6.3f}"
            lines.append(
                f"{r['median']:6} {r['n']:5} {r['cases']:6}  {name:6} {m['meets']:6.1%} {ranks}"
                f"   {m['mean_gap']:8.2f} {m['worst_gap']:6}  {m['mean_ms']:9.1f} {m['worst_ms']:7.1f}"
                f" {m['large_mean_ms']:8.1f} {m['large_worst_ms']:7.1f}"
            )
    total = np.mean([[r["pack"]["meets"], r["pack_meets_on_8_ranks"]] for r in results], axis=0)
    return "\n".join(
        [*lines, f"all: pack meets the bound in {total[0]:.1%} of the cases, on 8 ranks in {total[1]:.1%}"]
    )


if __name__ == "__main__":
    finish(__doc__, measure_all, table)
