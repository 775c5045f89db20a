"""Where the manifests and the topology of their run differ, in words."""

from itertools import product

from bus.topology import EDGES
from schemas.config import RunConfig
from tests.system.manifests import KINDS, NAME, Tree, of_kind, override_of, pods_of, ports_of

Ports = tuple[int, int]
"""First and last."""
Way = tuple[str, str, Ports]
"""Who connects, to whom, where."""


def data_ports(pods: dict[str, Tree]) -> Ports:
    """What the kernel hands out where a socket asks for any free port; the same in all pods."""
    (text,) = {pod["securityContext"]["sysctls"][0]["value"] for pod in pods.values()}
    first, last = map(int, text.split())
    return first, last


def _ways_of(config: RunConfig, data: Ports) -> set[Way]:
    """Who must reach whom, by `actors topology` and what joins trainer ranks and engines besides."""
    (_, control), http = _control(config), config.inference.port
    fixed = {"control": (control, control), "completions": (http, http)}
    ways: set[Way] = set()
    for edge in EDGES:
        connectors = [kind for kind in KINDS if edge.connector in (kind, "every actor") and kind != edge.binder]
        if edge.name != "weights":
            ways |= {(connector, edge.binder, fixed.get(edge.name, data)) for connector in connectors}
    if config.weights.channel == "rendezvous":
        ways |= {(one, other, data) for one, other in product(("trainer", "inference"), repeat=2)}
    if config.trainer.num_ranks > 1:
        ways.add(("trainer", "trainer", data))
    return ways


def _peers(rule: Tree, word: str) -> list[str]:
    return [peer["podSelector"]["matchLabels"][NAME] for peer in rule[word] if set(peer) == {"podSelector"}]


def _ranges(rule: Tree) -> list[Ports]:
    return [(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]]


def _ways_let_in(policies: list[Tree]) -> set[Way]:
    rules = [(p, rule) for p in policies for rule in p["spec"].get("ingress", [])]
    return {(c, _target(p), r) for p, rule in rules for c in _peers(rule, "from") for r in _ranges(rule)}


def _ways_let_out(policies: list[Tree]) -> set[Way]:
    rules = [(p, rule) for p in policies for rule in p["spec"].get("egress", [])]
    return {(_target(p), b, r) for p, rule in rules for b in _peers(rule, "to") for r in _ranges(rule)}


def _target(policy: Tree) -> str:
    return str(policy["spec"]["podSelector"].get("matchLabels", {}).get(NAME, "all"))


def differences(objects: list[Tree], config: RunConfig) -> list[str]:
    """What is in one and not in the other."""
    pods = pods_of(objects)
    ways = _ways_of(config, data_ports(pods))
    return [
        *_policies_differ(of_kind(objects, "NetworkPolicy"), ways),
        *_ports_differ(pods, config),
        *_services_differ(objects, config),
    ]


def _policies_differ(policies: list[Tree], wanted: set[Way]) -> list[str]:
    found = []
    for words, ways in (("ingress", _ways_let_in(policies)), ("egress", _ways_let_out(policies))):
        found += [f"{words}: {way} is missing" for way in wanted - ways]
        found += [f"{words}: {way} is on no edge" for way in ways - wanted]
    return found


def _ports_differ(pods: dict[str, Tree], config: RunConfig) -> list[str]:
    """What containers say that they bind, and what they are told to."""
    _, control = _control(config)
    fixed = {kind: {"metrics": config.telemetry.metrics_port} for kind in KINDS}
    fixed["packer"] |= {"control": control}
    fixed["inference"] |= {"completions": config.inference.port}
    said = {kind: ports_of(pod) for kind, pod in pods.items()}
    found = [f"{kind}: ports {said[kind]}, not {fixed[kind]}" for kind in KINDS if said[kind] != fixed[kind]]
    first, last = data_ports(pods)
    for kind, ports in fixed.items():
        found += [f"{kind}: port {port} may be handed out" for port in ports.values() if first <= port <= last]
    bound = override_of(pods["packer"], "bus.control")
    if bound != f"tcp://$(POD_IP):{control}":
        found.append(f"packer binds {bound}, others connect to {config.bus.control}")
    return found


def _services_differ(objects: list[Tree], config: RunConfig) -> list[str]:
    """The one name that is configured is the packer's: a headless service gives it, before the packer is ready."""
    host, control = _control(config)
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    found, pods = [], pods_of(objects)
    for name, spec in services.items():
        (port,) = spec["ports"]
        if ports_of(pods[spec["selector"][NAME]]).get(port["targetPort"]) != port["port"]:
            found.append(f"service {name}: no port {port} of its pods")
        if spec["clusterIP"] != "None":
            found.append(f"service {name}: has an address of its own")
    named = {
        (f"{one['metadata']['name']}-0.{service}", services[service]["ports"][0]["port"])
        for one in of_kind(objects, "StatefulSet")
        if services[service := one["spec"]["serviceName"]]["publishNotReadyAddresses"]
    }
    if (host, control) not in named:
        found.append(f"bus.control {host}:{control} is none of the names that services give: {named}")
    return found


def _control(config: RunConfig) -> tuple[str, int]:
    host, _, port = config.bus.control.removeprefix("tcp://").rpartition(":")
    return host, int(port)
