"""The simulator against real runs of the quickstart, and its cost at scale.

    python -m benchmarks.simulate [real|scale] [--json PATH]

`real` trains six configurations of the quickstart for STEPS steps each: level 0, 1 and 4, a reward that takes
REWARD_SECONDS a group with one scoring slot, two engines, one of them killed at step KILL_STEP, and a packer killed
there. Figures are taken from the run of level 1 (`--like`), and all six are simulated with them. A second column
repeats the simulation at the speed that the machine had during the run: all seconds are multiplied by real ÷ simulated
seconds of a training step, since a machine with other work changes its speed from run to run.

`scale` simulates 1 000 rollout actors with 128 engines for 1 000 steps, and measures CPU time per group with 10 and
with 1 000 rollout actors. Limits: 300 s, and a quotient of 1.1.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actors.simulate.calibration import Observed, calibrated, observe
from actors.simulate.defaults import times_of
from actors.simulate.failures import Death
from actors.simulate.models import Times
from actors.simulate.plan import Plan, Size
from actors.simulate.result import Result, result_of
from actors.simulate.ring import Ring
from benchmarks.machine import ROOT, finish, table
from schemas.config import RunConfig

STEPS, KILL_STEP = 120, 40
REWARD_SECONDS = 0.1
TOLERANCE = 0.15
QUICKSTART = ROOT / "examples/quickstart"
SLOW_REWARD = f"""
import time

from actors.reward.builtin import characters_in_place


def slow(prompts, completions, answer, **columns):
    time.sleep({REWARD_SECONDS})
    return characters_in_place(prompts, completions, answer)
