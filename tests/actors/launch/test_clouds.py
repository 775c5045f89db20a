"""Tasks for SkyPilot and dstack, and the words for Ray; the scripts of the tasks run in a shell."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from actors.launch import dstack, ray_nodes, skypilot
from actors.launch.job import Job
from schemas.errors import ConfigError
from tests.actors.launch.cluster_runs import run_yaml

SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}


def job(folder: Path, nodes: int = 3, *overrides: str) -> Job:
    """A run for nodes with H100s."""
    return Job.of(run_yaml(folder, nodes), ["launch.gpu_type=H100", *overrides])


@pytest.mark.parametrize("nodes", [1, 8, 100])
def test_a_task_asks_for_the_nodes_of_the_run(tmp_path: Path, nodes: int) -> None:
    """Numbers, GPUs, cores, memory and image, in the keys of each system."""
    sky = yaml.safe_load(skypilot.task(job(tmp_path, nodes)))
    assert (sky["name"], sky["num_nodes"]) == ("math-1-e43c94", nodes)
    assert sky["resources"] == {
        "accelerators": "H100:8", "cpus": "32+", "memory": "256+", "image_id": "docker:registry/grpo-actors:0.1.0",
    }  # fmt: skip
    stack = yaml.safe_load(dstack.task(job(tmp_path, nodes)))
    assert (stack["type"], stack["nodes"], stack["image"]) == ("task", nodes, "registry/grpo-actors:0.1.0")
    assert stack["resources"] == {"gpu": "H100:8", "cpu": "32..", "memory": "256GB.."}


@pytest.mark.parametrize(
    ("task", "key", "variables"),
    [(skypilot.task, "run", SKY), (dstack.task, "commands", DSTACK)],
    ids=["sky", "dstack"],
)
def test_the_script_of_a_node_brings_run_yaml_and_starts_its_rank(
    tmp_path: Path, task: Callable[[Job], str], key: str, variables: dict[str, str]
) -> None:
    """With a stand-in for `actors` that prints its words: commands first, addresses as they come, one per line."""
    found = job(tmp_path, 3, "launch.commands=['export WORD=done']", "trainer.max_steps=7")
    text = yaml.safe_load(task(found))[key]
    text = text[0] if isinstance(text, list) else text
    node = tmp_path / "node"
    node.mkdir()
    actors = node / "actors"
    actors.write_text('#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done; echo $WORD\n')
    actors.chmod(0o755)
    environment = variables | {"PATH": f"{node}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    done = subprocess.run(["bash", "-c", text], cwd=node, env=environment, capture_output=True, text=True, check=True)
    addresses = "10.0.0.1\n10.0.0.2\n10.0.0.3"
    words = ["node", "--rank", "1", "--nodes", addresses, "run.yaml", "launch.gpu_type=H100"]
    words += ["launch.commands=['export WORD=done']", "trainer.max_steps=7"]
    assert done.stdout == "".join(f"<{word}>\n" for word in words) + "done\n"
    assert (node / "run.yaml").read_text() == found.path.read_text()


def test_skypilot_wants_the_name_of_the_gpu(tmp_path: Path) -> None:
    """It picks machines by it."""
    with pytest.raises(ConfigError, match=r"launch\.gpu_type: is required by --on skypilot"):
        skypilot.task(job(tmp_path, 2, "launch.gpu_type=''"))
    assert "resources" not in yaml.safe_load(
        skypilot.task(
            job(
                tmp_path, 2, "launch.gpus_per_node=0", "launch.cpus_per_node=0", "launch.memory_per_node=''",
                "launch.image=''",
            )
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("submit", "program", "words"),
    [
        (skypilot.submit, "sky", ["launch", "-y", "-d", "-c", "math-1-e43c94"]),
        (dstack.submit, "dstack", ["apply", "-y", "-d", "-f"]),
    ],
)
def test_the_program_of_the_system_gets_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: Callable[[Job], str], program: str, words: list[str]
) -> None:
    """A stand-in for it keeps what it gets; without the program, and when it fails, that is said."""
    found = job(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{program} can't be started"):
        submit(found)
    stand_in = tmp_path / program
    stand_in.write_text(
        '#!/bin/sh\n/bin/echo "$@" > "${0%/*}/words"\nfor last; do :; done\n/bin/cp "$last" "${0%/*}/task"\n'
    )
    stand_in.chmod(0o755)
    told = submit(found)
    assert [line.split()[0] for line in told.splitlines()] == ["watch:", "stop:", "resume:"]
    assert (tmp_path / "words").read_text().split()[: len(words)] == words
    assert yaml.safe_load((tmp_path / "task").read_text())["name"] == "math-1-e43c94"
    stand_in.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="fails; its words are above"):
        submit(found)


def test_ray_is_told_the_bundles_and_the_command_of_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--dry-run` prints; tests/system/test_ray.py runs it. Without Ray the extra is named."""
    monkeypatch.setitem(sys.modules, "ray", None)
    lines = ray_nodes.describe(job(tmp_path, 2)).splitlines()
    assert lines[0] == "placement group, STRICT_SPREAD: 2 bundles of {'CPU': 32, 'GPU': 8}"
    assert lines[2].startswith(f"actors node --rank 1 --nodes ADDRESS0,ADDRESS1 {tmp_path / 'run.yaml'} output_dir=/sh")
    with pytest.raises(ConfigError, match=r"Ray is not installed; install grpo-actors\[ray\]"):
        ray_nodes.follow(job(tmp_path, 2))
