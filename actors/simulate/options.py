"""Options of `actors simulate`. Nothing else is imported here, since the command line is parsed by every command."""

import argparse
from pathlib import Path

DEFAULT_STEPS = 200
"""Steps of a simulation: most figures are steady long before."""
SIZES = ("rollouts", "rewards", "trainers", "engines")
"""Options with a number of processes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; the configuration and its overrides are there already."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
        return int(text)

    parser.add_argument("--like", type=Path, metavar="RUN", help="take all times from this run's folder")
    parser.add_argument("--rollouts", type=number, metavar="N", help="rollout actors (default: up.rollout)")
    parser.add_argument("--rewards", type=number, metavar="N", help="reward actors (default: up.reward)")
    parser.add_argument("--trainers", type=number, metavar="N", help="trainer ranks (default: trainer.num_ranks)")
    parser.add_argument("--engines", type=number, metavar="N", help="engines (default: up.inference)")
    parser.add_argument(
        "--steps", type=number, metavar="N", help=f"steps (default: those of the run, at most {DEFAULT_STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random deaths (default: 0)")
    for name, metavar, text in (
        ("--set", "NAME=VALUE", "another value of a figure; repeatable"),
        ("--change", "TIME:NAME=VALUE", "another value from a time on, as in 600s:reward_seconds=8; repeatable"),
        ("--kill", "PROCESS@TIME", "a death, as in inference-0@120s; repeatable"),
        ("--mtbf", "ROLE=TIME", "mean time between two deaths, as in inference=6h; repeatable"),
        ("--sweep", "KEY=A,B,…", "table over values of a key; give it twice for two keys"),
        ("--price", "ROLE=PRICE", "price of a GPU hour, as in trainer=2.5; repeatable"),
    ):
        parser.add_argument(name, metavar=metavar, help=text, action="append", default=[])
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="with --sweep: picture of the table")
    parser.add_argument("--gpus", type=number, metavar="N", help="find the cheapest split of N GPUs")
    parser.add_argument("--brief", action="store_true", help="leave out the experiments on what limits the run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
