"""Search until told to stop: `python -m tests.explore --states 100000 --seed 1`."""

import argparse

from tests.explore import scenarios
from tests.explore.search import Figures, FoundError, search
from tests.explore.walks import walk

WALKS_PER_THOUSAND_STATES = 2
WALK_ACTIONS = 150


def main() -> int:
    """Search all scenarios; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--states", type=int, default=60_000, help="in all scenarios together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", choices=[one.name for one in scenarios.ALL], action="append")
    given = parser.parse_args()
    chosen = [one for one in scenarios.ALL if given.scenario is None or one.name in given.scenario]
    states = given.states // len(chosen)
    try:
        for scenario in chosen:
            print(f"{scenario.name}: {search(scenario, states, given.seed)}", flush=True)
            num_walks = states * WALKS_PER_THOUSAND_STATES // 1_000
            walks = [walk(scenario, given.seed + number, WALK_ACTIONS) for number in range(num_walks)]
            print(f"  and {num_walks} random walks: {total(walks)}", flush=True)
    except FoundError as found:
        print(found)
        return 1
    return 0


def total(figures: list[Figures]) -> Figures:
    """Of all walks."""
    return Figures(
        sum(one.states for one in figures),
        sum(one.transitions for one in figures),
        max((one.depth for one in figures), default=0),
        0,
        set[int]().union(*(one.ends for one in figures)),
        sum(one.seconds for one in figures),
    )


if __name__ == "__main__":
    raise SystemExit(main())
