"""Figures of the models from a real run: `actors simulate --like RUN`.

Some figures are read off the run's files: lengths, seconds of publishing, of weights, of reward functions, cores.
Others can't be, since processes slow each other down and wait for each other: seconds of a decoding step, of a
training step, and of messages. For these the run's own configuration is simulated, and each figure is corrected by the
quotient of real and simulated value, ROUNDS times.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.simulate.defaults import times_of
from actors.simulate.models import Times, largest_of
from actors.simulate.plan import Plan, Size
from actors.simulate.result import simulate
from actors.telemetry.reporter import read_lines
from actors.telemetry.totals import mean_of
from actors.telemetry.work import COLUMNS
from schemas.config import RunConfig, load_config
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError

ROUNDS = 8
"""Corrections of the figures that a simulation is needed for."""
FIT_STEPS = 60
"""Steps of such a simulation."""
FEWEST_STEPS = 8
"""Steps of a run from which its figures can be taken."""
WARM_UP = 3
"""First steps that are left out: kernels are loaded and memory is claimed there."""
WAITS = 0.02
"""Share of waiting from which the seconds of messages can be told from the trainer's waiting."""
HOPS = 8.0
"""Messages one after the other from a published version to the next batch, at level 0."""
SHARES = {"decode_sequence_seconds": 1 / 200, "prefill_seconds": 0.0, "prefill_token_seconds": 1 / 1000}
"""Quotients of other seconds of an engine and the seconds of a decoding step without completions. A run tells only
their sum at its own batch."""
CPU_SHARES = {"decode_sequence_seconds": 1 / 80, "prefill_seconds": 1.0, "prefill_token_seconds": 1 / 200}
"""These quotients for an engine on CPU cores. The first two are measured with the model of the quickstart (a decoding
step of 16, 128 and 256 completions takes 5.4, 13 and 17 ms, a forward for a single prompt as long as one of 16). The
last is fitted to a run of level 4, in which each update computes keys and values of many tokens again."""
OTHER_CORES = 0.5
"""Cores used by packer, rollout and reward actors together, on a machine without GPUs."""
FILTERS = ("zero_variance", "too_easy", "too_hard")


