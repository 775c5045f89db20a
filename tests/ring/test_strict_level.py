"""Lag of exactly `packer.max_async_level`, in the whole ring."""

import json
from pathlib import Path

import pytest

from tests.ring.harness import check_promise, ring, ring_config, summary_of


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ordinal", "arrival"])
def test_each_step_is_sampled_by_the_weights_of_the_level(tmp_path: Path, order: str) -> None:
    """Level 2, eight steps of three groups, evaluations before and after: lags 0, 1, then 2 for all groups."""
    packer = {"groups_per_step": 3, "sequence_len": 64, "max_async_level": 2, "strict_async_level": True}
    config = ring_config(tmp_path, packer=packer | {"order": order}, weights={"keep": 4})
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}
    lines = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [one for one in map(json.loads, lines) if "lag_max" in one]
    lags = [(one["lag_mean"], one["lag_max"]) for one in steps]
    assert lags == [(lag, lag) for lag in (0, 1, 2, 2, 2, 2, 2, 2)]
    assert summary_of(config)["eval_after"]["reverse_text"]["num_prompts"] == 3
