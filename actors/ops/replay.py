"""`actors replay`: train a recorded step again, from the run's files, and compare the results bit by bit.

Reads the newest checkpoint before the step, the groups of the following steps from the ledger, and the step's line of
metrics.jsonl. Writes nothing, so may run next to the run. If loss, gradient norm or the digest of the new weights
differ, then machine, build or files have changed. Equal bits can't be expected with `trainer.sharding: fsdp` and
`trainer.context_parallel` (another order of sums), with `model.compile` (kernels depend on the rows seen before), and
on a GPU without `trainer.deterministic` (sums without a fixed order). Loss and gradient norm are then compared within
TOLERANCE, and weights are not compared.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.ops.recorded_steps import RecordedSteps, recorded_line
from bus.run_folder import RunFolder
from bus.weights.device_memory import DeviceMemory
from bus.weights.filesystem import FilesystemPublisher
from bus.weights.memory import HostMemory
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion

if TYPE_CHECKING:
    from actors.learner.protocol import Learner

COMPARED = ("loss", "grad_norm", "weights")
"""Compared results; `weights` is a digest."""
TOLERANCE = 1e-4
"""Relative tolerance, or absolute if that is more. Rounding errors grow with each step after the checkpoint, so a run
with rare checkpoints may have to compare a step closer to one."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Args:
        step: step that was replayed.
        start: step of the checkpoint at which the replay started; 0: the model as configured.
        recorded, replayed: results by name.
        inexact: reason why equal bits can't be expected; empty if they can.
    """

    step: int
    start: int
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]
    inexact: str = ""

    @property
    def same(self) -> dict[str, bool]:
        """Comparison by name: True if recorded and replayed results are equal (or within the tolerance)."""
        found: dict[str, bool] = {}
        for name in COMPARED:
            recorded, replayed = self.recorded.get(name), self.replayed[name]
            if not self.inexact:
                found[name] = bool(recorded == replayed)
            elif not isinstance(replayed, str):  # texts are digests, which are equal or tell nothing
                known = math.nan if recorded is None else recorded
                found[name] = math.isclose(known, replayed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return found

    def __str__(self) -> str:
        alike = f"within {TOLERANCE:g}" if self.inexact else "same bits"
        rows = [("", "recorded", "replayed", "")]
        for name, same in self.same.items():
            verdict = alike if same else "DIFFERENT"
            rows.append((name, _shown(self.recorded.get(name)), _shown(self.replayed[name]), verdict))
        table = "\n".join(f"{a:<10} {b:<24} {c:<24} {d}".rstrip() for a, b, c, d in rows)
        source = f"checkpoint step_{self.start}" if self.start else "the model as configured"
        note = f"\n{self.inexact}, so weights are not compared" if self.inexact else ""
        return f"step {self.step}, replayed from {source}\n{table}{note}"


def replay(config: RunConfig, step: int, learner: "Learner") -> Replay:
    """Train up to a step again, and compare.

    Args:
        config: configuration of the run, as resolved.
        step: step to compare.
        learner: learner as the trainer makes it.

    Raises:
        ConfigError: the run has no such step, or the checkpoints or groups to compute it are gone.
    """
    has_dropout = config.model.dropout or (config.model.lora is not None and config.model.lora.dropout > 0)
    if config.trainer.ranks_per_row > 1 and has_dropout:
        raise ConfigError(
            f"step {step} can't be replayed: each rank drew the dropout of its own part of a row "
            "(trainer.context_parallel), and a replay is one process"
        )
    # imported here, since it loads torch
    from actors.learner.ranks import SINGLE_RANK

    recorded, steps = recorded_line(config, step), RecordedSteps(config)
    start = steps.start_before(step)
    if start:
        learner.restore(steps.checkpoint(start))
    values: dict[str, Any] = {}
    for batches in steps.batches(start, step):
        # this process computes the whole gang's part, as the last rank
        values = learner.step(batches[-1], SINGLE_RANK, batches[:-1])
    replayed = {"loss": values["loss"], "grad_norm": values["grad_norm"], "weights": _digest(learner, config)}
    was_sharded = config.trainer.sharding == "fsdp" and config.trainer.num_ranks > 1
    inexact = "weights were spread over ranks" if was_sharded else learner.inexact
    if config.trainer.ranks_per_row > 1:
        inexact = " and ".join(filter(None, [inexact, "rows were divided among ranks"]))
    return Replay(step, start, recorded, replayed, inexact)


def recorded_threads(config: RunConfig, step: int) -> int | None:
    """Return torch's number of threads in the recorded step, which decides the order of sums; None if not recorded."""
    threads = recorded_line(config, step).get("torch_threads")
    return int(threads) if threads else None


def _digest(learner: "Learner", config: RunConfig) -> str:
    """Return the digest of the learner's weights, computed as by the run's weight channel."""
    import torch

    weights = learner.weights()
    if config.weights.channel != "filesystem":
        # digests are equal on all devices
        memory = HostMemory() if config.weights.channel == "rendezvous" else DeviceMemory(lambda: torch.device("cpu"))
        return memory.pack(weights, config.weights.bucket_bytes).header.digest
    # the digest is one of the published files, so the weights are written as a publisher writes them
    with tempfile.TemporaryDirectory() as folder:
        publisher = FilesystemPublisher(RunFolder(Path(folder) / "weights", "replay", Path(folder)), 2)
        return publisher.publish(PolicyVersion(lineage=0, version=0), weights).digest


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:20]}…"
    return json.dumps(value)