@dataclass(frozen=True)
class Observed:
    """A real run, as its folder tells."""

    config: RunConfig
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl from WARM_UP on, with the line before in front."""
    summary: dict[str, Any]
    """Values of summary.json; empty while the run is under way."""
    progress: dict[str, Any]
    """Values of progress.json; empty without the file."""
    prompt_tokens: float | None

    @property
    def span(self) -> float:
        """Seconds from the first of the lines to the last."""
        return float(self.lines[-1]["time"] - self.lines[0]["time"])

    @property
    def steps_per_second(self) -> float:
        """Rate of the lines."""
        return (len(self.lines) - 1) / self.span

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for a batch."""
        return self.sum("seconds_wait_batch") / self.span

    @property
    def lag_mean(self) -> float:
        """Mean lag of the lines."""
        return self.mean("lag_mean") or 0.0

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step apart from waiting, publishing and saving."""
        others = ("seconds_wait_batch", "seconds_publish", "seconds_gather", "seconds_checkpoint")
        return (self.span - sum(map(self.sum, others))) / (len(self.lines) - 1)

    def sum(self, column: str) -> float:
        """Return the sum of a column; the first line belongs to the time before the span."""
        return sum(line.get(column) or 0.0 for line in self.lines[1:])

    def mean(self, column: str) -> float | None:
        """Return the mean of a column; None without values."""
        return mean_of(line.get(column) for line in self.lines[1:])


def observe(folder: Path) -> Observed:
    """Read a run's folder.

    Raises:
        ConfigError: no folder of a run, or too few steps.
    """
    if not (folder / "metrics.jsonl").is_file() or not (folder / RESOLVED).is_file():
        raise ConfigError(f"--like {folder}: no folder of a run (it needs metrics.jsonl and {RESOLVED})")
    lines = read_lines(folder / "metrics.jsonl")
    if len(lines) < FEWEST_STEPS:
        raise ConfigError(f"--like {folder}: has {len(lines)} steps; {FEWEST_STEPS} are needed to measure a run")
    config, summary, progress = load_config(folder / RESOLVED, []), folder / "summary.json", folder / "progress.json"
    return Observed(config, lines[WARM_UP - 1 :], _json(summary), _json(progress), _prompt_tokens(folder, lines))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _prompt_tokens(folder: Path, lines: Sequence[dict[str, Any]]) -> float | None:
    """Estimate the tokens of a prompt: its characters, with as many characters in a token as in the completions.

    None: no samples, or only conversations.
    """
    path, prompts, characters = folder / "samples.jsonl", list[int](), list[int]()
    for sample in read_lines(path) if path.is_file() else []:
        if isinstance(sample["prompt"], str):
            prompts.append(len(sample["prompt"]))
            characters += map(len, sample["completions"])
    tokens = mean_of(line.get("completion_tokens_mean") for line in lines)
    if not prompts or not tokens or not sum(characters):
        return None
    return max(1.0, statistics.fmean(prompts) * tokens / statistics.fmean(characters))


def calibrated(observed: Observed, seed: int = 0) -> tuple[Times, list[str]]:
    """Return the figures of a run, and notes on what its files do not tell.

    Args:
        observed: the run.
        seed: of the simulations.
    """
    times, notes = read_off(observed)
    return fitted(observed, times, seed), notes


def read_off(observed: Observed) -> tuple[Times, list[str]]:
    """Return figures with all that the files tell directly; the others are first guesses."""
    config, notes, found = observed.config, list[str](), dict[str, float]()
    guess = times_of(config)
    if mean := observed.mean("completion_tokens_mean"):
        found["completion_tokens"] = mean
        number = round(observed.mean("num_completions") or 1)
        found["completion_spread"] = spread_of(mean, observed.mean("completion_tokens_max") or mean, number)
    if observed.prompt_tokens:
        found["prompt_tokens"] = observed.prompt_tokens
    else:
        notes.append(f"prompts are taken to have {guess.prompt_tokens:g} tokens (--set prompt_tokens)")
    found["publish_seconds"] = (observed.mean("seconds_publish") or 0.0) + (observed.mean("seconds_gather") or 0.0)
    stalls = [value for line in observed.lines[1:] if (value := line.get("seconds_checkpoint"))]
    found["checkpoint_seconds"] = max(stalls, default=0.0)
    updates = observed.summary.get("weight_update_seconds") or {}
    if updates.get("pause") is not None:
        found["update_pause_seconds"] = updates["pause"]
        # the summary's wire has the trainer's writing too, which is in publish_seconds
        wire = (updates["wire"] or 0.0) - (observed.mean("seconds_publish") or 0.0)
        found["wire_seconds"] = max(0.0, wire) + max(0.0, (updates["load"] or 0.0) - updates["pause"])
    else:
        notes.append("the times of weight updates are guesses until the run has a summary.json (--set wire_seconds)")
    groups, seconds = (observed.sum(column) for column in COLUMNS[2:])
    if groups:
        found["reward_seconds"] = seconds / groups
    else:
        notes.append(f"a group is taken to be scored in {guess.reward_seconds:g} s (--set reward_seconds)")
    dropped = (observed.summary.get("ledger") or {}).get("dropped") or {}
    filtered = sum(dropped.get(reason, 0) for reason in FILTERS)
    found["filtered_share"] = filtered / (filtered + observed.summary["ledger"]["trained"]) if filtered else 0.0
    if started := observed.summary.get("time_to_first_step_seconds"):
        found["restart_seconds"] = started
    if turns := observed.mean("turns_mean"):
        found["turns"] = turns
        notes.append("environments are taken to answer at once (--set environment_seconds)")
    if cores := observed.progress.get("cpu_cores"):
        found |= {"cores": cores, "other_cores": OTHER_CORES}
        found["core_threads"] = observed.mean("torch_threads") or 1.0
    if not observed.sum("engine_busy_seconds") and not isinstance(config.inference.engine, FakeEngineConfig):
        notes.append("the run has no seconds of its engines' work: decode_seconds is a guess (--set decode_seconds)")
    # the trainer's parts are told apart by what it records; the part of micro-batches is in that of the tokens
    found |= {"micro_batch_seconds": 0.0}
    optimizer = observed.mean("seconds_optimizer") or 0.0
    passes = observed.mean("seconds_forward_backward") or 0.0
    found["step_seconds"] = max(0.0, observed.step_seconds - passes) if passes else optimizer
    tokens = (observed.mean("tokens") or 1.0) + (observed.mean("num_completions") or 0.0) * found.get(
        "prompt_tokens", 0.0
    )
    found["train_token_seconds"] = (passes or observed.step_seconds) / tokens * config.trainer.num_ranks
    return guess.with_values(**found), notes


def spread_of(mean: float, largest: float, number: int) -> float:
    """Return the spread of lognormal lengths by the largest of some: the inverse of `largest_of`, by halving."""
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if largest_of(mean, middle, number) < largest else (low, middle)
    return low


def fitted(observed: Observed, times: Times, seed: int = 0) -> Times:
    """Return the figures with which the run's own configuration shows the run's own times."""
    config = observed.config
    plan = Plan(config, Size.of(config), times, min(FIT_STEPS, config.trainer.max_steps), seed)
    tokens, busy = (observed.sum(column) for column in COLUMNS[:2])
    if tokens and busy:
        per_token = busy / tokens
        first = per_token * 16
        times = times.with_values(**_decoding(first, times))
    for _ in range(ROUNDS):
        result = simulate(replace(plan, times=times))
        values: dict[str, float] = {}
        if tokens and busy and result.engine_seconds_per_token:
            values |= _decoding(times.decode_seconds * per_token / result.engine_seconds_per_token, times)
        factor = observed.step_seconds / max(result.compute_seconds, 1e-9)
        values["step_seconds"] = times.step_seconds * factor
        values["train_token_seconds"] = times.train_token_seconds * factor
        # a trainer that never waits tells nothing of the way from the engines to the next batch
        if observed.trainer_idle > WAITS:
            waited = observed.sum("seconds_wait_batch") / (len(observed.lines) - 1)
            hop = times.hop_seconds + (waited - result.wait_seconds) / HOPS
            values["hop_seconds"] = min(max(hop, times.hop_seconds / 2, 0.0005), 2 * times.hop_seconds + 0.001)
        times = times.with_values(**values)
    return times


def _decoding(seconds: float, times: Times) -> dict[str, float]:
    shares = SHARES if math.isinf(times.cores) else CPU_SHARES
    return {"decode_seconds": seconds} | {name: seconds * share for name, share in shares.items()}
