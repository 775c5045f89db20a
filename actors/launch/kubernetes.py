"""Kubernetes: a JobSet with a pod per node that runs `actors node`; a LeaderWorkerSet for engines over several nodes.

    JobSet NAME ── packer (1 pod), node (the others) ──▶ actors node --rank R --nodes NAME-packer-0-0.NAME,…
    LeaderWorkerSet NAME-engine ── a group of pods per engine ──▶ vllm serve over the group's nodes

Only the packer's pod has the server's secret key, and the claim of a ledger outside of `output_dir`. A pod that dies is
replaced under the same name; one that fails for good (exit codes 1, 2 and 3) fails the JobSet.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from actors.launch.job import CALL_SECONDS, Job, Program, yaml_text
from schemas.config import RunConfig, load_config
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError

JOBSET, LEADER_WORKER_SET = "jobset.x-k8s.io/v1alpha2", "leaderworkerset.x-k8s.io/v1"
CONFIG_FOLDER = "/etc/grpo-actors/run"
ENGINE_PORT = 8100
INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation with the number of a pod in its Job."""
FAILURES = [1, 2, 3]
"""Exit codes after which another start would fail again."""
REPLACEMENTS = 1000
"""Pods that may die and be replaced in a run."""

Tree = dict[str, Any]
KUBECTL = Program("kubernetes", CALL_SECONDS, "install it", "kubectl apply fails: {words}")


def job_of(path: Path, overrides: list[str]) -> Job:
    """Return the job of a run.yaml; engines that spread over several nodes become servers of a LeaderWorkerSet.

    Raises:
        ConfigError: as `Job.of`; or the engines can't be spread so.
    """
    config = load_config(path, overrides)
    size = nodes_per_engine(config)
    if size == 1:
        return Job.of(path, overrides)
    name = Job.name_of(config)
    urls = [f"http://{name}-engine-{i}.{name}-engine:{ENGINE_PORT}" for i in range(config.up.inference)]
    return Job.of(path, [*overrides, f"inference.engine.urls={urls}".replace("'", '"')])


def nodes_per_engine(config: RunConfig) -> int:
    """Return the number of nodes over which an engine spreads; 1 where a node has GPUs enough.

    Raises:
        ConfigError: its GPUs can't be divided among nodes, or it is no vLLM.
    """
    engine, gpus = config.inference.engine, config.launch.gpus_per_node
    if not gpus or engine.num_gpus <= gpus:
        return 1
    if not isinstance(engine, VllmEngineConfig):
        raise ConfigError(
            f"inference.engine: {engine.num_gpus} GPUs, and launch.gpus_per_node is {gpus}; only type vllm can spread "
            "over several nodes here"
        )
    if engine.num_gpus % gpus:
        raise ConfigError(
            f"inference.engine: {engine.num_gpus} GPUs can't be divided among nodes of launch.gpus_per_node {gpus}; "
            "change tensor_parallel_size or data_parallel_size"
        )
    return engine.num_gpus // gpus


def manifests(job: Job) -> str:
    """Return all objects as YAML documents.

    Raises:
        ConfigError: `launch.image` or a claim for `output_dir` is missing.
    """
    _check(job.config)
    return yaml_text(*objects(job))


def submit(job: Job) -> str:
    """Apply the objects with kubectl, in its current namespace; return how to watch, stop and resume the run.

    Raises:
        ConfigError: kubectl is not there, refuses the objects, or does not end.
    """
    told = KUBECTL.call(["kubectl", "apply", "-f", "-"], manifests(job))
    return f"{told.strip()}\n{how_to(job.name)}"


def how_to(name: str) -> str:
    """Return the commands for a JobSet."""
    suspend = f'kubectl patch jobset {name} --type=merge -p \'{{"spec":{{"suspend":%s}}}}\''
    return "\n".join(
        [
            f"watch:   kubectl logs -f -l jobset.sigs.k8s.io/replicatedjob-name=packer; kubectl get jobset {name}",
            f"stop:    {suspend % 'true'} (drains, and saves a checkpoint)",
            f"resume:  {suspend % 'false'}",
        ]
    )


