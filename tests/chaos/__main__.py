"""Kill, stop, cut off and starve real runs, and judge them by their witnesses: `python -m tests.chaos --faults 200`."""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import all_points
from tests.chaos.plans import PLANS, shares
from tests.chaos.stage import Result, Stage
from tests.chaos.table import show, verdict


def main() -> int:
    """Returns 1 when the promise was broken, a fault was not taken, or a run did not recover."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="in all runs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="points whose names begin so, parted by commas")
    parser.add_argument("--plan", default="", help="runs whose names begin so")
    parser.add_argument("--once", action="store_true", help="instead: each fault that is a plan's own, once")
    parser.add_argument("--folder", type=Path, help="where the runs lie; by default a temporary one")
    arguments = parser.parse_args()
    began, folder = time.monotonic(), arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    chosen = {name: plan for name, plan in PLANS.items() if name.startswith(arguments.plan)}
    results: list[Result] = []
    for i, ((_, plan), number) in enumerate(
        zip(chosen.values(), shares(chosen.values(), arguments.faults), strict=True)
    ):
        own = [fault for fault in plan.others if fault.point.startswith(tuple(arguments.only.split(",")))]
        if arguments.once and not own:
            continue
        place = folder / str(i)
        place.mkdir(parents=True)
        stage = Stage(plan, place, lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True))
        points = all_points(arguments.only)
        results.append(stage.run(arguments.seed * 100 + i, number, points, own if arguments.once else None))
    print("\n".join(["", *show(results), "", f"seed {arguments.seed}, {time.monotonic() - began:.0f} s"]))
    good = verdict(results)
    if good and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
