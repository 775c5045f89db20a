"""`actors replay`: a recorded step again, from what the run has left on disk, compared bit by bit.

It reads the newest checkpoint before the step, the groups of the steps after it from the ledger, and the line that the
reporter wrote; it writes nothing and may run beside the run. Loss, gradient norm and the digest of the weights that the
step made either have the same bits, or the machine, the build or the files are not what they were.

With `trainer.sharding: fsdp` gradients are summed layer by layer, in the order of the collectives: one process that has
all weights comes near, not to the bit, so loss and gradient norm are compared within a tolerance and weights are not.
Likewise with `model.compile`: what torch generates may depend on the rows that it has seen before.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.batches import build_batches
from actors.ledger import LedgerReader, Step
from actors.policy.checkpoints import CheckpointFolder
from actors.telemetry.reporter import read_lines
from bus import codec
from bus.weights import Weights
from bus.weights.buckets import pack
from bus.weights.filesystem import FilesystemPublisher
from schemas.config import RunConfig
from schemas.config.services import WeightsConfig
from schemas.errors import ConfigError
from schemas.messages import Policy, ScoredGroup, StepBatch

if TYPE_CHECKING:
    from actors.policy.learner import Learner

COMPARED = ("loss", "grad_norm", "weights")
TOLERANCE = 1e-4
"""Relative, or absolute where that is more. Rounding grows from the checkpoint on, so a run that saves seldom may need
a step closer behind one."""


@dataclass(frozen=True)
class Replay:
    """What came out. `start` is the checkpoint that it began from; `inexact`: why bits need not be the same."""

    step: int
    start: int
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]
    inexact: str = ""

    @property
    def same(self) -> dict[str, bool]:
        """By what was compared, whether the bits are the same, or the values within the tolerance."""
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
    """Train up to a step again.

    Args:
        config: as the run resolved it.
        step: that is compared.
        learner: as the trainer makes it.

    Raises:
        ConfigError: the run has no such step, or no longer what it takes to compute it.
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
    """Threads of torch in the recorded step, on which the order of sums depends; None where they are not known."""
    threads = _recorded(config.output / "metrics.jsonl", step).get("torch_threads")
    return int(threads) if threads else None


def _recorded(path: Path, step: int) -> dict[str, Any]:
    lines = {line["step"]: line for line in read_lines(path)} if path.exists() else {}
    if step not in lines:
        known = f"it has 1 to {max(lines)}" if lines else "it has none"
        raise ConfigError(f"--step {step}: {path} has no line of this step; {known}")
    return lines[step]


def _start(config: RunConfig, ledger: LedgerReader, step: int) -> int:
    """The newest good checkpoint before the step that the ledger's steps lead on from; 0: the model as configured."""
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
    """The batches of all ranks, step by step."""
    for step in ledger.steps():
        if start < step.step <= last:
            yield build_batches(
                with_step_advantages(_groups(ledger, step), config.reward),
                config.trainer.num_ranks,
                config.packer.sequence_len,
                config.trainer.num_minibatches,
                run=str(ledger.value("run")),
                term=0,
                incarnation=0,
                step=step.step,
                dropped=list(step.dropped),
                digests=list(step.digests),
            )


def _groups(ledger: LedgerReader, step: Step) -> list[ScoredGroup]:
    groups = []
    for ordinal, digest, frames in zip(step.ordinals, step.digests, ledger.payloads(step.ordinals), strict=True):
        if hashlib.sha256(b"".join(frames)).hexdigest() != digest:
            raise ConfigError(f"{ledger.path}: the group of ordinal {ordinal} is not the one that step {step.step} had")
        group = codec.decode(frames)
        assert isinstance(group, ScoredGroup)
        groups.append(group)
    return groups


def _train(learner: "Learner", batches: Sequence[StepBatch]) -> dict[str, float]:
    """One step of the whole gang in this process, as its last rank."""
    from actors.policy.ranks import ALONE

    return learner.step(batches[-1], ALONE, batches[:-1])


def _digest(weights: Weights, config: WeightsConfig) -> str:
    """As the trainer's end of the run's channel tells it."""
    if config.channel == "rendezvous":
        return pack(weights, config.bucket_bytes).header.digest
    with tempfile.TemporaryDirectory() as folder:
        publisher = FilesystemPublisher(Path(folder) / "weights", 2)
        return publisher.publish(Policy(lineage=0, version=0), weights).digest


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:20]}…"
    return json.dumps(value)