def objects(job: Job) -> Iterator[Tree]:
    """Yield the ConfigMap with run.yaml, the JobSet, and the LeaderWorkerSet if engines spread over nodes."""
    labels = {"app.kubernetes.io/part-of": "grpo-actors", "app.kubernetes.io/instance": job.name}
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-run", "labels": labels},
        "data": {"run.yaml": job.path.read_text(encoding="utf-8")},
    }
    packer = next(node for node in job.nodes if node.has_packer)
    others = [node for node in job.nodes if not node.has_packer]
    groups = [_replicated_job(job, "packer", [packer.rank])]
    groups += [_replicated_job(job, "node", [node.rank for node in others])] if others else []
    yield {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": {"name": job.name, "labels": labels},
        "spec": {
            # names are known before pods are ready: nodes wait for each other
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            # a pod is replaced by its Job; a Job that fails has failed for good
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": groups,
        },
    }
    base = load_config(job.path, [o for o in job.overrides if not o.startswith("inference.engine.urls=")])
    if (size := nodes_per_engine(base)) > 1:
        yield _engines(job, base, size, labels)


def hosts(job: Job) -> list[str]:
    """Return the names of the pods by rank, as JobSet makes them: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN."""
    packer = next(node.rank for node in job.nodes if node.has_packer)
    found = []
    for node in job.nodes:
        index = node.rank - (node.rank > packer)
        found.append(f"{job.name}-{'packer-0-0' if node.has_packer else f'node-0-{index}'}.{job.name}")
    return found


def _replicated_job(job: Job, name: str, ranks: list[int]) -> Tree:
    """Return an entry of `replicatedJobs`: an Indexed Job with a pod for each of these ranks."""
    launch = job.config.launch
    has_packer = name == "packer"
    packer = next(node.rank for node in job.nodes if node.has_packer)
    # ranks count on over the packer's
    rank = str(packer) if has_packer else f'"$((NODE_INDEX + (NODE_INDEX >= {packer})))"'
    command = job.node_command(rank, '"$NODES"', "exec actors", PurePosixPath(CONFIG_FOLDER) / "run.yaml")
    # the pod's own address is known before its name is
    command += ' bus.host="$POD_IP" inference.host="$POD_IP"'
    needing = {"trainer"} | ({"inference"} if job.config.inference.engine.num_gpus else set())
    computes = any(actor.kind in needing for node in job.nodes if node.rank in ranks for actor in node.actors)
    environment = [
        {"name": "NODES", "value": ",".join(hosts(job))},
        _from_field("NODE_INDEX", f"metadata.annotations['{INDEX}']"),
        _from_field("POD_IP", "status.podIP"),
    ]
    if job.config.bus.keys:
        environment.append(_from_secret("GRPO_BUS_CLIENT_SECRET_KEY", "bus-client", "client.secret"))
    if has_packer and job.config.bus.keys:
        environment.append(_from_secret("GRPO_BUS_SERVER_SECRET_KEY", "bus-server", "server.secret"))
    if variable := job.config.inference.api_key_env:
        environment.append(_from_secret(variable, "engine-api-key", "key"))
    environment.append({"name": "HOME", "value": "/var/cache/grpo-actors"})
    pod = _pod(job.config, _claims(job.config, has_packer), computes)
    pod |= {"restartPolicy": "Never"}
    pod["containers"] = [
        {
            "name": "node",
            "image": launch.image,
            "command": ["sh", "-c", "\n".join([*launch.commands, command])],
            "env": environment,
            **pod["containers"][0],
        }
    ]
    pod["containers"][0]["volumeMounts"] = [
        {"name": "run-config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        *([{"name": "bus-public", "mountPath": job.config.bus.keys, "readOnly": True}] if job.config.bus.keys else []),
        *pod["containers"][0]["volumeMounts"],
    ]
    pod["volumes"] = [
        {"name": "run-config", "configMap": {"name": f"{job.name}-run"}},
        *([{"name": "bus-public", "configMap": {"name": "bus-public"}}] if job.config.bus.keys else []),
        *pod["volumes"],
    ]
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": len(ranks),
                "parallelism": len(ranks),
                "backoffLimit": REPLACEMENTS,
                "podFailurePolicy": {
                    "rules": [
                        # an eviction is no failure of the pod
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                        {
                            "action": "FailJob",
                            "onExitCodes": {"containerName": "node", "operator": "In", "values": FAILURES},
                        },
                    ]
                },
                "template": {"spec": pod},
            }
        },
    }


