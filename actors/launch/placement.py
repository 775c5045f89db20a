"""Placement: the node of each process of a run, and the addresses that follow from it. Pure functions."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from actors.ops.device_plan import Actor, largest_of
from schemas.config import RunConfig
from schemas.config.services import bracketed
from schemas.errors import ConfigError

FIRST_CONTROL_PORT, CONTROL_PORTS = 20_000, 1000
"""First port, and number of ports, for the packer's control address where `bus.control` names none."""
WITH_PACKER = ("inference-pool", "callbacks", "uploader", "tracker")
"""Kinds of actors that are placed with the packer, whose files they read."""


@dataclass(frozen=True)
class Node:
    """A machine of the run.

    Args:
        rank: number of the node, from 0.
        host: name or address under which the other nodes reach this one.
        actors: processes of the node.
    """

    rank: int
    host: str
    actors: tuple[Actor, ...]

    @property
    def has_packer(self) -> bool:
        """True for the node that the others connect to."""
        return any(actor.kind == "packer" for actor in self.actors)

    @property
    def machine(self) -> str:
        """Actors as `actors run --machine` takes them: `packer:0,trainer:0-7`."""
        numbers: dict[str, list[int]] = {}
        for actor in self.actors:
            numbers.setdefault(actor.kind, []).append(actor.index)
        return ",".join(f"{kind}:{part}" for kind, found in numbers.items() for part in _ranges(found))


def place(config: RunConfig, hosts: Sequence[str]) -> list[Node]:
    """Return the nodes of a run with their actors, those that `scale` may add included.

    Args:
        config: configuration of the run.
        hosts: name or address of each node, in the order of their ranks.

    Raises:
        ConfigError: the nodes have too few GPUs, or `launch.place` does not fit the processes or the nodes.
    """
    if problems := _problems(config, hosts):
        raise ConfigError(*problems)
    actors = largest_of(config)
    wished = config.launch.place if isinstance(config.launch.place, dict) else {}
    found: dict[Actor, int] = {
        actor: nodes[actor.index] for actor in actors for kind, nodes in wished.items() if actor.kind == kind
    }
    found |= _computing(config, [actor for actor in actors if actor not in found], found, len(hosts))
    packer = found.setdefault(Actor("packer", 0), 0)
    trainers = {node for actor, node in found.items() if actor.kind == "trainer"}
    # the memory of a trainer's node is full of optimizer state, and its cores feed the GPUs
    free = [node for node in range(len(hosts)) if node not in trainers] or list(range(len(hosts)))
    for actor in actors:
        found.setdefault(actor, packer if actor.kind in WITH_PACKER else free[actor.index % len(free)])
    return [
        Node(rank, host, tuple(actor for actor in actors if found[actor] == rank)) for rank, host in enumerate(hosts)
    ]


def addresses(config: RunConfig, nodes: Sequence[Node], rank: int, own: str) -> list[str]:
    """Return the overrides with which the actors of a node find the others, and tell their own address.

    Args:
        config: configuration of the run.
        nodes: all nodes.
        rank: number of the node.
        own: numeric address of the node, to which its sockets bind.
    """
    is_tcp = config.bus.control.startswith("tcp://")
    # on a single machine Unix sockets are faster, and closed to other users
    if len(nodes) == 1 and not is_tcp:
        return []
    port = config.bus.control.rpartition(":")[2] if is_tcp else control_port(config)
    packer = next(node for node in nodes if node.has_packer)
    # the packer binds to the number: the name may lead to a loopback address on its own machine
    control = own if packer.rank == rank else packer.host
    return [f"bus.control=tcp://{bracketed(control)}:{port}", f"bus.host={own}", f"inference.host={own}"]


def control_port(config: RunConfig) -> int:
    """Return the port of the packer's control address where `bus.control` names none.

    All nodes compute the same port, also when the packer moves to another node. It differs from run to run, as far as a
    thousand ports allow: packers of several runs may be on one node, and other nodes must not find another run's.
    """
    # not the folder's whole path, which may be another one on another machine
    digest = hashlib.sha256(f"{config.name}\0{config.output.name}".encode()).digest()
    return FIRST_CONTROL_PORT + int.from_bytes(digest[:8]) % CONTROL_PORTS


