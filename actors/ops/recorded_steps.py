"""Steps of a run as its files have them: lines of metrics.jsonl, checkpoints, and the groups in the ledger."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.algorithms.batches import batches_of_step
from actors.learner.checkpoints import CheckpointFolder
from actors.ledger import LedgerReader
from actors.ledger.stored_groups import stored_group
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch, drop_fields


def recorded_line(config: RunConfig, step: int) -> dict[str, Any]:
    """Return the line of a step in metrics.jsonl.

    Raises:
        ConfigError: the file has no such line.
    """
    path = config.output / "metrics.jsonl"
    lines = {line["step"]: line for line in read_lines(path)} if path.exists() else {}
    if step not in lines:
        known = f"it has 1 to {max(lines)}" if lines else "it has none"
        raise ConfigError(f"--step {step}: {path} has no line of this step; {known}")
    return lines[step]


class RecordedSteps:
    """Steps of a run that can be trained again. Nothing is written.

    Args:
        config: configuration of the run, as resolved.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ledger = LedgerReader.of(config.ledger_path)
        self._checkpoints = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint)

    def start_before(self, step: int) -> int:
        """Return the step of the newest good checkpoint from which all groups up to `step` are there; 0: none needed.

        0 stands for the model as configured.

        Raises:
            ConfigError: there is no such checkpoint, or groups are gone.
        """
        # the ledger's steps reach back to the oldest kept checkpoint; the groups of step `first` itself are gone
        first = min((known.step for known in self._ledger.steps()), default=step + 1) - 1
        saved = self._checkpoints.good(str(self._ledger.value("run")))
        starts = [info.step for info in saved if first <= info.step < step] + [0] * (first == 0)
        if not starts or first >= step:
            raise ConfigError(
                f"--step {step}: the ledger has the groups of steps from {first + 1} on, and there is no good "
                f"checkpoint between step {first} and {step - 1}; ledger.keep_steps and trainer.checkpoint.keep_last "
                "say what is kept"
            )
        return max(starts)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self._checkpoints.path(step)

    def batches(self, after: int, last: int) -> Iterator[list[StepBatch]]:
        """Yield the batches of all ranks, step by step, for the steps after `after` up to `last`.

        Raises:
            ConfigError: a group is not the recorded one.
        """
        run = str(self._ledger.value("run"))
        for step in self._ledger.steps():
            if not after < step.step <= last:
                continue
            groups = []
            payloads = self._ledger.payloads(step.ordinals)
            for ordinal, digest, frames in zip(step.ordinals, step.digests, payloads, strict=True):
                # the ledger could have been replaced, or sampled again after a rewind
                if hashlib.sha256(b"".join(frames)).hexdigest() != digest:
                    raise ConfigError(
                        f"{self._ledger.path}: the group of ordinal {ordinal} is not the one that step {step.step} had"
                    )
                groups.append(stored_group(frames))
            yield batches_of_step(
                groups,
                self._config,
                run=run,
                term=0,  # not part of the computation, like the incarnation
                incarnation=0,
                step=step.step,
                **drop_fields(step.dropped),
                digests=list(step.digests),
            )