"""
BASE = "level 1"
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    BASE: ("packer.max_async_level=1",),
    "level 0": ("packer.max_async_level=0",),
    "level 4": ("packer.max_async_level=4",),
    "slow reward": ("reward.functions=[{path: 'slow.py:slow'}]", "reward.max_concurrent_groups=1"),
    "engine killed": ("up.inference=2",),
    "packer killed": (),
}
"""Overrides of the quickstart."""
KILLED = {"engine killed": ("inference", 1), "packer killed": ("packer", 0)}
"""Role and number of the process that is killed."""
SECONDS = tuple(name for name, value in asdict(Times()).items() if name.endswith("_seconds") and value is not None)
"""Figures that grow with a slower machine."""
SCALE = {
    "model": {"path": "none"},
    "environments": [{"type": "reverse_text"}],
    "rollout": {"group_size": 8, "max_tokens": 2000, "max_concurrent_groups": 32},
    "reward": {"functions": [{"path": "characters_in_place"}]},
    "inference": {"engine": {"type": "vllm"}},
    "eval": {"num_prompts": 0},
}
GROUPS_PER_STEP, SCALE_STEPS, QUOTIENT_STEPS = 128, 1000, 200
LIMIT_SECONDS, LIMIT_QUOTIENT = 300.0, 1.1


# --- real runs -------------------------------------------------------------------------------------------------------


def trained(folder: Path, model: Path, name: str) -> Path:
    """Train a configuration with `actors up`; return the run's folder."""
    output = folder / name.replace(" ", "-")
    (folder / "slow.py").write_text(SLOW_REWARD)
    shutil.copy(QUICKSTART / "run.yaml", folder / "run.yaml")
    common = (f"output_dir={output}", f"model.path={model}", "eval.num_prompts=0", f"trainer.max_steps={STEPS}")
    command = [sys.executable, "-m", "actors", "up", str(folder / "run.yaml"), *common, *CONFIGURATIONS[name]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / f"{output.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        try:
            if name in KILLED:
                kill(output, process, *KILLED[name])
            code = process.wait(1800)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    if code:
        raise SystemExit(f"{name}: actors up ended with {code}; see {log.name}")
    return output


def kill(output: Path, process: "subprocess.Popen[bytes]", role: str, number: int) -> None:
    """Kill an actor once KILL_STEP is recorded."""
    names = {f"{role}-{number}".encode(), *([role.encode()] if role == "packer" else [])}
    metrics = output / "metrics.jsonl"
    while process.poll() is None:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= KILL_STEP:
            break
        time.sleep(0.05)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").split()
        except OSError:
            continue
        if names.intersection(words) and any(str(output).encode() in word for word in words):
            os.kill(int(path.parent.name), signal.SIGKILL)


def simulated(observed: Observed, times: Times, name: str) -> Result:
    """Simulate the configuration of a run."""
    plan = Plan(observed.config, Size.of(observed.config), times, STEPS)
    ring = Ring(plan)
    ring.run()
    if name in KILLED:
        # at the time at which that step ends without the death
        at = ring.meter.lines[KILL_STEP - 1].time
        ring = Ring(replace(plan, deaths=(Death(*KILLED[name], at),)))
        ring.run()
    return result_of(ring)


def compared() -> list[dict[str, Any]]:
    """Return a row for each configuration."""
    with tempfile.TemporaryDirectory(prefix="simulate-") as place:
        folder = Path(place)
        model = folder / "model"
        subprocess.run([sys.executable, str(QUICKSTART / "model.py"), str(model), "--seed", "0"], check=True)
        runs, loads = dict[str, Observed](), dict[str, float]()
        for name in CONFIGURATIONS:
            runs[name] = observe(trained(folder, model, name))
            loads[name] = os.getloadavg()[0]
            print(f"{name}: {runs[name].steps_per_second:.3f} steps/s, load {loads[name]:.1f}", file=sys.stderr)
    times, _ = calibrated(runs[BASE])
    rows = []
    for name, observed in runs.items():
        # a slow reward is a change that the user knows
        own = times.with_values(reward_seconds=REWARD_SECONDS, reward_spread=0.0) if name == "slow reward" else times
        result = simulated(observed, own, name)
        speed = observed.step_seconds / result.compute_seconds
        scaled = own.with_values(**{one: getattr(own, one) * speed for one in SECONDS if one != "reward_seconds"})
        again = simulated(observed, scaled, name)
        rows.append(
            {
                "configuration": name,
                "load": round(loads[name], 1),
                "speed": round(1 / speed, 3),
                "steps/s": round(observed.steps_per_second, 3),
                "simulated": round(result.steps_per_second, 3),
                "at its speed": round(again.steps_per_second, 3),
                "off": round(again.steps_per_second / observed.steps_per_second - 1, 3),
                "idle": round(observed.trainer_idle, 3),
                "idle simulated": round(again.trainer_idle, 3),
                "lag": round(observed.lag_mean, 2),
                "lag simulated": round(again.lag_mean, 2),
                "within": abs(again.steps_per_second / observed.steps_per_second - 1) <= TOLERANCE
                and abs(again.trainer_idle - observed.trainer_idle) <= TOLERANCE
                and abs(again.lag_mean - observed.lag_mean) <= TOLERANCE * max(1.0, observed.lag_mean),
            }
        )
    return rows


# --- scale -----------------------------------------------------------------------------------------------------------


def scaled(rollouts: int, engines: int, steps: int) -> dict[str, Any]:
    """Return CPU seconds of a simulation, and of each group."""
    packer = {"groups_per_step": GROUPS_PER_STEP, "sequence_len": 8192}
    config = RunConfig.model_validate(SCALE | {"packer": packer, "trainer": {"max_steps": steps}})
    plan = Plan(config, Size(rollouts, 8, 8, engines), times_of(config), steps)
    started, wall = time.process_time(), time.monotonic()
    ring = Ring(plan)
    ring.run()
    result = result_of(ring)
    seconds = time.process_time() - started
    return {
        "rollout actors": rollouts,
        "engines": engines,
        "steps": result.steps,
        "groups": result.trained,
        "CPU s": round(seconds, 1),
        "wall s": round(time.monotonic() - wall, 1),
        "CPU us/group": round(1e6 * seconds / result.trained, 1),
        "rounds/group": round(ring.packer.num_rounds / result.trained, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def measured(parts: Sequence[str]) -> dict[str, Any]:
    """Return the results of the parts `real` and `scale`."""
    results: dict[str, Any] = {}
    if "scale" in parts:
        # in turn, so that a change of the machine's speed falls on both; the least of each counts
        pairs = [(scaled(10, 16, QUOTIENT_STEPS), scaled(1000, 16, QUOTIENT_STEPS)) for _ in range(3)]
        few, many = (min(row["CPU us/group"] for row in rows) for rows in zip(*pairs, strict=True))
        whole = scaled(1000, 128, SCALE_STEPS)
        results["scale"] = [*(row for pair in pairs for row in pair), whole]
        results["quotient"], results["whole_seconds"] = many / few, whole["wall s"]
    if "real" in parts:
        results["real"] = compared()
    return results


def shown(results: dict[str, Any]) -> str:
    """Return the tables, each figure with its limit."""
    tables = [
        table([list(rows[0]), *(list(row.values()) for row in rows)])
        for part in ("real", "scale")
        if (rows := results.get(part))
    ]
    if "quotient" in results:
        words = f"a group with 1 000 rollout actors / with 10: {results['quotient']:.3f} (limit {LIMIT_QUOTIENT})"
        tables.append(f"{words}; 1 000 x 128 x {SCALE_STEPS}: {results['whole_seconds']} s (limit {LIMIT_SECONDS:g})")
    return "\n\n".join(tables)


def main() -> None:
    parts = [word for word in sys.argv[1:] if word in ("real", "scale")] or ["real", "scale"]
    sys.argv = [word for word in sys.argv if word not in ("real", "scale")]
    finish(__doc__, lambda: measured(parts), shown)


if __name__ == "__main__":
    main()
