"""`actors launch`: asks a cluster to run a run, or prints what it would be asked for."""

import sys
from collections.abc import Callable
from pathlib import Path

from actors.launch import dstack, kubernetes, ray_nodes, skypilot, slurm
from actors.launch.job import Job
from actors.launch.placement import table

CLUSTERS: dict[str, tuple[Callable[[Path, list[str]], Job], Callable[[Job], str], Callable[[Job], str]]] = {
    "slurm": (Job.of, slurm.script, slurm.submit),
    "ray": (Job.of, ray_nodes.describe, ray_nodes.follow),
    "kubernetes": (kubernetes.job_of, kubernetes.manifests, kubernetes.submit),
    "skypilot": (Job.of, skypilot.task, skypilot.submit),
    "dstack": (Job.of, dstack.task, dstack.submit),
}
"""By kind of cluster: how a job is made of a run.yaml, printed, and started."""


def launch(on: str, path: Path, overrides: list[str], *, dry_run: bool) -> int:
    """Launch a run, or print the script or manifests; return the exit code.

    Args:
        on: kind of cluster.
        path: absolute path of run.yaml.
        overrides: overrides of the configuration.
        dry_run: True to print what the cluster would be asked for, and nothing else.

    Raises:
        ConfigError: the run can't be launched so; the text names the key to change.
    """
    make, render, start = CLUSTERS[on]
    job = make(path, overrides)
    if dry_run:
        print(render(job), end="")
        # on stderr, so that stdout has the script alone
        print(table(job.config, job.nodes), file=sys.stderr)
        return 0
    print(start(job))
    return 0
