"""Runs as a cluster of Kubernetes gets them, and their objects."""

from pathlib import Path
from typing import Any

import yaml

from actors.launch import kubernetes
from actors.launch.job import Job

Tree = dict[str, Any]


def run_yaml(folder: Path, nodes: int, tensor_parallel: int = 2, **sections: Any) -> Path:
    """A run.yaml for nodes of 8 GPUs: half of them ranks, a quarter engines; paths are those in the pods."""
    ranks, engines = max(1, 4 * nodes), max(1, 8 * nodes // 4 // tensor_parallel)
    tree: Tree = {
        "name": "Math_1",
        "output_dir": "/shared/math",
        "model": {"path": "Qwen/Qwen2.5-72B-Instruct"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 4, "num_ranks": ranks},
        "inference": {
            "engine": {"type": "vllm", "tensor_parallel_size": tensor_parallel, "max_model_len": 4096},
            "api_key_env": "GRPO_ENGINE_API_KEY",
        },
        "up": {"inference": engines, "rollout": 2 * nodes, "reward": nodes},
        "weights": {"directory": "/shared/weights"},
        "bus": {"keys": "/etc/grpo-actors/keys"},
        "ledger": {"path": "/ledger/ledger.sqlite"},
        "launch": {
            "nodes": nodes,
            "gpus_per_node": 8,
            "cpus_per_node": 32,
            "memory_per_node": "256Gi",
            "image": "registry/grpo-actors:0.1.0",
            "claims": {"/shared": "run", "/ledger": "ledger"},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree | sections, sort_keys=False))
    return path


def job(folder: Path, nodes: int, tensor_parallel: int = 2, overrides: tuple[str, ...] = ()) -> Job:
    """The job of such a run."""
    return kubernetes.job_of(run_yaml(folder, nodes, tensor_parallel), list(overrides))


def objects(found: Job) -> dict[str, Tree]:
    """The objects by kind, read back from the text."""
    return {one["kind"]: one for one in yaml.safe_load_all(kubernetes.manifests(found))}
