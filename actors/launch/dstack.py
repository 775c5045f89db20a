"""dstack: a task of `nodes` nodes, each of which runs `actors node`. Nothing of dstack is imported."""

import tempfile
from typing import Any

from actors.launch.job import PROVISION_SECONDS, Job, Program, script_with_run_yaml, yaml_text

DSTACK = Program("dstack", PROVISION_SECONDS, "install dstack", "dstack apply fails; its words are above")


def task(job: Job) -> str:
    """Return the task as YAML."""
    launch = job.config.launch
    resources: dict[str, Any] = {}
    if launch.gpus_per_node:
        resources["gpu"] = f"{launch.gpu_type}:{launch.gpus_per_node}" if launch.gpu_type else launch.gpus_per_node
    if launch.cpus_per_node:
        resources["cpu"] = f"{launch.cpus_per_node}.."
    if launch.memory_per_node:
        resources["memory"] = f"{job.memory_gib():g}GB.."
    tree: dict[str, Any] = {"type": "task", "name": job.name, "nodes": launch.nodes}
    tree |= {"image": launch.image} if launch.image else {}
    tree |= {"resources": resources} if resources else {}
    # DSTACK_NODES_IPS has an address per line, in the order of the ranks
    tree |= {"shell": "bash"} if launch.image else {}
    tree["commands"] = [script_with_run_yaml(job, '"$DSTACK_NODE_RANK"', '"$DSTACK_NODES_IPS"')]
    return yaml_text(tree)


def submit(job: Job) -> str:
    """Start the task with `dstack apply`; return how to watch, stop and resume the run.

    Raises:
        ConfigError: `dstack` is not there, refuses the task, or does not end.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".dstack.yml", encoding="utf-8") as file:
        file.write(task(job))
        file.flush()
        DSTACK.call(["dstack", "apply", "-y", "-d", "-f", file.name])
    return "\n".join(
        [
            f"watch:   dstack logs {job.name}",
            f"stop:    dstack stop {job.name}",
            "resume:  the same command; output_dir must be on a volume that outlives the nodes",
        ]
    )
