"""The manifests of deploy/kubernetes against the topology that the code prints, the API's schemas, and the actors.

What compares files with the code runs everywhere; what is marked `system` renders with kubectl. There is no cluster
here: that pods reach each other through the policies is compared, not tried.
"""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.ops.up.child import KEEP_FREED_MEMORY
from actors.process.membership import DRAIN_SECONDS
from bus.keys import SECRET_VARIABLES
from schemas.config import RunConfig, load_config, warnings
from tests.system.cluster import secrets_of
from tests.system.edges import differences
from tests.system.manifests import (
    KINDS,
    NAME,
    OVERLAYS,
    PART_OF,
    ROOT,
    Tree,
    container_of,
    listed_text,
    load_all,
    of_kind,
    override_of,
    pods_of,
    ports_of,
    rendered_text,
)
from tests.system.tools import tool

CHECKED_BY_HAND = ("PodMonitor",)
"""A kind of the Prometheus operator, whose schemas no package of ours brings."""
FROM_THE_HUB = {"rollout", "trainer", "inference"}

system = pytest.mark.system


@pytest.fixture(params=["files", pytest.param("kubectl", marks=system)])
def source(request: pytest.FixtureRequest) -> str:
    """Objects as they stand in the files, and as kubectl renders them."""
    return str(request.param)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    """Each overlay."""
    return str(request.param)


@pytest.fixture
def objects(source: str, overlay: str) -> list[Tree]:
    """All objects of an overlay."""
    return load_all(listed_text(ROOT / overlay) if source == "files" else rendered_text(overlay))


@pytest.fixture
def rendered(overlay: str) -> list[Tree]:
    """All objects of an overlay, patched."""
    return load_all(rendered_text(overlay))


@pytest.fixture
def config(overlay: str) -> RunConfig:
    """The run of an overlay."""
    return load_config(ROOT / overlay / "run.yaml")


# --- the ring's edges ------------------------------------------------------------------------------------------------


def test_services_ports_and_policies_are_the_edges_of_the_runs_topology(objects: list[Tree], config: RunConfig) -> None:
    """No edge is missing, and nothing else is let through."""
    assert differences(objects, config) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bus.control", "tcp://packer-0.packer:5556"),
        ("bus.control", "tcp://packer-1.packer:5555"),
        ("bus.control", "tcp://packer-0.other:5555"),
        ("inference.port", 8001),
        ("telemetry.metrics_port", 9465),
        ("weights.channel", "rendezvous"),
        ("trainer.num_ranks", 2),
    ],
)
def test_a_key_that_is_changed_in_run_yaml_alone_is_noticed(key: str, value: object) -> None:
    """The comparison can fail from this side."""
    config = load_config(ROOT / "cpu-demo/run.yaml", [f"{key}={value}"])
    assert differences(load_all(listed_text(ROOT / "cpu-demo")), config)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("containerPort: 5555", "containerPort: 5556"),
        ("port: 5555", "port: 5556"),
        ("containerPort: 8000", "containerPort: 8001"),
        ("containerPort: 9464", "containerPort: 9465"),
        ("bus.control=tcp://$(POD_IP):5555", "bus.control=tcp://$(POD_IP):5556"),
        ("port: 20000", "port: 20001"),
        ("endPort: 21999", "endPort: 22000"),
        ("20000 21999", "5000 21999"),
        ("name: rollout\n      ports:", "name: inference\n      ports:"),
        ("publishNotReadyAddresses: true", "publishNotReadyAddresses: false"),
    ],
)
def test_a_manifest_that_is_changed_alone_is_noticed(before: str, after: str) -> None:
    """The comparison can fail from that side. A change is made where it applies first, the sysctl in all pods."""
    text = listed_text(ROOT / "cpu-demo")
    changed = re.sub(rf"(?<!\w){re.escape(before)}", lambda _: after, text, count=0 if before[0] == "2" else 1)
    assert changed != text
    assert differences(load_all(changed), load_config(ROOT / "cpu-demo/run.yaml"))


def test_all_is_denied_that_no_policy_allows_and_few_reach_outside(objects: list[Tree], overlay: str) -> None:
    """DNS for all, metrics for Prometheus; the hub over HTTPS for those who read the model, in runs that have one."""
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    assert policies.pop("default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    outside = {
        (name, port["port"])
        for name, spec in policies.items()
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]
        for peer in [*rule.get("from", []), *rule.get("to", [])]
        if set(peer) != {"podSelector"}
        for port in rule["ports"]
    }
    hub = {("hub", 443)} if overlay != "cpu-demo" else set()
    assert outside == {("dns", 53), ("prometheus", 9464)} | hub
    if hub:
        (chosen,) = policies["hub"]["podSelector"]["matchExpressions"]
        assert (chosen["key"], set(chosen["values"])) == (NAME, FROM_THE_HUB)


