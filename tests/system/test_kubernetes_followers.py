"""The pods of callbacks, uploads and trackers in deploy/kubernetes/followers, beside those of a run."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.cli.parser import ACTORS
from actors.ops.up.followers import CALLBACKS_END_SECONDS, FOLLOWERS
from schemas.config import load_config
from schemas.config.push_to_hub import PushToHubConfig
from tests.system.manifests import (
    KUBECTL,
    NAME,
    OVERLAYS,
    ROOT,
    Tree,
    container_of,
    listed_text,
    load_all,
    of_kind,
    pods_of,
)
from tests.system.tools import tool

FOLDER = ROOT / "followers"


@pytest.fixture
def objects() -> list[Tree]:
    """All objects of the folder."""
    return load_all(listed_text(FOLDER))


@pytest.mark.parametrize("kind", FOLLOWERS)
def test_a_follower_is_an_actor_with_the_rights_of_a_reward_actor(objects: list[Tree], kind: str) -> None:
    """What keeps a pod of the base in its place keeps this one in its place too."""
    pod, other = pods_of(objects)[kind], pods_of(load_all(listed_text(ROOT / "base")))["reward"]
    container, others = container_of(pod), container_of(other)
    assert kind in ACTORS
    assert container["args"] == [kind if word == "reward" else word for word in others["args"]]
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert pod[key] == other[key]
    for key in ("securityContext", "image", "ports", "terminationMessagePolicy"):
        assert container[key] == others[key]
    extra = {one["name"] for one in container["env"]} - {one["name"] for one in others["env"]}
    assert extra == ({"HF_TOKEN"} if kind == "uploader" else set())
    assert all(one in container["env"] for one in others["env"])
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("kind", FOLLOWERS)
def test_a_follower_reads_and_writes_the_folder_of_the_run_alone_of_its_kind(objects: list[Tree], kind: str) -> None:
    """Where the packer has output_dir, and never as two pods at once."""
    pod, packer = pods_of(objects)[kind], pods_of(load_all(listed_text(ROOT / "base")))["packer"]
    (mount,) = [one for one in container_of(packer)["volumeMounts"] if one["name"] == "run"]
    (volume,) = [one for one in packer["volumes"] if one["name"] == "run"]
    assert mount in container_of(pod)["volumeMounts"]
    assert volume in pod["volumes"]
    (deployment,) = [one for one in of_kind(objects, "Deployment") if one["metadata"]["name"] == kind]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_followers_are_given_the_time_that_they_take(objects: list[Tree]) -> None:
    """As long as `actors up` waits for them."""
    pods = pods_of(objects)
    assert pods["callbacks"]["terminationGracePeriodSeconds"] > CALLBACKS_END_SECONDS
    assert pods["tracker"]["terminationGracePeriodSeconds"] > CALLBACKS_END_SECONDS
    assert pods["uploader"]["terminationGracePeriodSeconds"] > PushToHubConfig().end_timeout


def test_followers_reach_the_packer_and_those_that_send_reach_public_services(objects: list[Tree]) -> None:
    """The control port is that of each overlay; private addresses stay closed."""
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    control = [{"port": 5555, "protocol": "TCP"}]
    for overlay in OVERLAYS:
        assert load_config(ROOT / overlay / "run.yaml").bus.control.endswith(":5555")
    chosen = {"matchExpressions": [{"key": NAME, "operator": "In", "values": list(FOLLOWERS)}]}
    assert policies["followers"]["podSelector"] == chosen
    (egress,) = policies["followers"]["egress"]
    assert (egress["to"][0]["podSelector"]["matchLabels"][NAME], egress["ports"]) == ("packer", control)
    assert policies["packer-followers"]["podSelector"]["matchLabels"][NAME] == "packer"
    assert policies["packer-followers"]["ingress"] == [{"from": [{"podSelector": chosen}], "ports": control}]
    public = policies["public-services"]
    assert public["podSelector"]["matchExpressions"][0]["values"] == ["uploader", "tracker"]
    (downloads,) = load_all((ROOT / "gpu-node/hub.yaml").read_text())
    assert public["egress"] == downloads["spec"]["egress"]
    assert set(policies) == {"followers", "packer-followers", "public-services"}


@pytest.mark.system
def test_an_overlay_takes_the_followers_as_a_base(tmp_path: Path, objects: list[Tree]) -> None:
    """As the page says: one more line of its kustomization."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(ROOT, folder)
    file = folder / "cpu-demo/kustomization.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["bases"].append("../followers")
    file.write_text(yaml.safe_dump(tree))
    command = [tool("kubectl", KUBECTL), "kustomize", str(folder / "cpu-demo")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    rendered = load_all(text)
    assert set(FOLLOWERS) < pods_of(rendered).keys()
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered}
    assert {(one["kind"], one["metadata"]["name"]) for one in objects} <= names
    assert {one["metadata"]["namespace"] for one in rendered if one["kind"] != "Namespace"} == {"grpo-demo"}