def table(config: RunConfig, nodes: Sequence[Node]) -> str:
    """Return the places as text: a line per node, equal neighbours in one line."""
    width = max(len(node.host) for node in nodes)
    gpus = f", {config.launch.gpus_per_node} GPUs each" if config.launch.gpus_per_node else ""
    lines = [f"nodes: {len(nodes)}{gpus}"]
    return "\n".join(lines + [f"  {node.rank:>3}  {node.host:<{width}}  {node.machine or '-'}" for node in nodes])


def _problems(config: RunConfig, hosts: Sequence[str]) -> list[str]:
    if not hosts or "" in hosts:
        return ["--nodes: name at least one node, and separate names by commas"]
    problems = [f"--nodes: {host} is named twice" for host, number in Counter(hosts).items() if number > 1]
    numbers = Counter(actor.kind for actor in largest_of(config))
    for kind, nodes in config.launch.place.items() if isinstance(config.launch.place, dict) else ():
        if len(nodes) != numbers[kind]:
            problems.append(f"launch.place.{kind}: {len(nodes)} nodes for {numbers[kind]} processes of the run")
        problems += [
            f"launch.place.{kind}: there is no node {node}; the run has {len(hosts)}, counted from 0"
            for node in nodes
            if node >= len(hosts)
        ]
    return problems


def _computing(
    config: RunConfig, actors: Iterable[Actor], placed: Mapping[Actor, int], num_nodes: int
) -> dict[Actor, int]:
    """Return the nodes of trainers and engines: where GPUs are free, else spread evenly in their order.

    Raises:
        ConfigError: no node has the GPUs for one of them.
    """
    engine, gpus = config.inference.engine, config.launch.gpus_per_node
    needs = {"trainer": 1, "inference": engine.num_gpus}
    if not (gpus and config.model.device != "cpu" and engine.loads_model):
        actors = [actor for actor in actors if actor.kind in needs]
        return {actor: i * num_nodes // len(actors) for i, actor in enumerate(actors)}
    # an engine whose server runs elsewhere needs no GPU here, and is placed as a rollout is
    computing = sorted((actor for actor in actors if needs.get(actor.kind)), key=lambda actor: actor.kind != "trainer")
    used = [0] * num_nodes
    for actor, node in placed.items():
        used[node] += needs.get(actor.kind, 0)
    found: dict[Actor, int] = {}
    for actor in computing:
        need = needs[actor.kind]
        if need > gpus:
            raise ConfigError(
                f"inference.engine: an engine spreads over {need} GPUs, and launch.gpus_per_node is {gpus}; start the "
                "server over several nodes yourself (`--on kubernetes` does) and name it in inference.engine.urls"
            )
        fitting = [node for node in range(num_nodes) if used[node] + need <= gpus]
        if not fitting and config.up.colocate and actor.kind == "inference":
            fitting = [min(range(num_nodes), key=used.__getitem__)]
        if not fitting:
            raise ConfigError(_too_few(config, num_nodes, needs))
        found[actor] = fitting[0]
        used[fitting[0]] += need
    return found


def _too_few(config: RunConfig, num_nodes: int, needs: Mapping[str, int]) -> str:
    scaled = config.scale.inference
    ranks, engines = config.trainer.num_ranks, config.up.inference if scaled is None else scaled.most
    key = "up.inference" if scaled is None else "scale.inference.max"
    words = (
        f"launch.nodes: {num_nodes} nodes of launch.gpus_per_node {config.launch.gpus_per_node} are too few for "
        f"trainer.num_ranks {ranks} and {engines} of {key} with {needs['inference']} GPUs each"
    )
    remedy = "ask for more nodes, or lower these keys"
    return f"{words}; {remedy}" if config.up.colocate else f"{words}; {remedy}, or set up.colocate: true"


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers as ranges: 0, 1, 2, 5 are `0-2` and `5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in found]
