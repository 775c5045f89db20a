"""The objects of deploy/kubernetes: as they stand in the files, as kubectl renders them, and what is in their pods."""

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.system.tools import tool

ROOT = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = ("cpu-demo", "gpu-node", "multi-node")
KINDS = ("packer", "trainer", "inference", "reward", "rollout")
NAME, PART_OF = "app.kubernetes.io/name", "app.kubernetes.io/part-of"
KUBECTL = "apt-get install kubernetes-client"

Tree = dict[str, Any]


@functools.cache
def load_all(text: str) -> list[Tree]:
    """All objects of a text."""
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def rendered_text(overlay: str) -> str:
    """What kubectl makes of an overlay."""
    command = [tool("kubectl", KUBECTL), "kustomize", str(ROOT / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@functools.cache
def listed_text(folder: Path) -> str:
    """What the kustomization of a folder lists, and those that it stands on, without its patches."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    below = [listed_text((folder / base).resolve()) for base in kustomization.get("bases", [])]
    return "\n---\n".join([*below, *((folder / name).read_text() for name in kustomization["resources"])])


def of_kind(objects: list[Tree], *kinds: str) -> list[Tree]:
    """Those of some kinds."""
    return [one for one in objects if one["kind"] in kinds]


def pods_of(objects: list[Tree]) -> dict[str, Tree]:
    """Pod specs by actor."""
    found = of_kind(objects, "StatefulSet", "Deployment")
    return {one["spec"]["template"]["metadata"]["labels"][NAME]: one["spec"]["template"]["spec"] for one in found}


def container_of(pod: Tree) -> Tree:
    """The one container of a pod."""
    (container,) = pod["containers"]
    return dict(container)


def override_of(pod: Tree, key: str) -> str:
    """The value of an argument `key=value` of the actor."""
    (value,) = [a.partition("=")[2] for a in container_of(pod)["args"] if a.partition("=")[0] == key]
    return str(value)


def ports_of(pod: Tree) -> dict[str, int]:
    """Ports of the container, by name."""
    return {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}
