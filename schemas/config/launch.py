"""Keys of `launch`: the nodes on which `actors launch` and `actors node` run the actors, and the request for them."""

from typing import Literal

from pydantic import Field, field_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free

PlacedKind = Literal[
    "packer", "trainer", "inference", "inference-pool", "reward", "rollout", "callbacks", "uploader", "tracker"
]
Places = dict[PlacedKind, list[int]]
"""Nodes by kind of actor: a node per process, in the order of their names (trainer-0, trainer-1, …)."""


class LaunchConfig(Section):
    """Nodes of a cluster for `actors launch`, and the processes that each of them runs."""

    nodes: Free[int] = Field(1, ge=1)
    """Number of nodes that `actors launch` asks for."""
    gpus_per_node: Free[int] = Field(0, ge=0)
    """GPUs of each node. 0: none is asked for, and processes that compute are spread evenly."""
    gpu_type: Free[str] = Field("", pattern=r"^[A-Za-z0-9_.:-]*$")
    """Name of the GPU where the cluster wants one (`--on skypilot`, `--on dstack`), e.g. `H100`."""
    cpus_per_node: Free[int] = Field(0, ge=0)
    """CPU cores asked for on each node. 0: as the cluster decides."""
    memory_per_node: Free[str] = Field("", pattern=r"^([1-9]\d*(Mi|Gi))?$")
    """Memory asked for on each node, e.g. `64Gi`. Empty: as the cluster decides."""
    place: Free[Literal["auto"] | Places] = "auto"
    """Nodes of the processes, counted from 0, e.g. `{trainer: [0, 0], inference: [1, 1]}`; kinds that are left out are
    placed as with `auto`. `auto`: the packer on node 0, trainer ranks and then engines on the first nodes with free
    GPUs, rewards and rollouts in turn on the nodes without a trainer. `actors launch --dry-run` prints the places."""
    image: Free[str] = Field("", pattern=r"^\S*$")
    """Container image of each node, with `actors` in it. Required with `--on kubernetes`; empty elsewhere: the node
    itself."""
    commands: Free[list[str]] = []
    """Shell commands on each node before its processes start, e.g. `source /shared/venv/bin/activate`."""
    stop_timeout: Free[int] = Field(240, ge=1)
    """Seconds that a node gets to drain and to save a checkpoint: before the time limit of a job, and between SIGTERM
    and SIGKILL where the cluster can be told."""
    sbatch: Free[dict[str, str | int | bool]] = {}
    """Further options of `sbatch` by name without dashes, e.g. `{partition: gpu, time: "8:00:00", exclusive: true}`."""
    claims: Free[dict[str, str]] = {}
    """Persistent volume claims that `--on kubernetes` mounts, by the path in the containers. A shared one must hold
    `output_dir`."""

    @field_validator("place")
    @classmethod
    def _places_are_indices(cls, place: Literal["auto"] | Places) -> Literal["auto"] | Places:
        for kind, nodes in place.items() if isinstance(place, dict) else ():
            if any(node < 0 for node in nodes):
                raise ValueError(f"{kind}: {nodes} must be nodes, counted from 0")
        return place

    @field_validator("sbatch")
    @classmethod
    def _options_are_bare(cls, options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name, value in options.items():
            if name.startswith("-") or not name or "\n" in f"{name}{value}":
                raise ValueError(f"{name!r} must be the name of an option without dashes, with a value on one line")
            if name in OWN_OPTIONS:
                raise ValueError(f"{name} is set by `actors launch`; remove it ({OWN_OPTIONS[name]})")
        return options

    @field_validator("claims")
    @classmethod
    def _claims_have_places(cls, claims: dict[str, str]) -> dict[str, str]:
        for path, name in claims.items():
            if not path.startswith("/") or not name:
                raise ValueError(f"{path!r}: {name!r} must be the absolute path of a folder, and the name of a claim")
        return claims


OWN_OPTIONS = {
    "nodes": "launch.nodes",
    "ntasks-per-node": "one task per node starts all of its processes",
    "ntasks": "one task per node starts all of its processes",
    "signal": "launch.stop_timeout",
    "requeue": "always set",
    "no-requeue": "a job must survive a requeue",
    "open-mode": "always append",
    "gpus-per-node": "launch.gpus_per_node",
    "cpus-per-task": "launch.cpus_per_node",
    "mem": "launch.memory_per_node",
    "array": "a run is one job",
}
"""Options of `sbatch` that follow from other keys, or that a run relies on."""
