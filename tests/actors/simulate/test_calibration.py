"""Figures of a run's folder: of a run that was simulated itself, so that they are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.simulate.calibration import calibrated, observe
from actors.simulate.limit import experiments
from actors.simulate.models import Times, largest_of
from actors.simulate.plan import Plan, Size
from actors.simulate.result import result_of, simulate
from actors.simulate.ring import Ring
from schemas.config import RunConfig
from schemas.config.resolved import dump_config
from schemas.errors import ConfigError
from tests.actors.simulate.plans import CONFIG

KNOWN = Times(
    decode_seconds=0.03,
    decode_sequence_seconds=0.03 / 200,
    prefill_token_seconds=0.03 / 1000,
    update_pause_seconds=0.05,
    wire_seconds=0.1,
    prompt_tokens=12,
    completion_tokens=20,
    completion_spread=0.4,
    reward_seconds=0.02,
    step_seconds=0.1,
    micro_batch_seconds=0.0,
    train_token_seconds=0.004,
    publish_seconds=0.05,
    checkpoint_seconds=0.0,
    restart_seconds=9.0,
    hop_seconds=0.02,
)


def folder_of(
    place: Path, times: Times = KNOWN, steps: int = 60, works: bool = True, **sections: dict[str, Any]
) -> Path:
    """The folder that a run with these times would have."""
    given = {name: {**CONFIG.get(name, {}), **keys} for name, keys in sections.items()}
    # an engine whose speed only a run tells; steps at an end, since the summary is of a run that is done
    engine = {"inference": {"engine": {"type": "embedded"}}, "output_dir": str(place)}
    config = RunConfig.model_validate(CONFIG | engine | given | {"trainer": {"max_steps": steps}})
    ring = Ring(Plan(config, Size.of(config), times, steps))
    ring.run()
    result, lines = result_of(ring), []
    per_step = result.sampled_tokens / steps
    for line in ring.meter.lines:
        lines.append(
            {
                "step": line.step,
                "time": 1000.0 + line.time,
                "completion_tokens_mean": times.completion_tokens,
                "completion_tokens_max": largest_of(times.completion_tokens, times.completion_spread, 8),
                "num_completions": 8.0,
                "tokens": float(line.tokens),
                "lag_mean": line.lag_mean,
                "seconds_wait_batch": line.seconds_wait_batch,
                "seconds_forward_backward": line.seconds_compute - times.step_seconds,
                "seconds_optimizer": 0.01,
                "seconds_publish": times.publish_seconds,
                "seconds_gather": 0.0,
                "seconds_checkpoint": 0.0,
                "reward_groups": 4.0,
                "reward_busy_seconds": 4 * times.reward_seconds,
            }
            | (
                {"engine_tokens": per_step, "engine_busy_seconds": per_step * result.engine_seconds_per_token}
                if works
                else {}
            )
        )
    place.mkdir(exist_ok=True)
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "config.resolved.yaml").write_text(dump_config(config))
    summary = {
        "weight_update_seconds": {
            "pause": times.update_pause_seconds,
            "wire": times.wire_seconds + times.publish_seconds,
            "load": times.update_pause_seconds,
        },
        "time_to_first_step_seconds": times.restart_seconds,
        "ledger": {"trained": 4 * steps, "dropped": {}},
    }
    (place / "summary.json").write_text(json.dumps(summary))
    sample = {"prompt": "reverse this word:", "completions": ["x" * 30, "y" * 30]}
    (place / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_the_figures_of_a_run_are_found_again(tmp_path: Path, level: int) -> None:
    """Those that are read off exactly, the others as far as their run tells."""
    observed = observe(folder_of(tmp_path / "run", packer={"max_async_level": level}))
    times, notes = calibrated(observed)
    assert notes == []
    for name in ("completion_tokens", "prompt_tokens", "publish_seconds", "update_pause_seconds", "wire_seconds",
                 "reward_seconds", "restart_seconds"):  # fmt: skip
        assert getattr(times, name) == pytest.approx(getattr(KNOWN, name)), name
    assert times.completion_spread == pytest.approx(KNOWN.completion_spread)
    assert times.decode_seconds == pytest.approx(KNOWN.decode_seconds, rel=0.1)
    assert times.train_token_seconds == pytest.approx(KNOWN.train_token_seconds, rel=0.1)
    result = simulate(Plan(observed.config, Size.of(observed.config), times, 60))
    assert result.steps_per_second == pytest.approx(observed.steps_per_second, rel=0.03)
    assert result.trainer_idle == pytest.approx(observed.trainer_idle, abs=0.03)


@pytest.mark.slow
def test_a_run_tells_what_another_level_would_bring(tmp_path: Path) -> None:
    """Calibrated at level 0, the simulation foretells the rate at level 1."""
    measured = observe(folder_of(tmp_path / "zero", packer={"max_async_level": 0}))
    other = observe(folder_of(tmp_path / "one", packer={"max_async_level": 1}))
    times, _ = calibrated(measured)
    result = simulate(Plan(other.config, Size.of(other.config), times, 60))
    assert result.steps_per_second == pytest.approx(other.steps_per_second, rel=0.05)
    assert other.steps_per_second > 1.2 * measured.steps_per_second


@pytest.mark.slow
def test_a_run_with_a_slow_reward_has_it_as_its_limit(tmp_path: Path) -> None:
    """From its record alone."""
    observed = observe(folder_of(tmp_path / "run", KNOWN.with_values(reward_seconds=15.0), steps=20))
    times, _ = calibrated(observed)
    found = experiments(Plan(observed.config, Size.of(observed.config), times, 20))
    assert found[0].name == "reward"


def test_shared_cores_are_taken_from_the_run(tmp_path: Path) -> None:
    """progress.json names the cores of a machine without GPUs, the lines the threads of the trainer."""
    folder = folder_of(tmp_path / "run", steps=20)
    (folder / "progress.json").write_text(json.dumps({"cpu_cores": 2}))
    lines = [json.loads(line) | {"torch_threads": 1.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times, _ = calibrated(observe(folder))
    assert (times.cores, times.core_threads) == (2, 1.0)


def test_what_a_run_does_not_tell_is_said(tmp_path: Path) -> None:
    """A run of an older version under way, whose engines' work is not recorded."""
    folder = folder_of(tmp_path / "run", works=False, steps=20)
    for name in ("summary.json", "samples.jsonl"):
        (folder / name).unlink()
    _, notes = calibrated(observe(folder))
    assert [
        word for word in ("prompt_tokens", "wire_seconds", "decode_seconds") if not any(word in n for n in notes)
    ] == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """So is a run that is too short."""
    with pytest.raises(ConfigError, match="no folder of a run"):
        observe(tmp_path)
    folder = folder_of(tmp_path / "run", steps=5)
    with pytest.raises(ConfigError, match="has 5 steps; 8 are needed"):
        observe(folder)
