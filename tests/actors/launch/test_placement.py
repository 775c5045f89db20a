"""The node of each process, by hand for small runs and by count for large ones."""

from collections import Counter
from typing import Any

import pytest

from actors.launch.placement import CONTROL_PORTS, FIRST_CONTROL_PORT, Node, addresses, control_port, place, table
from actors.ops.device_plan import Actor, actors_of, parse_actors, plan_devices
from actors.process.devices import Gpu
from schemas.config import RunConfig
from schemas.config.load import check_tree
from schemas.errors import ConfigError


def run(**sections: Any) -> RunConfig:
    """A run of the fake engine, or of vLLM where `inference` says so."""
    tree: dict[str, Any] = {
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 1},
    }
    return check_tree(tree | sections)


def gpu_run(ranks: int, engines: int, tensor_parallel: int = 1, **sections: Any) -> RunConfig:
    """A run on nodes of 8 GPUs."""
    return run(
        trainer={"max_steps": 1, "num_ranks": ranks},
        inference={"engine": {"type": "vllm", "tensor_parallel_size": tensor_parallel}},
        **{"up": {"inference": engines, "rollout": 4, "reward": 2}, "launch": {"gpus_per_node": 8}, **sections},
    )


def hosts(number: int) -> list[str]:
    """Names."""
    return [f"node-{i}" for i in range(number)]


def machines(config: RunConfig, number: int) -> list[str]:
    """What each node runs."""
    return [node.machine for node in place(config, hosts(number))]


def test_two_nodes_without_gpus() -> None:
    """Trainer and packer on the first, all that samples on the second."""
    assert machines(run(), 2) == ["packer:0,trainer:0", "inference:0,reward:0,rollout:0"]


def test_one_node_runs_everything() -> None:
    """As `actors up`."""
    (node,) = place(run(), ["a"])
    assert list(node.actors) == actors_of(run())


def test_gpus_are_taken_in_order_and_rollouts_stay_off_the_trainer() -> None:
    """Nine ranks fill a node and begin another, which has room for an engine of four GPUs; the next begins a node."""
    assert machines(gpu_run(9, 2, tensor_parallel=4), 3) == [
        "packer:0,trainer:0-7",
        "trainer:8,inference:0",
        "inference:1,reward:0-1,rollout:0-3",
    ]


def test_processes_that_may_be_added_have_their_places_from_the_start() -> None:
    """Those of the largest numbers of `scale`; a node may have none at the start."""
    scale = {"reward": {"min": 1, "max": 3}, "inference": {"min": 1, "max": 4}}
    assert machines(run(scale=scale), 2) == [
        "packer:0,trainer:0,inference:0-1",
        "inference:2-3,reward:0-2,rollout:0",
    ]
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks 8 and 9 of scale\.inference\.max with 1 GPUs each"):
        place(gpu_run(8, 1, scale={"inference": {"min": 1, "max": 9}}), hosts(2))
    assert machines(gpu_run(8, 1, scale={"inference": {"min": 1, "max": 8}}), 2)[1].startswith("inference:0-7,")


def test_a_whole_node_of_ranks_per_node() -> None:
    """Where every node has a trainer, rewards and rollouts are spread over all."""
    assert machines(gpu_run(8, 8), 2) == [
        "packer:0,trainer:0-7",
        "inference:0-7,reward:0-1,rollout:0-3",
    ]
    assert machines(gpu_run(16, 2, up={"inference": 2, "rollout": 4, "colocate": True}), 2) == [
        "packer:0,trainer:0-7,inference:0,reward:0,rollout:0,rollout:2",
        "trainer:8-15,inference:1,rollout:1,rollout:3",
    ]


def test_too_few_gpus_are_refused_with_the_keys() -> None:
    """And an engine larger than a node."""
    with pytest.raises(ConfigError, match=r"launch\.nodes: 1 nodes of launch\.gpus_per_node 8 are too few for trainer"):
        place(gpu_run(8, 1), hosts(1))
    with pytest.raises(ConfigError, match=r"spreads over 16 GPUs, and launch\.gpus_per_node is 8"):
        place(gpu_run(8, 1, tensor_parallel=16), hosts(4))


