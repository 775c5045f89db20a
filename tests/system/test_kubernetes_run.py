"""What the pods of deploy/kubernetes do, run here: their commands, each with its own address, and their sysctl."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.config import load_config
from tests.ring.harness import check_promise, wait_until
from tests.system.cluster import Cluster, address_of, secrets_of
from tests.system.edges import data_ports
from tests.system.manifests import load_all, pods_of, rendered_text
from tests.system.tools import missing, tool

pytestmark = [pytest.mark.system, pytest.mark.slow]

BIND = """
import zmq
from bus.weights.process_groups import Store
sockets = [zmq.Context.instance().socket(zmq.PULL) for _ in range(50)]
for one in sockets:
    one.bind("tcp://127.0.0.1:*")
    print(one.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\\0").rpartition(":")[2])
print(Store("127.0.0.1").address.rpartition(":")[2])
"""
"""Ports of 50 sockets of the bus, and of a store of the weight channel."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Started; ended with the test."""
    made = Cluster(load_all(rendered_text("cpu-demo")), secrets_of(tmp_path / "made"), tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


def test_the_pods_commands_make_a_run_that_ends_with_nothing_lost(cluster: Cluster) -> None:
    """Keys from Secrets, each actor bound to its own address, the ports of the manifests, metrics where they belong."""
    config = load_config(cluster.config_path)
    targets = config.output / "metrics_targets.json"
    wait_until(lambda: targets.exists() and len(json.loads(targets.read_text())) == len(cluster.processes), "all there")
    scraped = {target["targets"][0] for target in json.loads(targets.read_text())}
    ends = {name: process.wait(120.0) for name, process in cluster.processes.items()}
    assert set(ends.values()) == {0}, {name: (cluster.folder / f"{name}.log").read_text()[-500:] for name in ends}
    numbers = {"packer": 1, "trainer": 1, "inference": 1, "reward": 2, "rollout": 2}
    assert scraped == {f"{address_of(kind, n)}:9464" for kind, count in numbers.items() for n in range(count)}
    check_promise(config)


def test_sockets_that_take_any_free_port_take_one_that_the_policies_let_through() -> None:
    """With the pods' sysctl, in a network namespace: what the kernel hands out is the range of `endPort`."""
    tool("unshare", "apt-get install util-linux")
    tool("ip", "apt-get install iproute2")
    if os.getuid() != 0:
        missing("network namespaces need root: run the tests as root")
    first, last = data_ports(pods_of(load_all(rendered_text("multi-node"))))
    limit = f"ip link set lo up && echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range"
    command = ["unshare", "--net", "sh", "-c", f'{limit} && exec "$@"', "sh", sys.executable, "-c", BIND]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    ports = [int(line) for line in completed.stdout.split()]
    assert len(ports) == 51
    assert all(first <= port <= last for port in ports), ports