# --- pods ------------------------------------------------------------------------------------------------------------


def test_pods_may_do_nothing_that_an_actor_does_not_need(objects: list[Tree]) -> None:
    """Non-root, nothing written but into volumes, no token of the API, and no environment of other services."""
    for kind, pod in pods_of(objects).items():
        container, context = container_of(pod), pod["securityContext"]
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), kind
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == context["fsGroup"] == _uid_of_the_image()
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def _uid_of_the_image() -> int:
    found = re.search(r"^USER (\d+)", (ROOT.parent / "Containerfile").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _mounts(objects: list[Tree], kind: str) -> dict[str, Tree]:
    """What is mounted where: the volume, or the claim of a StatefulSet's own."""
    (owner,) = [one for one in of_kind(objects, "StatefulSet", "Deployment") if one["metadata"]["name"] == kind]
    pod = pods_of(objects)[kind]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    own = {claim["metadata"]["name"]: claim for claim in owner["spec"].get("volumeClaimTemplates", [])}
    return {mount["mountPath"]: (volumes | own)[mount["name"]] for mount in container_of(pod)["volumeMounts"]}


def test_what_a_run_writes_lies_on_claims_and_the_ledger_on_the_packers_own(
    objects: list[Tree], config: RunConfig
) -> None:
    """The ledger needs a disk; output_dir is shared, and by many nodes where pods are not on one."""
    for kind in ("packer", "trainer", "inference"):
        assert _mounts(objects, kind)[str(config.output)]["persistentVolumeClaim"]["claimName"] == "run"
    ledger = _mounts(objects, "packer")[str(config.ledger_path.parent)]
    assert ledger["spec"]["accessModes"] == ["ReadWriteOnce"]
    for kind in KINDS:
        assert _mounts(objects, kind)[config.bus.keys]["configMap"] == {"name": "bus-public"}
        assert "emptyDir" in _mounts(objects, kind)["/tmp"]


@system
def test_many_nodes_have_storage_that_many_nodes_may_write(rendered: list[Tree], overlay: str) -> None:
    """And pods of one node a disk of it: those of gpu-node are all sent to one."""
    (claim,) = of_kind(rendered, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if overlay == "multi-node" else "ReadWriteOnce"]
    chosen = [pod.get("nodeSelector") for pod in pods_of(rendered).values()]
    assert chosen == [{"grpo-actors/node": "run"} if overlay == "gpu-node" else None] * len(KINDS)


@system
def test_replicas_are_what_the_run_and_its_rules_allow(rendered: list[Tree], config: RunConfig) -> None:
    """One packer, a pod for each rank; a GPU for each pod that computes, where there are any."""
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in of_kind(rendered, "StatefulSet", "Deployment")
    }
    assert (replicas["packer"], replicas["trainer"]) == (1, config.trainer.num_ranks)
    gpus = {
        kind for kind, pod in pods_of(rendered).items() if "nvidia.com/gpu" in container_of(pod)["resources"]["limits"]
    }
    assert gpus == (set() if config.name == "grpo-demo" else {"trainer", "inference"})
    (run,) = of_kind(rendered, "ConfigMap")
    assert run["metadata"]["name"].startswith("run-"), "pods start again when run.yaml changes"
    assert yaml.safe_load(run["data"]["run.yaml"])["name"] == run["metadata"]["namespace"] == config.name


