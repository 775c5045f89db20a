"""Plan of devices: the GPUs that each process on a machine gets, from the configuration and the number of GPUs.

A process sees its own GPUs only (CUDA_VISIBLE_DEVICES), so device 0 is right in every process. `actors up` and
`actors run --machine` apply the same plan, and `actors check` prints it, also for a machine that is not there yet.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from actors.process.devices import ORDER, SHARED, VISIBLE, Gpu, visible_gpus
from schemas.config import RunConfig
from schemas.config.scale import ScaledRole
from schemas.config.up import Devices
from schemas.errors import ConfigError

COMPUTING = ("trainer", "inference")
"""Kinds of actors that compute with the model; all others get GPUs only if `up.devices` names them."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""torch's settings of its memory pool on GPUs."""


@dataclass(frozen=True, order=True)
class Actor:
    """A process of the run: kind and replica index, as in the name `trainer-0`."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True)
class DevicePlan:
    """GPUs of the processes on one machine.

    Args:
        gpus: the machine's GPUs; an index in `of` points into them.
        of: indices of the GPUs of each actor.
        torch_kinds: kinds of actors that compute with torch themselves.
    """

    gpus: Sequence[Gpu]
    of: Mapping[Actor, tuple[int, ...]]
    torch_kinds: frozenset[str]

    def shared(self, actor: Actor) -> bool:
        """Return whether another process uses a GPU of this actor."""
        others = {gpu for other, gpus in self.of.items() if other != actor for gpu in gpus}
        return not others.isdisjoint(self.of[actor])

    def environment(self, actor: Actor, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that show an actor its GPUs, and no other.

        Args:
            actor: an actor of the plan.
            inherited: environment to be extended; wins where a user may have chosen otherwise.
        """
        found = {VISIBLE: ",".join(self.gpus[gpu].entry for gpu in self.of[actor])}
        if VISIBLE not in inherited:  # else the entries are indices in the order that holds already
            found[ORDER] = "PCI_BUS_ID"
        found[SHARED] = "1" if self.shared(actor) else "0"
        # not for a server such as vLLM, which has a pool of its own
        if self.of[actor] and actor.kind in self.torch_kinds:
            # rows of ever new lengths would break a pool of fixed segments into unusable pieces
            found[ALLOCATOR] = inherited.get(ALLOCATOR, "expandable_segments:True")
        return found

    def table(self) -> str:
        """Return the plan for people: a line per process with GPUs, then who has none, then GPUs without a process."""
        if not self.gpus:
            return "devices: no GPU; trainer and engines compute on the CPU"
        kinds = Counter(gpu.name or "GPU" for gpu in self.gpus)
        lines = ["devices: " + ", ".join(f"{number} × {name}" for name, number in kinds.items())]
        for actor, gpus in self.of.items():
            if gpus:
                shared = " (shared)" if self.shared(actor) else ""
                lines.append(f"  {actor!s:<14} GPU {', '.join(map(str, gpus))}{shared}")
        without = [str(actor) for actor, gpus in self.of.items() if not gpus]
        if without:
            lines.append(f"  no GPU:        {', '.join(without)}")
        used = {gpu for gpus in self.of.values() for gpu in gpus}
        if unused := [str(gpu) for gpu in range(len(self.gpus)) if gpu not in used]:
            lines.append(f"  unused:        GPU {', '.join(unused)}")
        return "\n".join(lines)


def actors_of(config: RunConfig) -> list[Actor]:
    """Return the processes that a run starts with."""
    return _actors(config, config.processes)


def largest_of(config: RunConfig) -> list[Actor]:
    """Return the processes of a run whose roles have grown to the largest numbers that `scale` allows."""
    return _actors(config, config.processes | {role: keys.most for role, keys in config.scale.roles.items()})


