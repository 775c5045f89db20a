"""Checkpoints on disk: atomic, checksummed, with the witness of what they were trained on (P20).

checkpoints/step_40/          the model in Hugging Face format, or the adapter in PEFT format
    trainer/                  optimizer, entropy control, reports not yet written down: to go on from here
    witness.json              steps since the checkpoint before: ordinals, drops, digests, chain
    checksums.json            sha256 of every file; written last, so a directory without it is not a checkpoint
checkpoints/witness/          a copy of every witness, which stays when its checkpoint goes
checkpoints/dead/             checkpoints of a history that was given up: later than one saved after them (P19)

One process writes here (rank 0); all ranks read.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from actors.faults import point
from actors.policy.snapshots import Snapshot
from bus.weights.filesystem import file_digest
from schemas.config.actors import CheckpointConfig
from schemas.errors import ConfigError
from schemas.messages import CheckpointInfo

log = structlog.get_logger("checkpoints")


class CheckpointFolder:
    """The checkpoints of one run, under `output_dir/checkpoints`. Of several ranks one `writes`."""

    def __init__(self, folder: Path, config: CheckpointConfig, writes: bool = True) -> None:
        self._folder, self._config, self._writes = folder, config, writes
        self._checked: set[int] = set()
        """Steps whose files this process has written or checked: hashing gigabytes again would find nothing new."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self._folder / f"step_{step}"

    def save(
        self, step: int, chain: str, previous: int, steps: Sequence[dict[str, Any]], run: str, snapshot: Snapshot
    ) -> CheckpointInfo:
        """Write a checkpoint beside its name, read it back from the disk, and rename it.

        Args:
            step: that it stands for.
            chain: of witnesses up to it.
            previous: step of the checkpoint before, 0 for none.
            steps: records of the steps since then.
            run: id of the run.
            snapshot: model and trainer state.

        Raises:
            OSError: it could not be written, or does not read back as it was written; nothing has changed then.
        """
        staging = self._folder / f".step_{step}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            snapshot.write(staging)
            witness = {"run": run, "step": step, "previous": previous, "chain": chain, "steps": list(steps)}
            (staging / "witness.json").write_text(json.dumps(witness), encoding="utf-8")
            point("checkpoint.written")
            sums = _settle(staging)
            (staging / "checksums.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
            _sync(staging / "checksums.json")
            _sync(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        point("checkpoint.complete")
        self._bury_after(step - 1)
        staging.rename(self.path(step))
        _sync(self._folder)
        self._keep_witness(step)
        point("checkpoint.renamed")
        self._checked.add(step)
        self._prune()
        return CheckpointInfo(step=step, chain=chain)

    def good(self, run: str) -> list[CheckpointInfo]:
        """Those of this run's newest checkpoints whose files are as written, oldest first; bad ones are logged by name.

        Checkpoints that only `keep_interval` keeps are not among them: the ledger has no groups to go on with.
        """
        found = []
        for step in self._steps()[-self._config.keep_last :]:
            problem = "" if step in self._checked else self._problem(step)
            if problem:
                log.warning("checkpoint not usable", checkpoint=str(self.path(step)), detail=problem)
                continue
            self._checked.add(step)
            witness = self.witness(step)
            if witness["run"] == run and self._has_witness(step):
                found.append(CheckpointInfo(step=step, chain=witness["chain"]))
        return found

    def witness(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step was trained on since the one before."""
        return json.loads((self.path(step) / "witness.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def rewind(self, step: int) -> list[int]:
        """Move all checkpoints after a step to the dead ones, so that the run goes on from there; returns them.

        Raises:
            ConfigError: there is no good checkpoint of that step.
        """
        problem = self._problem(step)
        if problem:
            steps = ", ".join(map(str, self._steps())) or "none"
            raise ConfigError(f"--step {step}: {self.path(step)} is no good checkpoint ({problem}); there are {steps}")
        return self._bury_after(step)

    def begin_at(self, step: int) -> None:
        """The run goes on from this step: what a crash left half written goes, later checkpoints are dead."""
        for half_written in self._folder.glob(".step_*"):
            shutil.rmtree(half_written, ignore_errors=True)
        self._bury_after(step)

    def _steps(self) -> list[int]:
        names = [path.name.removeprefix("step_") for path in self._folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def _problem(self, step: int) -> str:
        folder = self.path(step)
        try:
            sums = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
            bad = [name for name, digest in sums.items() if file_digest(folder / name) != digest]
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return f"{bad[0]} is not what was written" if bad else ""

    def _has_witness(self, step: int) -> bool:
        """Whether the copy is there: a crash may have come between the two, and the disk may be full now."""
        try:
            if self._writes:
                self._keep_witness(step)
        except OSError as error:
            log.warning("witness not copied; its checkpoint does not count yet", step=step, detail=str(error))
            return False
        return True

    def _keep_witness(self, step: int) -> None:
        """A copy that outlives the checkpoint; whoever sees the name sees all of it."""
        copies, text = self._folder / "witness", (self.path(step) / "witness.json").read_bytes()
        copy = copies / f"step_{step}.json"
        if copy.is_file() and copy.read_bytes() == text:
            return
        copies.mkdir(exist_ok=True)
        staging = copies / f".{copy.name}"
        staging.write_bytes(text)
        staging.replace(copy)

    def _bury_after(self, step: int) -> list[int]:
        """Move checkpoints of a dead history away, where they neither count among the newest nor are lost (P19)."""
        later = [other for other in self._steps() if other > step]
        dead = self._folder / "dead"
        for other in later:
            dead.mkdir(exist_ok=True)
            shutil.rmtree(dead / f"step_{other}", ignore_errors=True)
            self.path(other).rename(dead / f"step_{other}")
            self._checked.discard(other)
            log.warning("checkpoint of a dead history moved", checkpoint=str(dead / f"step_{other}"))
        return later

    def _prune(self) -> None:
        every = self._config.keep_interval
        for step in self._steps()[: -self._config.keep_last]:
            if every is None or step % every:
                shutil.rmtree(self.path(step), ignore_errors=True)


def _settle(folder: Path) -> dict[str, str]:
    """Have the disk take all files, and read them back from it; returns their digests.

    Raises:
        OSError: a file is not there as it was written.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    written = {str(path.relative_to(folder)): file_digest(path) for path in files}
    for path in files:
        _sync(path)
    for name, digest in written.items():
        if file_digest(folder / name) != digest:
            raise OSError(f"{folder / name} does not read back as it was written; is the disk failing?")
    return written


def _sync(path: Path) -> None:
    """fsync, and let the page cache go, so that the next read is of the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
