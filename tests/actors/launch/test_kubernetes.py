"""JobSet and LeaderWorkerSet, held strictly against the fields of their published definitions; no cluster is asked."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from actors.launch import kubernetes
from actors.launch.job import Job
from schemas.config import load_config
from schemas.errors import ConfigError
from tests.actors.launch.cluster_runs import Tree, job, objects, run_yaml

CRDS = Path(__file__).parent / "crds"


def check(one: Tree) -> None:
    """An object's spec against the definition of its kind."""
    schema = yaml.safe_load((CRDS / f"{one['kind'].lower()}.yaml").read_text())
    jsonschema.Draft202012Validator(schema).validate(one["spec"])


@pytest.mark.parametrize("nodes", [1, 8, 100])
def test_a_jobset_has_a_pod_per_node_and_nothing_that_its_definition_lacks(tmp_path: Path, nodes: int) -> None:
    """One for the packer's node, the others in a Job of their own; all names are in the list that each gets."""
    found = objects(job(tmp_path, nodes))
    assert set(found) == {"ConfigMap", "JobSet"}
    check(found["JobSet"])
    groups = {group["name"]: group["template"]["spec"] for group in found["JobSet"]["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in groups.items()} == (
        {"packer": 1, "node": nodes - 1} if nodes > 1 else {"packer": 1}
    )
    for spec in groups.values():
        listed = _variable(spec, "NODES")["value"].split(",")
        places = ["packer-0-0", *(f"node-0-{i}" for i in range(nodes - 1))]
        assert listed == [f"math-1-e43c94-{place}.math-1-e43c94" for place in places]
        assert spec["parallelism"] == spec["completions"]
        assert _container(spec)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert load_config(tmp_path / "run.yaml").launch.nodes == nodes
    assert found["ConfigMap"]["data"]["run.yaml"] == (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize("nodes", [1, 8, 100])
def test_engines_over_several_nodes_are_a_leader_worker_set(tmp_path: Path, nodes: int) -> None:
    """Sixteen GPUs of nodes of eight: groups of two pods; inference actors use the leaders' servers."""
    path = run_yaml(tmp_path, nodes, 16)
    found = objects(kubernetes.job_of(path, ["trainer.num_ranks=8"] if nodes == 1 else []))
    engines = found["LeaderWorkerSet"]
    check(engines)
    check(found["JobSet"])
    number = load_config(path).up.inference
    assert engines["spec"]["replicas"] == number
    template = engines["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert worker["command"] == [*leader["command"], "--headless"]
    options = dict(zip(leader["command"][3:], leader["command"][4:], strict=False))
    assert (options["--tensor-parallel-size"], options["--nnodes"], options["--host"]) == ("16", "2", "0.0.0.0")
    assert {"--enable-scale-out", "--logprobs-mode"} <= set(leader["command"])
    packer = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert f'"http://math-1-e43c94-engine-{number - 1}.math-1-e43c94-engine:8100"]' in _container(packer)["command"][2]


@pytest.mark.parametrize("kind", ["JobSet", "LeaderWorkerSet"])
def test_a_field_that_a_definition_lacks_or_of_another_type_is_noticed(tmp_path: Path, kind: str) -> None:
    """At every level down to the templates: the checks above can fail."""
    one = objects(job(tmp_path, 8, 16))[kind]
    places: list[tuple[Any, ...]] = [(), ("networkConfig",), ("leaderWorkerTemplate",)]
    places += [("leaderWorkerTemplate", "workerTemplate")]
    if kind == "JobSet":
        places = [(), ("network",), ("failurePolicy",), ("replicatedJobs", 0), ("replicatedJobs", 1, "template")]
    for place in places:
        wrong = copy.deepcopy(one)
        _at(wrong["spec"], place)["replicaz"] = 1
        with pytest.raises(jsonschema.ValidationError, match="replicaz"):
            check(wrong)
    wrong = copy.deepcopy(one)
    wrong["spec"]["startupPolicy" if kind == "LeaderWorkerSet" else "suspend"] = "no"
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)


@pytest.mark.parametrize(("packer", "index", "rank"), [(0, 0, 1), (0, 6, 7), (2, 1, 1), (2, 2, 3), (7, 6, 6)])
def test_ranks_of_the_other_pods_count_on_over_the_packers(tmp_path: Path, packer: int, index: int, rank: int) -> None:
    """As the shell in the pod counts them; the list of names is in the order of the ranks."""
    spec = objects(job(tmp_path, 8, 2, (f"launch.place={{packer: [{packer}]}}",)))["JobSet"]["spec"]
    groups = {group["name"]: group["template"]["spec"] for group in spec["replicatedJobs"]}
    names = _variable(groups["node"], "NODES")["value"].split(",")
    assert names[packer] == "math-1-e43c94-packer-0-0.math-1-e43c94"
    assert names[rank] == f"math-1-e43c94-node-0-{index}.math-1-e43c94"
    environment = {"NODE_INDEX": str(index), "NODES": ",".join(names), "POD_IP": "10.1.2.3", "PATH": "/usr/bin:/bin"}
    command = _container(groups["node"])["command"]
    text = command[2].replace("exec actors", "echo")
    printed = subprocess.run([*command[:2], text], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(f"node --rank {rank} --nodes {','.join(names)} /etc/grpo-actors/run/run.yaml")
    assert printed.endswith(" bus.host=10.1.2.3 inference.host=10.1.2.3\n")
    assert f"--rank {packer} " in _container(groups["packer"])["command"][2]


def test_the_ledger_and_the_servers_key_are_the_packers_alone(tmp_path: Path) -> None:
    """A disk that one pod can mount; a key that no other pod needs."""
    groups = objects(job(tmp_path, 8))["JobSet"]["spec"]["replicatedJobs"]
    for group in groups:
        spec = group["template"]["spec"]
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in spec["template"]["spec"]["volumes"]
                  if "persistentVolumeClaim" in volume}  # fmt: skip
        names = {variable["name"] for variable in _container(spec)["env"]}
        has_packer = group["name"] == "packer"
        assert claims == ({"run", "ledger"} if has_packer else {"run"})
        assert ("GRPO_BUS_SERVER_SECRET_KEY" in names) == has_packer
        assert {"GRPO_BUS_CLIENT_SECRET_KEY", "GRPO_ENGINE_API_KEY"} <= names


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("launch.image=''", "launch.image: is required by --on kubernetes"),
        ("launch.claims={/ledger: ledger}", "launch.claims: no claim is mounted at or above output_dir /shared/math"),
        ("inference.engine.tensor_parallel_size=12", "12 GPUs can't be divided among nodes of launch.gpus_per_node 8"),
        ("bus.keys=''", "bus.keys: is required with launch.nodes above 1"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, override: str, problem: str) -> None:
    """Before anything is applied."""
    with pytest.raises(ConfigError, match=problem):
        kubernetes.manifests(job(tmp_path, 8, 2, (override,)))


def test_kubectl_gets_the_objects_and_its_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in keeps its input; without kubectl that is said."""
    found = job(tmp_path, 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="kubectl can't be started: No such file or directory; install it"):
        kubernetes.submit(found)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\n/bin/cat > "${0%/*}/got"\necho "jobset $*"\n')
    kubectl.chmod(0o755)
    told = kubernetes.submit(found).splitlines()
    assert told[0] == "jobset apply -f -"
    assert [line.split()[0] for line in told[1:]] == ["watch:", "stop:", "resume:"]
    assert 'math-1-e43c94 --type=merge -p \'{"spec":{"suspend":true}}\'' in told[2]
    assert (tmp_path / "got").read_text() == kubernetes.manifests(found)
    kubectl.write_text("#!/bin/sh\necho 'no matches for kind JobSet' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="kubectl apply fails: no matches for kind JobSet"):
        kubernetes.submit(found)


def test_pods_without_anything_that_computes_ask_for_no_gpu(tmp_path: Path) -> None:
    """Engines run elsewhere, ranks on the packer's node."""
    overrides = ("trainer.num_ranks=8", 'inference.engine.urls=["http://a:1", "http://b:1"]', "up.inference=2")
    groups = objects(job(tmp_path, 2, 2, overrides))["JobSet"]["spec"]["replicatedJobs"]
    has_gpu = {g["name"]: "nvidia.com/gpu" in _container(g["template"]["spec"])["resources"]["limits"] for g in groups}
    assert has_gpu == {"packer": True, "node": False}


def test_names_are_those_that_the_api_allows(tmp_path: Path) -> None:
    """Of a run named with capitals, points and digits; a digest of output_dir makes it a name of this run alone."""
    for name, expected in (("Math_1", "math-1"), ("7.b", "run-7-b"), ("a", "a"), ("_", "run")):
        words = [f"name='{name}'", "output_dir=/shared/a"]
        config, other = (load_config(run_yaml(tmp_path, 1), [*words, *more]) for more in ([], ["output_dir=/shared/b"]))
        assert re.fullmatch(rf"{expected}-[0-9a-f]{{6}}", Job.name_of(config))
        assert Job.name_of(config) != Job.name_of(other)


def _container(spec: Tree) -> Tree:
    (container,) = spec["template"]["spec"]["containers"]
    return dict(container)


def _variable(spec: Tree, name: str) -> Tree:
    return next(dict(variable) for variable in _container(spec)["env"] if variable["name"] == name)


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for part in place:
        tree = tree[part]
    return tree