def _engines(job: Job, config: RunConfig, size: int, labels: Tree) -> Tree:
    """Return the LeaderWorkerSet: a group of `size` pods per engine, whose leader has the HTTP server."""
    return {
        "apiVersion": LEADER_WORKER_SET,
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{job.name}-engine", "labels": labels},
        "spec": {
            "replicas": config.up.inference,
            "networkConfig": {"subdomainPolicy": "Shared"},
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": size,
                # parts of a model that is spread can't go on alone
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"spec": _engine_pod(config, size, is_leader=True)},
                "workerTemplate": {"spec": _engine_pod(config, size, is_leader=False)},
            },
        },
    }


def _engine_pod(config: RunConfig, size: int, *, is_leader: bool) -> Tree:
    engine = config.inference.engine
    assert isinstance(engine, VllmEngineConfig)
    words = ["vllm", "serve", config.model.path, *_server_options(config, engine)]
    words += ["--nnodes", str(size), "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    words += [] if is_leader else ["--headless"]
    environment: list[Tree] = [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]
    if config.model.lora is not None:
        environment.append({"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"})
    if engine.api_key_env:
        environment.append(_from_secret("VLLM_API_KEY", "engine-api-key", "key"))
    environment.append({"name": "HOME", "value": "/var/cache/grpo-actors"})
    pod = _pod(config, _claims(config, has_packer=False), computes=True)
    container: Tree = {"name": "engine", "image": config.launch.image, "command": words, "env": environment}
    if is_leader:
        container |= {
            "ports": [{"name": "http", "containerPort": ENGINE_PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10},
        }
    pod["containers"] = [container | pod["containers"][0]]
    return pod


def _server_options(config: RunConfig, engine: VllmEngineConfig) -> list[str]:
    """Return the options of the server that an inference actor would start, open to the other pods."""
    # imported here, since most runs have no such engine
    from actors.engines.vllm.process import command

    options = command(config.model, engine, on_cpu=False, port=ENGINE_PORT)[3:]
    # the key of the server's owner is for a server on the actor's own machine
    for name in ("--model", "--middleware"):
        at = options.index(name)
        del options[at : at + 2]
    options[options.index("--host") + 1] = "0.0.0.0"  # noqa: S104 - a pod's address is not known to its manifest
    return options


def _pod(config: RunConfig, claims: dict[str, str], computes: bool) -> Tree:
    """Return the parts common to all pods; of the container all but name, image and command."""
    launch = config.launch
    requests: Tree = {"cpu": str(launch.cpus_per_node or 1)}
    limits: Tree = {}
    if launch.memory_per_node:
        requests["memory"] = limits["memory"] = launch.memory_per_node
    if computes and launch.gpus_per_node:
        limits["nvidia.com/gpu"] = str(launch.gpus_per_node)
    empty = {"tmp": "/tmp", "cache": "/var/cache/grpo-actors", "shared-memory": "/dev/shm"}  # noqa: S108 - in a pod
    folders = {f"claim-{i}": (path, name) for i, (path, name) in enumerate(claims.items())}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": launch.stop_timeout,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"requests": requests, **({"limits": limits} if limits else {})},
                "volumeMounts": [
                    *({"name": name, "mountPath": path} for name, (path, _) in folders.items()),
                    *({"name": name, "mountPath": path} for name, path in empty.items()),
                ],
            }
        ],
        "volumes": [
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, (_, claim) in folders.items()),
            {"name": "tmp", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _claims(config: RunConfig, has_packer: bool) -> dict[str, str]:
    """Return the claims of a pod; one that holds the ledger alone is the packer's."""
    ledger = PurePosixPath(config.ledger_path)
    output = PurePosixPath(config.output)
    return {
        path: claim
        for path, claim in config.launch.claims.items()
        if has_packer or output.is_relative_to(path) or not ledger.is_relative_to(path)
    }


def _check(config: RunConfig) -> None:
    problems = []
    if not config.launch.image:
        problems.append("launch.image: is required by --on kubernetes; deploy/Containerfile makes one")
    if not any(PurePosixPath(config.output).is_relative_to(path) for path in config.launch.claims):
        problems.append(
            f"launch.claims: no claim is mounted at or above output_dir {config.output}, and a run would be lost with "
            "its pods; name one that all nodes can mount (ReadWriteMany), as {/shared: CLAIM}"
        )
    if problems:
        raise ConfigError(*problems)


def _from_field(name: str, path: str) -> Tree:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _from_secret(name: str, secret: str, key: str) -> Tree:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
