"""`actors replay`: train a recorded step again, from the run's files, and compare the results bit by bit.

Reads the newest checkpoint before the step, the groups of the following steps from the ledger, and the step's line of
metrics.jsonl. Writes nothing, so may run next to the run. If loss, gradient norm or the digest of the new weights
differ, then machine, build or files have changed. Two settings give no equal bits: `trainer.sharding: fsdp` (another
order of sums) and `model.compile` (kernels depend on the rows seen before). With these, loss and gradient norm are
compared within TOLERANCE, and weights are not compared.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.algorithms.batches import batches_of_step
from actors.learner.checkpoints import CheckpointFolder
from actors.ledger import LedgerReader, Step
from actors.telemetry.reporter import read_lines
from bus import codec
from bus.run_folder import RunFolder
from bus.weights import Weights
from bus.weights.buckets import pack
from bus.weights.filesystem import FilesystemPublisher
from schemas.config import RunConfig
from schemas.config.services import WeightsConfig
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion, ScoredGroup, StepBatch, drop_fields

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
        # texts are digests: these are equal or tell nothing
        compared = [name for name in COMPARED if not (self.inexact and isinstance(self.replayed[name], str))]
        return {name: self._same(self.recorded.get(name), self.replayed[name]) for name in compared}

    def _same(self, recorded: Any, replayed: Any) -> bool:
        if not self.inexact or recorded is None:
            return bool(recorded == replayed)
        return math.isclose(recorded, replayed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    def __str__(self) -> str:
        rows = [("", "recorded", "replayed", "")]
        for name, same in self.same.items():
            verdict = self._alike if same else "DIFFERENT"
            rows.append((name, _shown(self.recorded.get(name)), _shown(self.replayed[name]), verdict))
        table = "\n".join(f"{a:<10} {b:<24} {c:<24} {d}".rstrip() for a, b, c, d in rows)
        source = f"checkpoint step_{self.start}" if self.start else "the model as configured"
        note = f"\n{self.inexact}, so weights are not compared" if self.inexact else ""
        return f"step {self.step}, replayed from {source}\n{table}{note}"

    @property
    def _alike(self) -> str:
        return f"within {TOLERANCE:g}" if self.inexact else "same bits"


def replay(config: RunConfig, step: int, learner: "Learner") -> Replay:
    """Train up to a step again, and compare.

    Args:
        config: configuration of the run, as resolved.
        step: step to compare.
        learner: learner as the trainer makes it.

    Raises:
        ConfigError: the run has no such step, or the checkpoints or groups to compute it are gone.
    """
    recorded = _recorded(config.output / "metrics.jsonl", step)
    ledger = LedgerReader.of(config.ledger_path)
    start = _start(config, ledger, step)
    if start:
        learner.restore(CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint).path(start))
    values: dict[str, Any] = {}
    for batches in _batches(config, ledger, start, step):
        values = _train(learner, batches)
    digest = _digest(learner.weights(), config.weights)
    replayed = {"loss": values["loss"], "grad_norm": values["grad_norm"], "weights": digest}
    return Replay(step, start, recorded, replayed, _inexact(config))


def _inexact(config: RunConfig) -> str:
    if config.trainer.sharding == "fsdp" and config.trainer.num_ranks > 1:
        return "weights were spread over ranks"
    return "layers were compiled (model.compile)" if config.model.compile else ""


def recorded_threads(config: RunConfig, step: int) -> int | None:
    """Return torch's number of threads in the recorded step, which decides the order of sums; None if not recorded."""
    threads = _recorded(config.output / "metrics.jsonl", step).get("torch_threads")
    return int(threads) if threads else None


def _recorded(path: Path, step: int) -> dict[str, Any]:
    lines = {line["step"]: line for line in read_lines(path)} if path.exists() else {}
    if step not in lines:
        known = f"it has 1 to {max(lines)}" if lines else "it has none"
        raise ConfigError(f"--step {step}: {path} has no line of this step; {known}")
    return lines[step]


def _start(config: RunConfig, ledger: LedgerReader, step: int) -> int:
    """Return the newest good checkpoint before a step from which the ledger has all groups; 0: the configured model."""
    # the ledger's steps reach back to the oldest kept checkpoint; the groups of step `first` itself are gone
    first = min((known.step for known in ledger.steps()), default=step + 1) - 1
    saved = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint).good(str(ledger.value("run")))
    starts = [info.step for info in saved if first <= info.step < step] + [0] * (first == 0)
    if not starts or first >= step:
        raise ConfigError(
            f"--step {step}: the ledger has the groups of steps from {first + 1} on, and there is no good checkpoint "
            f"between step {first} and {step - 1}; ledger.keep_steps and trainer.checkpoint.keep_last say what is kept"
        )
    return max(starts)


def _batches(config: RunConfig, ledger: LedgerReader, start: int, last: int) -> Iterator[list[StepBatch]]:
    """Yield the batches of all ranks, step by step."""
    for step in ledger.steps():
        if start < step.step <= last:
            yield batches_of_step(
                _groups(ledger, step),
                config,
                run=str(ledger.value("run")),
                term=0,  # not part of the computation, like the incarnation
                incarnation=0,
                step=step.step,
                **drop_fields(step.dropped),
                digests=list(step.digests),
            )


def _groups(ledger: LedgerReader, step: Step) -> list[ScoredGroup]:
    groups = []
    for ordinal, digest, frames in zip(step.ordinals, step.digests, ledger.payloads(step.ordinals), strict=True):
        # the ledger could have been replaced, or sampled again after a rewind
        if hashlib.sha256(b"".join(frames)).hexdigest() != digest:
            raise ConfigError(f"{ledger.path}: the group of ordinal {ordinal} is not the one that step {step.step} had")
        group = codec.decode(frames)
        assert isinstance(group, ScoredGroup)
        groups.append(group)
    return groups


def _train(learner: "Learner", batches: Sequence[StepBatch]) -> dict[str, float]:
    """Train a step of the whole gang in this process, which takes the part of the last rank."""
    from actors.learner.ranks import SINGLE_RANK

    return learner.step(batches[-1], SINGLE_RANK, batches[:-1])


def _digest(weights: Weights, config: WeightsConfig) -> str:
    """Return the digest of weights, computed as by the run's weight channel."""
    if config.channel == "rendezvous":
        return pack(weights, config.bucket_bytes).header.digest
    # the digest is one of the published files, so the weights are written as a publisher writes them
    with tempfile.TemporaryDirectory() as folder:
        publisher = FilesystemPublisher(RunFolder(Path(folder) / "weights", "replay", Path(folder)), 2)
        return publisher.publish(PolicyVersion(lineage=0, version=0), weights).digest


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:20]}…"
    return json.dumps(value)
