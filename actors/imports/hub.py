"""Uploads and the best metric, with transformers' names, as TRL and ms-swift share them."""

from actors.imports.job import Import

KEYS = ("hub_model_id", "hub_private_repo", "hub_revision", "hub_always_push")
"""Keys that have their name in `push_to_hub` too."""


def uploads(job: Import, other_hub: str = "") -> None:
    """Write uploads of checkpoints.

    Args:
        job: the import.
        other_hub: reason why the origin does not push to the Hugging Face hub; empty: it does.
    """
    if job.given.get("hub_token"):
        job.refuse("hub_token", "a token never stands in run.yaml", "set HF_TOKEN, or push_to_hub.token_env")
    job.settle("hub_token", "empty")
    if job.given.get("push_to_hub") is True and other_hub:
        job.refuse("push_to_hub", other_hub, "set push_to_hub.hub_model_id for the Hugging Face hub")
    elif job.given.get("push_to_hub") is True:
        strategy = job.given.get("hub_strategy") or "every_save"
        job.convert(
            ["push_to_hub", "hub_strategy"],
            {"push_to_hub.hub_strategy": strategy},
            f"true: checkpoints are pushed by a process of their own, {strategy}",
        )
        for key in KEYS:
            if job.given.get(key) is not None:
                job.rename(key, f"push_to_hub.{key}")
            job.settle(key, "empty")
    elif job.unreadable(["push_to_hub"]):
        job.refuse("push_to_hub", "nothing is uploaded", "set push_to_hub.hub_model_id")
    job.settle("push_to_hub", "switched off")
    for key in ("hub_strategy", *KEYS):
        job.settle(key, "nothing is uploaded")


def best_metric(job: Import) -> None:
    """Write the metric by which callbacks know the best evaluation."""
    metric, greater = job.given.get("metric_for_best_model"), job.given.get("greater_is_better")
    if isinstance(metric, str) and metric:
        job.rename("metric_for_best_model", "eval.metric_for_best_model")
        if greater is None and metric.endswith("loss"):
            job.run.set("eval.greater_is_better", False, "transformers' default for a loss")
        elif greater is not None:
            job.rename("greater_is_better", "eval.greater_is_better")
    job.settle("metric_for_best_model", "empty")
    job.settle("greater_is_better", "only with metric_for_best_model")
