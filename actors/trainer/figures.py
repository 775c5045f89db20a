"""Figures of a trained step, for metrics and log."""

from collections.abc import Mapping

import structlog

from actors.telemetry.metrics import Metrics
from schemas.messages import StepBatch

log = structlog.get_logger("trainer")


def show_step(metrics: Metrics, batch: StepBatch, values: Mapping[str, float]) -> None:
    """Count a trained step, set the gauges to its figures, and log it."""
    metrics.count("grpo_trainer_steps_total")
    metrics.count("grpo_trainer_tokens_total", values["tokens"])
    for phase in ("forward_backward", "optimizer"):
        metrics.count("grpo_trainer_step_seconds_total", values.get(f"seconds_{phase}", 0.0), phase=phase)
    # figures that a loss does not have stay 0, so that every series is there from the first step on
    for name in ("loss", "grad_norm", "learning_rate", "mismatch_kl", "entropy"):
        metrics.set(f"grpo_trainer_{name}", values.get(name, 0.0))
    for age in ("current", "older"):
        metrics.set("grpo_trainer_mismatch_abs", values.get(f"mismatch_abs_{age}", 0.0), weights=age)
    metrics.set("grpo_trainer_masked_fraction", values.get("masked_fraction", 0.0), cause="any")
    for cause in ("low", "high", "geo", "sequence"):
        metrics.set("grpo_trainer_masked_fraction", values.get(f"masked_fraction_{cause}", 0.0), cause=cause)
    log.info(
        "step trained",
        loss=round(values["loss"], 5),
        grad_norm=round(values["grad_norm"], 4),
        mismatch_kl=round(values.get("mismatch_kl", 0.0), 6),
        groups=len(batch.ordinals),
    )