def test_named_places_hold_and_the_rest_follows() -> None:
    """The packer off the trainer's node; callbacks stay with the packer."""
    config = run(
        up={"inference": 2},
        launch={"place": {"packer": [2], "trainer": [0], "inference": [1, 1]}},
        callbacks=[{"path": "a.py:B"}],
    )
    assert machines(config, 3) == ["trainer:0", "inference:0-1,reward:0,rollout:0", "packer:0,callbacks:0"]
    assert next(node for node in place(config, hosts(3)) if node.has_packer).rank == 2


@pytest.mark.parametrize(
    ("place_", "problem"),
    [
        ({"trainer": [0, 1]}, "launch.place.trainer: 2 nodes for 1 processes of the run"),
        ({"rollout": [5]}, "launch.place.rollout: there is no node 5; the run has 2, counted from 0"),
    ],
)
def test_places_that_do_not_fit_are_refused(place_: dict[str, list[int]], problem: str) -> None:
    """With the key."""
    with pytest.raises(ConfigError) as told:
        place(run(launch={"place": place_}), hosts(2))
    assert problem in told.value.problems


@pytest.mark.parametrize("names", [[], ["a", ""], ["a", "a"]])
def test_a_list_of_nodes_names_each_once(names: list[str]) -> None:
    """An empty name is a comma too many."""
    with pytest.raises(ConfigError, match="--nodes"):
        place(run(), names)


@pytest.mark.parametrize("number", [1, 8, 100])
def test_every_process_is_placed_once_and_each_node_has_its_gpus(number: int) -> None:
    """Half of the GPUs for ranks, the rest for engines of two; the existing plan of devices fits each node."""
    ranks, engines = 4 * number, 2 * number
    config = gpu_run(ranks, engines, 2, up={"inference": engines, "rollout": 3 * number, "reward": number})
    nodes = place(config, hosts(number))
    placed = [actor for node in nodes for actor in node.actors]
    assert Counter(placed) == Counter(actors_of(config))
    for node in nodes:
        plan = plan_devices(config, [Gpu(str(i)) for i in range(8)], node.actors)
        used = [gpu for gpus in plan.of.values() for gpu in gpus]
        assert len(set(used)) == len(used) <= 8
        assert parse_actors(node.machine) == list(node.actors)
    assert sum(actor.kind == "rollout" for actor in nodes[-1].actors) <= -(-3 * number // max(1, number // 2)) + 1


def test_addresses_of_a_node() -> None:
    """The packer binds to its own number, the others are told its name; one node alone keeps its Unix sockets."""
    config = run()
    port = control_port(config)
    nodes = place(config, ["a", "b"])
    assert addresses(config, nodes, 0, "10.0.0.1") == [
        f"bus.control=tcp://10.0.0.1:{port}", "bus.host=10.0.0.1", "inference.host=10.0.0.1",
    ]  # fmt: skip
    assert addresses(config, nodes, 1, "10.0.0.2")[0] == f"bus.control=tcp://a:{port}"
    assert addresses(config, place(config, ["a"]), 0, "10.0.0.1") == []
    six = [Node(0, "fd00::1", (Actor("packer", 0),)), Node(1, "fd00::2", ())]
    other_port = run(bus={"control": "tcp://127.0.0.1:7000"})
    assert addresses(other_port, six, 1, "fd00::2")[0] == "bus.control=tcp://[fd00::1]:7000"


def test_runs_on_shared_nodes_have_control_ports_of_their_own() -> None:
    """A thousand ports: ten runs of one run.yaml share none, or at most one pair of them, and each keeps its port."""
    configs = [run(output_dir=f"/shared/{number}") for number in range(10)]
    ports = [control_port(config) for config in configs]
    assert len(set(ports)) >= 9
    assert all(FIRST_CONTROL_PORT <= port < FIRST_CONTROL_PORT + CONTROL_PORTS for port in ports)
    assert ports == [control_port(config) for config in configs]
    assert control_port(run(name="other", output_dir="/shared/0")) != ports[0]


def test_the_table_has_a_line_per_node() -> None:
    """For people."""
    text = table(gpu_run(8, 8), place(gpu_run(8, 8), hosts(2)))
    assert text.splitlines() == [
        "nodes: 2, 8 GPUs each",
        "    0  node-0  packer:0,trainer:0-7",
        "    1  node-1  inference:0-7,reward:0-1,rollout:0-3",
    ]