def test_names_are_unique_in_a_run_and_give_trainer_and_engine_their_numbers(objects: list[Tree]) -> None:
    """StatefulSets number their pods; other names of pods may end in any number, and engines add theirs to a port."""
    for kind, pod in pods_of(objects).items():
        stateful = kind in ("packer", "trainer")
        assert override_of(pod, "--name") == ("$(POD_NAME)" if stateful else "$(POD_NAME)-0")
        assert container_of(pod)["args"][:3] == ["run", kind, "--config=/etc/grpo-actors/run/run.yaml"]
        assert {override_of(pod, key) for key in ("bus.host", "telemetry.metrics_host")} == {"$(POD_IP)"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_given_the_time_that_actors_take(kind: str) -> None:
    """To drain, and for a main loop that waits as it may, with the defaults of run.yaml."""
    config = load_config(ROOT / "gpu-node/run.yaml")
    pod = pods_of(load_all(listed_text(ROOT / "gpu-node")))[kind]
    container, checkpoint = container_of(pod), config.trainer.checkpoint.timeout
    loop_seconds = {
        "packer": config.ledger.commit_timeout,
        "trainer": checkpoint,
        "inference": 2 * config.weights.timeout,
    }.get(kind, 1.0)
    within = {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness")}
    (found,) = [re.fullmatch(r"/healthz\?within=(\d+)", path) for path in within]
    assert found
    assert float(found[1]) > loop_seconds
    assert pod["terminationGracePeriodSeconds"] > (checkpoint if kind == "trainer" else DRAIN_SECONDS)
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= (1800 if kind in ("trainer", "inference") else 300)


@pytest.mark.parametrize("kind", ["trainer", "inference"])
def test_actors_that_compute_keep_freed_memory_as_under_actors_up(objects: list[Tree], kind: str) -> None:
    """The same variables."""
    environment = {one["name"]: one.get("value") for one in container_of(pods_of(objects)[kind])["env"]}
    assert environment.items() >= KEEP_FREED_MEMORY.items()


def test_selectors_choose_the_pods_that_they_mean(objects: list[Tree]) -> None:
    """Of controllers, services, budgets, policies and the monitor."""
    labels = [{PART_OF: "grpo-actors", NAME: kind} for kind in KINDS]
    for one in of_kind(objects, "StatefulSet", "Deployment", "PodDisruptionBudget"):
        assert one["spec"]["selector"]["matchLabels"] == {PART_OF: "grpo-actors", NAME: one["metadata"]["name"]}
        assert one["spec"]["selector"]["matchLabels"] in labels
    assert {one["metadata"]["name"] for one in of_kind(objects, "PodDisruptionBudget")} == set(KINDS)


def test_the_pod_monitor_scrapes_every_actor_under_the_labels_of_metrics_targets(objects: list[Tree]) -> None:
    """By hand, since its schema is not in the API's: fields that the operator's documentation names, and no other."""
    (monitor,) = of_kind(objects, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    assert monitor["spec"]["selector"] == {"matchLabels": {PART_OF: "grpo-actors"}}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint.keys() == {"port", "path", "interval", "relabelings"}
    assert all(endpoint["port"] in ports_of(pod) for pod in pods_of(objects).values())
    assert [one["targetLabel"] for one in endpoint["relabelings"]] == ["run", "actor", "name"]
    assert all(one.keys() == {"sourceLabels", "targetLabel"} for one in endpoint["relabelings"])


def test_run_yaml_is_good_but_for_what_each_pod_adds(config: RunConfig) -> None:
    """Two addresses, which are the pod's own; with them nothing is warned of."""
    assert {warning.partition(":")[0] for warning in warnings(config)} == {"bus.host", "inference.host"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_run_yaml_with_the_overrides_of_its_pods_is_not_warned_of(overlay: str) -> None:
    """As a pod reads it."""
    addresses = [f"{key}=10.1.2.3" for key in ("bus.host", "inference.host", "telemetry.metrics_host")]
    assert warnings(load_config(ROOT / overlay / "run.yaml", addresses)) == []


# --- what kubectl and the API say ------------------------------------------------------------------------------------


@system
def test_the_api_knows_every_object_and_every_field(rendered: list[Tree], overlay: str, tmp_path: Path) -> None:
    """Offline, by the schemas of kubernetes-validate; the kinds that it does not know are those checked by hand."""
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered_text(overlay))
    validate = tool("kubernetes-validate", "pip install -r tests/system/requirements.txt")
    completed = subprocess.run([validate, "--strict", path], capture_output=True, text=True, check=False, timeout=120)
    said = completed.stdout + completed.stderr
    assert completed.returncode == 0, said
    unknown = {word for line in said.splitlines() if "find schema" in line for word in re.findall(r"kind (\w+)", line)}
    assert unknown == set(CHECKED_BY_HAND), said
    assert not re.search(r"^ERROR", said, re.MULTILINE), said


@system
def test_a_field_that_the_api_does_not_know_is_noticed(tmp_path: Path) -> None:
    """The test above can fail."""
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered_text("cpu-demo").replace("enableServiceLinks:", "enableServiceLink:"))
    validate = tool("kubernetes-validate", "pip install -r tests/system/requirements.txt")
    completed = subprocess.run([validate, "--strict", path], capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode != 0


@system
def test_secrets_and_config_maps_that_pods_read_are_those_that_there_are(rendered: list[Tree], tmp_path: Path) -> None:
    """By name and key; the packer's secret is for the packer alone."""
    secrets = secrets_of(tmp_path / "keys")
    there = {
        (one["kind"], one["metadata"]["name"], key) for one in [*rendered, *secrets] for key in one.get("data", ())
    }
    for kind, pod in pods_of(rendered).items():
        wanted = {
            ("Secret", one["valueFrom"]["secretKeyRef"]["name"], one["valueFrom"]["secretKeyRef"]["key"])
            for one in container_of(pod)["env"]
            if "secretKeyRef" in one.get("valueFrom", {})
        }
        assert wanted <= there
        assert ("bus-server" in {name for _, name, _ in wanted}) == (kind == "packer")
        maps = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
        assert maps <= {name for kind, name, _ in there if kind == "ConfigMap"}
        assert SECRET_VARIABLES["client"] in {one["name"] for one in container_of(pod)["env"]}
