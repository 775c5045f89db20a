"""Trackers with transformers' and prime-rl's words, as several systems share them."""

from collections.abc import Mapping
from typing import Any

from actors.imports.job import Import

KINDS = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab")
"""Trackers that are built, by transformers' name and ours."""
NAMES_BY_KIND: Mapping[str, Mapping[str, str]] = {
    "wandb": {"wandb_project": "project", "wandb_entity": "entity", "wandb_run_group": "group"},
    "tensorboard": {"logging_dir": "logging_dir"},
    "trackio": {"project": "project", "trackio_space_id": "space_id"},
    "mlflow": {},
    "swanlab": {"swanlab_project": "project", "swanlab_workspace": "workspace", "swanlab_exp_name": "name"},
}
"""Our key by the origin's, by tracker."""


def report_to(job: Import, names: str) -> None:
    """Write the trackers of `report_to`, with the keys of each.

    Args:
        job: the import.
        names: value of `telemetry.names`.
    """
    given = job.given.get("report_to")
    asked = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
    asked = [one for one in asked if one not in ("none", "")]
    unknown = [one for one in asked if one not in KINDS]
    if job.unreadable(["report_to"]) or unknown:
        others = ", ".join(map(str, unknown))
        what = f"{others} is not built, or stands for several" if others else "it can't be read"
        job.refuse("report_to", what, f"write telemetry.trackers with some of {', '.join(KINDS)}")
    elif asked:
        targets: dict[str, Any] = {f"telemetry.trackers.{i}.type": kind for i, kind in enumerate(asked)}
        job.convert("report_to", targets | {"telemetry.names": names}, "each in a process of its own")
        for index, kind in enumerate(asked):
            for key, target in NAMES_BY_KIND[kind].items():
                if isinstance(job.given.get(key), str) and job.given[key] and not job.is_reported(key):
                    job.rename(key, f"telemetry.trackers.{index}.{target}")
    job.settle("report_to", "none")
    for keys in NAMES_BY_KIND.values():
        for key in keys:
            job.settle(key, "its tracker is not on, or it is empty")


def tracker_section(job: Import, kind: str, path: str, keys: Mapping[str, str], names: str) -> None:
    """Write the tracker of a section of its own, such as `monitors.wandb`.

    Args:
        job: the import.
        kind: the tracker.
        path: key of the section.
        keys: our key by the section's. Other keys of the section are settled.
        names: value of `telemetry.names`.
    """
    index = next(i for i in range(len(KINDS) + 1) if job.run.get(f"telemetry.trackers.{i}.type") is None)
    start = f"telemetry.trackers.{index}"
    given = [key for key in job.given if key == path or key.startswith(f"{path}.")]
    job.convert(given[:1], {f"{start}.type": kind, "telemetry.names": names}, "in a process of its own")
    for key, target in keys.items():
        value = job.given.get(f"{path}.{key}")
        if value not in (None, "", []):
            job.run.set(f"{start}.{target}", value, f"{path}.{key}")
    for key in given:
        job.settle(key, f"{start}, as far as there is such a key")
