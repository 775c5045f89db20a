"""SkyPilot: a task of `num_nodes` nodes, each of which runs `actors node`. Nothing of SkyPilot is imported."""

import tempfile
from typing import Any

from actors.launch.job import PROVISION_SECONDS, Job, Program, script_with_run_yaml, yaml_text
from schemas.errors import ConfigError

SKY = Program("skypilot", PROVISION_SECONDS, "install skypilot", "sky launch fails; its words are above")


def task(job: Job) -> str:
    """Return the task as YAML.

    Raises:
        ConfigError: GPUs are asked for, and `launch.gpu_type` does not name them.
    """
    launch = job.config.launch
    resources: dict[str, Any] = {}
    if launch.gpus_per_node:
        if not launch.gpu_type:
            raise ConfigError("launch.gpu_type: is required by --on skypilot with launch.gpus_per_node, e.g. H100")
        resources["accelerators"] = f"{launch.gpu_type}:{launch.gpus_per_node}"
    if launch.cpus_per_node:
        resources["cpus"] = f"{launch.cpus_per_node}+"
    if launch.memory_per_node:
        resources["memory"] = f"{job.memory_gib():g}+"
    if launch.image:
        resources["image_id"] = f"docker:{launch.image}"
    tree: dict[str, Any] = {"name": job.name, "num_nodes": launch.nodes}
    tree |= {"resources": resources} if resources else {}
    # SKYPILOT_NODE_IPS has an address per line, in the order of the ranks
    tree["run"] = script_with_run_yaml(job, '"$SKYPILOT_NODE_RANK"', '"$SKYPILOT_NODE_IPS"')
    return yaml_text(tree)


def submit(job: Job) -> str:
    """Start the task with `sky launch`; return how to watch, stop and resume the run.

    Raises:
        ConfigError: `sky` is not there, refuses the task, or does not end.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(task(job))
        file.flush()
        SKY.call(["sky", "launch", "-y", "-d", "-c", job.name, file.name])
    return "\n".join(
        [
            f"watch:   sky logs {job.name}",
            f"stop:    sky cancel {job.name} --all",
            "resume:  the same command, on the same cluster; output_dir must be on a disk that outlives the nodes",
        ]
    )
