"""The runs that faults meet: with doubles for speed, with a real model, and with a network between the actors."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bus.keys import make as make_keys
from schemas.config import RunConfig
from schemas.config.load import check_tree
from tests.chaos.faults import Fault, exceptions
from tests.chaos.stage import HARM, NOBODY, TURNS, Plan
from tests.ports import free_port, free_ports
from tests.ring.harness import ring_config
from tests.ring.test_branches import TEMPLATE
from tests.ring.test_environments import WORLDS
from tests.ring.test_images import TEMPLATE as IMAGES_TEMPLATE
from tests.ring.test_images import write_rows

NEVER = 1_000_000
"""Steps; the driver stops the run when its faults are done."""
PORTS = 16
FULL = tuple(Fault("full disk", name) for name in (NOBODY, "packer-0", "trainer-0", "inference-0"))
ACTORS = ("packer-0", "rollout-0", "reward-0", "inference-0", "trainer-0")
EVERYWHERE = (
    "control.client", "control.server", "log", "metrics",
    "packer.inbox", "packer.payloads", "packer.record", "packer.backup",
    "trainer.inbox", "checkpoint.written", "reward.loop", "reward.function", "reward.scored", "reward.sent",
    "inference.http",
)  # fmt: skip
"""Places of threads that every run has."""
RAISED = exceptions(ACTORS, EVERYWHERE)
RAISED_WITH_KEYS = exceptions(ACTORS, ("name", "unfinished", "authenticator", "keys"))
RAISED_IN_POOL = (
    *exceptions(["inference-pool-0"], ("control.client", "name", "authenticator", "keys", "log")),
    *exceptions(["inference-0"], ("inference.relay",)),
)
RAISED_BY_MODEL = exceptions(ACTORS, ("inference.engine",))
RAISED_IN_BROADCAST = exceptions(ACTORS, ("trainer.weights", "trainer.filler", "weights.meeting", "weights.left"))
RAISED_IN_RANKS = (
    *exceptions(["trainer-0", "trainer-1"], ("trainer.meeting",)),
    *exceptions(["trainer-1"], ("control.client", "trainer.inbox", "log", "metrics")),
)
RAISED_IN_SHARDS = exceptions(["trainer-0", "trainer-1"], ("trainer.ranks",))
CUTS = tuple(
    Fault("partition", name) for name in ("packer-0", "rollout-0", "reward-0", "inference-0", "trainer-0", "trainer-1")
)
HARMED = tuple(
    Fault("environment worker", "rollout-0", way) for way in ("SIGKILL", "SIGSTOP", "hang", "sys.exit", "_exit")
)
STRANGERS = tuple(Fault("foreign run", name) for name in ("packer-0", "reward-0", "trainer-0"))


def fake(folder: Path, control: str, ranks: int = 1, **sections: dict[str, Any]) -> RunConfig:
    """Fake engine and learner: a step takes about 0.3 s, most of it sampling."""
    tree: dict[str, Any] = {
        "trainer": {"max_steps": NEVER, "num_ranks": ranks, "checkpoint": {"interval": 5}},
        "inference": {"engine": {"type": "fake", "token_seconds": 0.01}},
        "eval": {"num_prompts": 3, "every_steps": 20},
        "bus": {"control": control, "beat_interval": 0.5, "lease": 3.0, "resend_after": 5.0},
        "telemetry": {"metrics_port": free_ports(PORTS)},
        "up": {"max_restarts": 20, "torch_threads": {"trainer": 1, "inference": 1}},
    }
    return ring_config(folder, **{name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


def played(folder: Path, control: str) -> RunConfig:
    """Two workers of an environment that does what harm the stage arms."""
    armed = folder / HARM
    armed.mkdir(exist_ok=True)
    environment = {
        "type": "python",
        "name": "letters",
        "path": f"{WORLDS}:Armed",
        "options": {"folder": str(armed)},
        "workers": 2,
        # longer than a busy machine needs, shorter than the stage's patience
        "limits": {"load": 30.0, "reset": 4.0, "step": 4.0, "score": 4.0, "silence": 6.0},
    }
    tree = fake(folder, control, packer={"sequence_len": 512}).model_dump(exclude_unset=True)
    return check_tree(tree | {"environments": [environment], "reward": {"functions": []}})


def two_ranks(folder: Path, control: str) -> RunConfig:
    """Each with a part of every batch."""
    return fake(folder, control, 2)


def networked(folder: Path, control: str) -> RunConfig:
    """Every actor at an address of its own."""
    return fake(folder, control, 2, bus={"allow_plaintext": True})


def neighbours(folder: Path, control: str) -> RunConfig:
    """Over tcp without keys, where ports come again."""
    return fake(folder, f"tcp://127.0.0.1:{free_ports(PORTS) + PORTS - 1}")


def broadcast(folder: Path, control: str) -> RunConfig:
    """Weights by rendezvous, to two engines at once."""
    return fake(folder, control, weights={"channel": "rendezvous"}, up={"inference": 2})


KILLED_IN_TURNS = (
    Fault("SIGKILL", "trainer-0", "trainer.turn_ends"),
    Fault("SIGKILL", "trainer-1", "trainer.turn_ends"),
    Fault("SIGKILL", "inference-0", "inference.rests"),
    Fault("SIGKILL", "inference-1", "inference.before_wake"),
)
"""Who holds the device dies as it gives it back, before it says so; who gets it, before it has said so."""


def in_turns(folder: Path, control: str) -> RunConfig:
    """Trainer and engines work in turns, as on one device."""
    return fake(folder, control, 2, up={"colocate": "turns", "inference": 2})


def encrypted(folder: Path, control: str) -> RunConfig:
    """Over tcp with keys and the packer by name: each actor has an authenticator and looks at files of keys."""
    return fake(folder, by_name(), bus=encryption(folder))


def by_name() -> str:
    """An address of the packer that has to be resolved."""
    return f"tcp://localhost:{free_port()}"


def encryption(folder: Path) -> dict[str, Any]:
    """The keys of a run, made where there are none yet."""
    keys = folder / "keys"
    if not keys.exists():
        make_keys(keys)
    return {"keys": str(keys)}


def sharded(folder: Path, control: str) -> RunConfig:
    """Two ranks that share out the weights."""
    return real(folder, control, 2, trainer={"sharding": "fsdp"})


def together(folder: Path, control: str) -> RunConfig:
    """Two ranks that compute each row together."""
    return real(folder, control, 2, trainer={"context_parallel": 2})


def branching(folder: Path, control: str) -> RunConfig:
    """A model on two ranks, trained on conversations with branches, whose samples share prefixes."""
    tree = real(
        folder,
        control,
        2,
        model={"chat_template": TEMPLATE},
        # a turn that is cut off is the last one
        rollout={"stop": list("abcdefghijkl")},
        packer={"sequence_len": 96},
        inference={"engine": {"type": "embedded", "max_sequence_len": 96}},
    ).model_dump(exclude_unset=True)
    environment = {"type": "python", "name": "agent", "path": f"{WORLDS}:Agent"}
    return check_tree(tree | {"environments": [environment], "reward": {"functions": []}})


def pooled(folder: Path, control: str) -> RunConfig:
    """A pool with one SGLang server, for which the stage has a stub; encrypted."""
    server = f"http://127.0.0.1:{free_port()}"
    inference = {"engine": {"type": "sglang"}, "pool": {"urls": [server], "sync_interval": 0.5}}
    made_up = {"mismatch": {"stop": None}}  # the tokens of a stub, and their logprobs
    return real(folder, by_name(), bus=encryption(folder), inference=inference, trainer=made_up)


def seeing(folder: Path, control: str) -> RunConfig:
    """A model that sees images, on two ranks, with rows of none, one, and several."""
    tree = real(
        folder,
        control,
        2,
        "qwen3_vl",
        model={"chat_template": IMAGES_TEMPLATE},
        packer={"sequence_len": 96},
        inference={"engine": {"type": "embedded", "max_sequence_len": 96}},
    ).model_dump(exclude_unset=True)
    return check_tree(tree | {"environments": [{"type": "jsonl", "path": str(write_rows(folder))}]})


def real(folder: Path, control: str, ranks: int = 1, family: str = "qwen3", **sections: dict[str, Any]) -> RunConfig:
    """The embedded engine and the torch learner, on a model that is made beside the run."""
    from transformers.utils.logging import disable_progress_bar

    from tests.models import build

    model = folder / "model"
    if not model.exists():
        disable_progress_bar()  # the driver's own lines are on the terminal
        build(model, family)
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "inference": {"engine": {"type": "embedded", "max_sequence_len": 64}},
        "trainer": {"learning_rate": 1e-4},
    }
    return fake(
        folder, control, ranks, **{name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}}
    )


PLANS = {
    plan.name: (share, plan)
    for share, plan in (
        (38, Plan("fake, 1 rank", fake, others=FULL)),
        (30, Plan("fake, 2 ranks", two_ranks, 2, RAISED_IN_RANKS, others_per_round=2)),
        (8, Plan("environments", played, others=HARMED, others_per_round=6, least_reward=3.0)),
        (29, Plan("threads", fake, others=RAISED, others_per_round=11)),
        (19, Plan("keys", encrypted, others=RAISED_WITH_KEYS, others_per_round=11)),
        (7, Plan("pool", pooled, others=RAISED_IN_POOL, others_per_round=11)),
        (10, Plan("model, 1 rank", real, others=RAISED_BY_MODEL)),
        (4, Plan("model, 2 ranks", lambda folder, control: real(folder, control, 2), 2)),
        (3, Plan("branches", branching, 2)),
        (4, Plan("images", seeing, 2)),
        (4, Plan("sharded", sharded, 2, RAISED_IN_SHARDS, others_per_round=2)),
        (4, Plan("rows", together, 2, RAISED_IN_SHARDS, others_per_round=2)),
        (12, Plan("broadcast", broadcast, others=RAISED_IN_BROADCAST, others_per_round=6, never_passed=TURNS)),
        (6, Plan("turns", in_turns, 2, KILLED_IN_TURNS, others_per_round=4, never_passed=("inference.receiving",))),
        (8, Plan("neighbours", neighbours, others=STRANGERS, others_per_round=5)),
        (14, Plan("network", networked, 2, CUTS, others_per_round=5, networked=True)),
    )
}
"""By name, with their share of the faults: of 200, as many as meet each of a plan's own faults once."""


def shares(plans: Iterable[tuple[int, Plan]], number: int) -> list[int]:
    """How many of so many faults each of these plans meets."""
    chosen = [share for share, _ in plans]
    counts, left, weight = [], number, sum(chosen)
    for share in chosen:
        counts.append(round(left * share / weight))
        left, weight = left - counts[-1], weight - share
    return counts