def _actors(config: RunConfig, processes: Mapping[ScaledRole, int]) -> list[Actor]:
    numbers = {
        "packer": 1,
        "trainer": config.trainer.num_ranks,
        **({"inference": processes["inference"]} if config.inference.pool is None else {"inference-pool": 1}),
        "reward": processes["reward"],
        "rollout": processes["rollout"],
        "callbacks": int(bool(config.callbacks)),
        "uploader": int(config.push_to_hub is not None),
        "tracker": len(config.telemetry.trackers),
    }
    return [Actor(kind, index) for kind, number in numbers.items() for index in range(number)]


def plan_here(config: RunConfig, actors: Iterable[Actor]) -> DevicePlan | None:
    """Return the plan for this machine; None if its GPUs can't be counted (ROCm, Jetson): processes then see all.

    Raises:
        ConfigError: as `plan_devices`; or the machine has no GPU, and `model.device` is cuda.
    """
    gpus = visible_gpus()
    if gpus is None:
        return None
    if not gpus and config.model.device == "cuda" and config.inference.engine.loads_model:
        raise ConfigError("model.device: cuda, but this machine has no GPU (/dev/nvidia*); use cpu or auto")
    return plan_devices(config, gpus, actors)


def planned_table(config: RunConfig, num_gpus: int | None, machine: str | None) -> str:
    """Return the plan as text, also for a machine that is not there; empty if this machine has no GPU to plan.

    Args:
        config: configuration of the run.
        num_gpus: number of the machine's GPUs; None for this machine.
        machine: actors on the machine, as `trainer:0,rollout:0-3`; None for all of the run.

    Raises:
        ConfigError: the given machine has too few GPUs. About this machine, the text says so: a configuration may be
            checked anywhere.
    """
    actors = largest_of(config) if machine is None else parse_actors(machine)
    if num_gpus is not None:
        return plan_devices(config, [Gpu(str(index)) for index in range(num_gpus)], actors).table()
    try:
        plan = plan_here(config, actors)
    except ConfigError as error:
        return f"devices: not on this machine: {error}"
    if plan is None:
        return "devices: the GPUs of this machine can't be counted; all processes see all of them"
    return plan.table() if plan.gpus else ""


def take_devices(config: RunConfig, machine: str, name: str) -> None:
    """Show this process its GPUs of the plan, and no other. Call before torch is imported.

    Args:
        config: configuration of the run.
        machine: all actors on this machine, as `trainer:0,rollout:0-3`.
        name: name of this actor.

    Raises:
        ConfigError: the list lacks this actor, or as `plan_here`.
    """
    actors = parse_actors(machine)
    mine = [actor for actor in actors if str(actor) == name]
    if not mine:
        raise ConfigError(f"--machine: {machine} lacks {name}, this actor; name all actors on this machine")
    if plan := plan_here(config, actors):
        os.environ |= plan.environment(mine[0], os.environ)


def parse_actors(words: str) -> list[Actor]:
    """Return the actors in a list as `trainer:0,inference:0-3`.

    Raises:
        ConfigError: a part of the list is no KIND:NUMBER and no KIND:FIRST-LAST.
    """
    actors = []
    for word in words.split(","):
        found = re.fullmatch(r"([a-z-]+):(\d+)(?:-(\d+))?", word.strip())
        if found is None:
            raise ConfigError(
                f"--machine: {word!r} must be KIND:NUMBER or KIND:FIRST-LAST, as in trainer:0,rollout:0-3"
            )
        kind, first, last = found.groups()
        actors += [Actor(kind, index) for index in range(int(first), int(last or first) + 1)]
    return actors


