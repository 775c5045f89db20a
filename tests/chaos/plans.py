"""The runs that faults meet: with doubles for speed, with a real model, and with a network between the actors."""

import os
import socket
from pathlib import Path
from typing import Any

from schemas.config import RunConfig
from tests.chaos.faults import Fault
from tests.chaos.stage import NOBODY, Plan
from tests.ring.harness import ring_config

NEVER = 1_000_000
"""Steps; the driver stops the run when its faults are done."""
PORTS = 16
FULL = tuple(Fault("full disk", name) for name in (NOBODY, "packer-0", "trainer-0", "inference-0"))
CUTS = tuple(
    Fault("partition", name) for name in ("packer-0", "rollout-0", "reward-0", "inference-0", "trainer-0", "trainer-1")
)


def fake(folder: Path, control: str, ranks: int = 1, **sections: dict[str, Any]) -> RunConfig:
    """Fake engine and learner: a step takes about 0.3 s, most of it sampling."""
    tree: dict[str, Any] = {
        "trainer": {"max_steps": NEVER, "num_ranks": ranks, "checkpoint": {"interval": 5}},
        "inference": {"engine": {"type": "fake", "token_seconds": 0.01}},
        "eval": {"num_prompts": 3, "every_steps": 20},
        "bus": {"control": control, "beat_interval": 0.5, "lease": 3.0, "resend_after": 5.0},
        "telemetry": {"metrics_port": free_ports()},
        "up": {"max_restarts": 20, "torch_threads": {"trainer": 1, "inference": 1}},
    }
    return ring_config(folder, **{name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}})


def networked(folder: Path, control: str) -> RunConfig:
    """Every actor at an address of its own."""
    return fake(folder, control, 2, bus={"allow_plaintext": True})


def broadcast(folder: Path, control: str) -> RunConfig:
    """Weights by rendezvous, to two engines at once."""
    return fake(folder, control, weights={"channel": "rendezvous"}, up={"inference": 2})


def real(folder: Path, control: str, ranks: int = 1) -> RunConfig:
    """The embedded engine and the torch learner, on a model that is made beside the run."""
    from transformers.utils.logging import disable_progress_bar

    from tests.models import build

    model = folder / "model"
    if not model.exists():
        disable_progress_bar()  # the driver's own lines are on the terminal
        build(model)
    return fake(
        folder, control, ranks,
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        inference={"engine": {"type": "embedded", "max_sequence_len": 64}},
        trainer={"learning_rate": 1e-4},
    )  # fmt: skip


PLANS = {
    "fake, 1 rank": (0.27, Plan("fake, 1 rank", fake, others=FULL)),
    "fake, 2 ranks": (0.25, Plan("fake, 2 ranks", lambda folder, control: fake(folder, control, 2), 2)),
    "model, 1 rank": (0.18, Plan("model, 1 rank", real)),
    "model, 2 ranks": (0.10, Plan("model, 2 ranks", lambda folder, control: real(folder, control, 2), 2)),
    "broadcast": (0.08, Plan("broadcast", broadcast, never_passed=())),
    "network": (0.12, Plan("network", networked, 2, CUTS, others_per_round=5, networked=True)),
}
"""By name, with their share of the faults."""


def free_ports() -> int:
    """The first of some ports in a row on which nobody listens: other runs on this machine have other ones."""
    first = 22_000 + os.getpid() * PORTS % 8_000
    while not all(_is_free(port) for port in range(first, first + PORTS)):
        first = 22_000 + (first + PORTS - 22_000) % 10_000
    return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0
