"""The templates of JobSet and LeaderWorkerSet as Jobs and pods of the API, by its schemas; no cluster is asked."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.actors.launch.cluster_runs import Tree, job, objects
from tests.system.tools import tool

pytestmark = pytest.mark.system


def templates(found: dict[str, Tree]) -> list[Tree]:
    """Each template as the object that the controller makes of it, and the ConfigMap."""
    made = [found["ConfigMap"]]
    for group in found["JobSet"]["spec"]["replicatedJobs"]:
        made.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": group["name"]}, **group["template"]})
    parts = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **parts[name]})
    return made


def validated(folder: Path, made: list[Tree]) -> "subprocess.CompletedProcess[str]":
    """What kubernetes-validate says, strictly."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(made))
    validate = tool("kubernetes-validate", "pip install -r tests/system/requirements.txt")
    return subprocess.run([validate, "--strict", path], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("nodes", [2, 8, 100])
def test_the_api_knows_every_field_of_the_templates(tmp_path: Path, nodes: int) -> None:
    """And a field that the API does not know is noticed in each of them."""
    made = templates(objects(job(tmp_path, nodes, 16, ("up.inference=2",))))
    assert [one["kind"] for one in made] == ["ConfigMap", "Job", "Job", "Pod", "Pod"]
    completed = validated(tmp_path, made)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for one in made[1:]:
        pod = one["spec"]["template"]["spec"] if one["kind"] == "Job" else one["spec"]
        pod["enableServiceLink"] = pod.pop("enableServiceLinks")
        assert validated(tmp_path, [one]).returncode != 0