def plan_devices(config: RunConfig, gpus: Sequence[Gpu], actors: Iterable[Actor]) -> DevicePlan:
    """Return the GPUs of each process on a machine, as `up.devices` says.

    Args:
        config: configuration of the run.
        gpus: GPUs of the machine.
        actors: processes on the machine: all of the run with `actors up`.

    Raises:
        ConfigError: the machine has too few GPUs, or `up.devices` does not fit the processes.
    """
    actors = sorted(actors, key=lambda actor: (actor.kind not in COMPUTING, actor.kind != "trainer", actor))
    engine = config.inference.engine
    computes_here = gpus and config.model.device != "cpu" and engine.loads_model
    per_process = {"trainer": 1, "inference": engine.num_gpus} if computes_here else {}
    needed = {actor: per_process.get(actor.kind, 0) for actor in actors}
    torch_kinds = frozenset({"trainer"} if engine.has_server else {"trainer", "inference"})
    if config.up.devices == "auto":
        return DevicePlan(gpus, _automatic(config, len(gpus), needed), torch_kinds)
    plan = DevicePlan(gpus, _as_named(config.up.devices, needed), torch_kinds)
    problems = []
    for actor, own in plan.of.items():
        key = f"up.devices.{actor.kind}"
        if missing := [gpu for gpu in own if gpu >= len(gpus)]:
            problems.append(f"{key}: there is no GPU {missing[0]}; this machine has {len(gpus)}, counted from 0")
        elif actor.kind in COMPUTING and len(own) != needed[actor]:
            problems.append(f"{key}: {list(own)} for {actor}, which needs {needed[actor]} GPUs")
        elif plan.shared(actor) and not config.up.colocate:
            problems.append(f"{key}: a GPU of {actor} has another process too; set up.colocate: true to share GPUs")
    if problems:
        raise ConfigError(*problems)
    return plan


def _automatic(config: RunConfig, num_gpus: int, needed: Mapping[Actor, int]) -> dict[Actor, tuple[int, ...]]:
    """Give each process GPUs of its own, in order; share GPUs only where `up.colocate` allows."""
    ranks = sum(number for actor, number in needed.items() if actor.kind == "trainer")
    engines = sum(number for actor, number in needed.items() if actor.kind == "inference")
    largest = max(needed.values(), default=0)
    # ranks of a gang can't share a GPU (NCCL refuses), neither can the parts of a model that is spread over several
    least = max(ranks, largest) if config.up.colocate else ranks + engines
    if least > num_gpus:
        raise ConfigError(_too_few(config, num_gpus, ranks, needed, least))
    users = [0] * num_gpus
    found: dict[Actor, tuple[int, ...]] = {}
    for actor, number in needed.items():
        # neighbours with the fewest processes so far: neighbours often share a fast link
        starts = range(num_gpus - number + 1)
        start = min(starts, key=lambda start: (sum(users[start : start + number]), start)) if number else 0
        found[actor] = tuple(range(start, start + number))
        for gpu in found[actor]:
            users[gpu] += 1
    return found


def _too_few(config: RunConfig, num_gpus: int, ranks: int, needed: Mapping[Actor, int], least: int) -> str:
    """Return the error text for a machine with too few GPUs: what needs them, and what to change."""
    sizes = [number for actor, number in needed.items() if actor.kind == "inference" and number]
    parts = [f"{ranks} for trainer.num_ranks {ranks}"] if ranks else []
    if sizes:
        parts.append(f"{sum(sizes)} for {len(sizes)} of up.inference with {sizes[0]} each")
    here = f"{num_gpus} GPU" + ("" if num_gpus == 1 else "s")
    words = f"up.devices: this machine has {here}, and the run needs {least}: {' and '.join(parts)}"
    if config.up.colocate:
        return f"{words}; with up.colocate engines may share the trainer's GPUs, but ranks need a GPU each"
    return (
        f"{words}; lower these keys, set up.colocate: true (trainer and engines share GPUs), or set model.device: cpu"
    )


def _as_named(devices: Devices, needed: Mapping[Actor, int]) -> dict[Actor, tuple[int, ...]]:
    """Return the GPUs that `up.devices` names for each process.

    Raises:
        ConfigError: a kind has more or fewer lists than processes on this machine.
    """
    found: dict[Actor, tuple[int, ...]] = dict.fromkeys(needed, ())
    for kind, lists in devices.items():
        processes = [actor for actor in needed if actor.kind == kind]
        if len(lists) != len(processes):
            raise ConfigError(
                f"up.devices.{kind}: {len(lists)} lists of GPUs for {len(processes)} processes on this machine"
            )
        found |= {actor: tuple(gpus) for actor, gpus in zip(processes, lists, strict=True)}
    return found
