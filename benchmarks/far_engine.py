"""Cost of a far engine: completions per second with 50 ms delay and 1 % loss in each direction, against a near one.

Engine and reward actor are on another host than packer, trainer and rollout actor (network namespaces, made as root).
Near and far blocks of steps alternate within one run at level 2, so that both have the same neighbours on this machine.
The steps at the start of a block are not counted: what they train was sampled under the condition before.

    python -m benchmarks.far_engine [--steps 8] [--rounds 3] [--groups 24] [--weights full] [--congestion bbr]
        [--json PATH]

`congestion`  congestion control of TCP on both hosts, where the kernel has it: reno takes each lost packet for a full
              wire, and sends about 180 kB/s (segment · 1.22 ÷ (round trip · √loss)); bbr measures the wire
`weights`     `adapters` (LoRA) or `full`, and their kilobytes in each version
`ratio`       completions per second far ÷ near; the limit of the design is 0.9
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import publish
from schemas.config import RunConfig
from tests.system.namespaces import network
from tests.system.test_network import FAR, HERE, THERE, Run

SETTLING_STEPS = 3
"""Steps of a block that are not counted: the level, and one."""
WEIGHTS = {"adapters": ["model.lora.rank=8"], "full": []}
ALGORITHMS = ("bbr", "reno")


def main() -> None:
    """Measure each kind of weights under each congestion control, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a block")
    parser.add_argument("--rounds", type=int, default=3, help="near and far blocks of a run")
    parser.add_argument("--groups", type=int, default=24, help="packer.groups_per_step")
    parser.add_argument("--weights", choices=WEIGHTS, action="append", help="by default all; repeatable")
    parser.add_argument("--congestion", choices=ALGORITHMS, action="append", help="by default all; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        _measure(weights, algorithm, arguments.steps, arguments.rounds, arguments.groups)
        for algorithm in arguments.congestion or ALGORITHMS
        for weights in arguments.weights or WEIGHTS
    ]
    publish({"far_engine": rows}, rows, arguments.json)


def _measure(weights: str, algorithm: str, steps: int, rounds: int, groups: int) -> dict[str, Any]:
    block = SETTLING_STEPS + steps
    overrides = [
        f"trainer.max_steps={2 * rounds * block}",
        f"packer.groups_per_step={groups}",
        "packer.max_async_level=2",
        "eval.num_prompts=0",
        *WEIGHTS[weights],
    ]
    with tempfile.TemporaryDirectory() as name, network("10.77.0.1", "10.77.0.2") as made:
        here, there = made.hosts
        for host in made.hosts:
            host.control_congestion(algorithm)
        run = Run(Path(name), made.hosts, overrides, here.address)
        run.start(here, HERE)
        run.start(there, THERE)
        for number in range(2 * rounds):
            made.become(**(FAR if number % 2 else {}))
            run.reach(block * (number + 1))
        run.finish()
        assert run.failed_updates() == []
        near, far = _seconds(run.config, block)
        size = _version_bytes(run.config)
    completions = groups * run.config.rollout.group_size * steps * rounds
    return {
        "congestion": algorithm,
        "weights": f"{weights}, {size / 1e3:.0f} kB",
        "step s": near / (steps * rounds),
        "near/s": completions / near,
        "far/s": completions / far,
        "ratio": near / far,
    }


def _seconds(config: RunConfig, block: int) -> tuple[float, float]:
    """Return the seconds of the counted steps, near and far."""
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines]
    starts = range(0, len(times), block)
    seconds = [times[start + block - 1] - times[start + SETTLING_STEPS - 1] for start in starts]
    return sum(seconds[0::2]), sum(seconds[1::2])


def _version_bytes(config: RunConfig) -> int:
    """Return the bytes of the weights of the last checkpoint, which are those of a version."""
    checkpoint = config.output / "checkpoints" / f"step_{config.trainer.max_steps}"
    return sum(path.stat().st_size for path in checkpoint.rglob("*model.safetensors"))


if __name__ == "__main__":
    main()
