"""Checkpoints on disk: atomic, checksummed, with the witness of the steps since the checkpoint before.

checkpoints/step_40/          the model in Hugging Face format, or the adapter in PEFT format
    trainer/                  state to continue from: optimizer, entropy control, reports not yet written
    witness.json              steps since the checkpoint before: ordinals, drops, digests, chain (P20)
    checksums.json            sha256 of every file; written last: a directory without this file is not a checkpoint
checkpoints/witness/          copies of all witnesses; a copy outlives the checkpoint
checkpoints/dead/             checkpoints and witnesses of histories given up (P19)
checkpoints/writer.json       the only process that may write here: rank 0 of the newest incarnation

All ranks read. A rank 0 that was paused or cut off does not know of its successor (P19). So the writer reads
writer.json right before it renames or moves anything, and its staging folder has a unique name.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from actors.learner.snapshots import Snapshot
from actors.process.fault_points import point
from actors.process.tasks import task
from bus.run_folder import remove_folder
from bus.weights.filesystem import file_digest
from schemas.config.trainer import CheckpointConfig
from schemas.errors import ConfigError
from schemas.messages import CheckpointInfo

log = structlog.get_logger("checkpoints")

WRITER, SUMS = "writer.json", "checksums.json"
"""Names of the file with the writer, and of a checkpoint's file with checksums."""


class FolderTakenError(Exception):
    """Error of a writer after another process has taken the folder. Nothing has been changed."""


@dataclass(frozen=True)
class Writer:
    """Writer of checkpoints: rank 0 of an incarnation of a run. `boot_id` distinguishes processes."""

    run: str
    incarnation: int
    boot_id: str


class CheckpointFolder:
    """Checkpoints of one run, under `output_dir/checkpoints`.

    Args:
        folder: folder of the checkpoints.
        config: which checkpoints are kept.
        writes: True on the writing rank.
        is_current: returns True while this process has heard the packer within a lease. Otherwise no checkpoint of
            another process is moved.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        writes: bool = True,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._folder, self._config, self._writes, self.is_current = folder, config, writes, is_current
        self._writer: Writer | None = None
        """This process, once it has taken the folder. None: the folder's writer is not checked, as in a command or a
        test."""
        self._checked: set[int] = set()
        """Steps with files written or checked by this process: hashing gigabytes again would find nothing new."""

    @property
    def is_there(self) -> bool:
        """True if this machine sees the folder."""
        return self._folder.is_dir()

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._folder / f"step_{step}"

    def save(
        self, step: int, chain: str, previous: int, steps: Sequence[dict[str, Any]], run: str, snapshot: Snapshot
    ) -> CheckpointInfo:
        """Write a checkpoint to a staging folder, read it back from the disk, and rename the folder.

        Args:
            step: step of the checkpoint.
            chain: chain of the witnesses, this one included.
            previous: step of the checkpoint before, 0 for none.
            steps: records of the steps since then.
            run: id of the run.
            snapshot: model and trainer state.

        Raises:
            OSError: the checkpoint could not be written, or reads back differently. Nothing has changed then.
            FolderTakenError: another process writes here now.
        """
        # a name of this process alone: a successor may write the same step while this process does not know it yet
        staging = self._folder / (f".step_{step}" + (f".{self._writer.boot_id}" if self._writer else ""))
        remove_folder(staging)
        staging.mkdir(parents=True)
        try:
            with task(f"write checkpoint of step {step}", snapshot.num_bytes, "bytes", lambda: _bytes_below(staging)):
                snapshot.write(staging)
            witness = {"run": run, "step": step, "previous": previous, "chain": chain, "steps": list(steps)}
            (staging / "witness.json").write_text(json.dumps(witness), encoding="utf-8")
            point("checkpoint.written")
            # checksums come last: until then the folder is no checkpoint
            sums = _settle(staging, step)
            (staging / SUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
            _sync(staging / SUMS)
            _sync(staging)
            point("checkpoint.complete")
            # right before the rename: since the start of the write, a successor may have taken the folder
            self._ensure_ours()
            _tell_buried(self._bury_after(step - 1))
        except BaseException:
            remove_folder(staging)
            raise
        # atomic: a reader sees no checkpoint or a whole one
        staging.rename(self.path(step))
        _sync(self._folder)  # the name itself survives a power loss only if the folder is flushed
        self._keep_witness(step)
        point("checkpoint.renamed")
        self._checked.add(step)
        self._prune(run)
        return CheckpointInfo(step=step, chain=chain)

    def good(self, run: str) -> list[CheckpointInfo]:
        """Return the usable ones among this run's newest checkpoints, oldest first; damaged ones are logged by name.

        Checkpoints kept only by `keep_interval` are left out: the ledger no longer has the groups to continue from
        them.
        """
        found = []
        for step in self.steps()[-self._config.num_resumable :]:
            problem = "" if step in self._checked else self._problem(step)
            if problem:
                log.warning("checkpoint not usable", checkpoint=str(self.path(step)), detail=problem)
                continue
            self._checked.add(step)
            witness = self.witness(step)
            if witness["run"] != run:
                continue
            try:
                # a crash may have come between checkpoint and copy
                if self._writes:
                    self._keep_witness(step)
            except OSError as error:  # the disk may be full now
                log.warning("witness not copied; its checkpoint does not count yet", step=step, detail=str(error))
                continue
            found.append(CheckpointInfo(step=step, chain=witness["chain"]))
        return found

    def witness(self, step: int) -> dict[str, Any]:
        """Return the witness of a checkpoint: the record of the steps since the checkpoint before."""
        return json.loads((self.path(step) / "witness.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def rewind(self, step: int) -> list[int]:
        """Move all checkpoints after a step to the dead ones, so that the run continues from there; return the steps.

        Raises:
            ConfigError: there is no good checkpoint of this step.
        """
        self.check(step)
        return self._bury_after(step)

    def check(self, step: int) -> None:
        """Check a checkpoint named by a user.

        Raises:
            ConfigError: there is no good checkpoint of this step.
        """
        steps = ", ".join(map(str, self.steps())) or "none"
        if step not in self.steps():
            raise ConfigError(f"--step {step}: there is no checkpoint of this step; there are {steps}")
        problem = self._problem(step)
        if problem:
            raise ConfigError(f"--step {step}: {self.path(step)} is damaged ({problem}); there are {steps}")

    def is_good(self, step: int, run: str, chain: str, *, deep: bool = True) -> bool:
        """Return whether there is a checkpoint of a step, of this run and of the history ending in this chain.

        Args:
            step, run, chain: expected values of the checkpoint.
            deep: compare files with their checksums; otherwise only check for the files' existence.
        """
        try:
            witness = self.witness(step)
        except (OSError, ValueError):
            return False
        return (witness["run"], witness["chain"]) == (run, chain) and not self._problem(step, deep=deep)

    def take(self, writer: Writer) -> None:
        """Make this process the writer of the folder. Earlier writers notice before the next rename or move.

        Raises:
            FolderTakenError: a later incarnation of the run writes here already.
        """
        other = self._named_writer()
        # an older incarnation, or a writer of another run, is replaced
        newer = other is not None and other.run == writer.run and other.incarnation > writer.incarnation
        if newer:
            raise FolderTakenError(f"{self._folder} is written by {other}; this is {writer}")
        self._writer = writer
        self._folder.mkdir(parents=True, exist_ok=True)
        staging = self._folder / f".{WRITER}.{writer.boot_id}"
        staging.write_text(json.dumps(asdict(writer)), encoding="utf-8")
        _sync(staging)  # otherwise a power loss may leave an empty file under the name
        staging.replace(self._folder / WRITER)
        _sync(self._folder)

    def begin_at(self, step: int) -> None:
        """Prepare the folder for a run continuing from this step.

        Checkpoints left half written by a crash are deleted, later checkpoints are moved to the dead ones.

        Raises:
            FolderTakenError: another process writes here now, or has removed the checkpoint of this step for a later
                one. Nothing has been changed.
        """
        self._ensure_ours()
        if step and not (self.path(step) / SUMS).is_file():
            raise FolderTakenError(f"{self.path(step)} is gone; an earlier writer has saved a later checkpoint")
        for half_written in self._folder.glob(".step_[0-9]*"):
            remove_folder(half_written)  # a process still writing there has lost the folder
        _tell_buried(self._bury_after(step))

    def last_incarnation(self, run: str) -> int:
        """Return the newest incarnation of a run to take the folder; 0 if none has."""
        writer = self._named_writer()
        return writer.incarnation if writer is not None and writer.run == run else 0

    def _named_writer(self) -> Writer | None:
        """Return the process named in writer.json; None without a readable file."""
        path = self._folder / WRITER
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return Writer(str(record["run"]), int(record["incarnation"]), str(record["boot_id"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning(
                "writer of checkpoints unknown; the next writer takes the folder over",
                path=str(path),
                detail=repr(error),
            )
            return None

    def _ensure_ours(self) -> None:
        """Check if this process is still the writer.

        Raises:
            FolderTakenError: another process is.
        """
        other = self._named_writer()
        if self._writer is not None and other != self._writer:
            raise FolderTakenError(f"{self._folder} is written by {other}; this is {self._writer}")

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, good or not, ascending."""
        names = [path.name.removeprefix("step_") for path in self._folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def _problem(self, step: int, *, deep: bool = True) -> str:
        """Return the damage of a checkpoint's files; empty if there is none."""
        folder = self.path(step)
        try:
            sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
            if not deep:
                missing = [name for name in sums if not (folder / name).is_file()]
                return f"{missing[0]} is missing" if missing else ""
            bad = []
            with task(f"check checkpoint of step {step}", _bytes_below(folder), "bytes") as checking:
                for name, digest in sums.items():
                    bad += [name] if file_digest(folder / name) != digest else []
                    checking.advance((folder / name).stat().st_size)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return f"{bad[0]} is not what was written" if bad else ""

    def _keep_witness(self, step: int) -> None:
        """Copy the witness of a checkpoint, atomically, so that the copy outlives the checkpoint."""
        copies, text = self._folder / "witness", (self.path(step) / "witness.json").read_bytes()
        copy = copies / f"step_{step}.json"
        # a copy with another text is of a history given up, and is replaced
        if copy.is_file() and copy.read_bytes() == text:
            return
        copies.mkdir(exist_ok=True)
        staging = copies / f".{copy.name}"
        staging.write_bytes(text)
        _sync(staging)
        staging.replace(copy)
        _sync(copies)

    def _bury_after(self, step: int) -> list[int]:
        """Move checkpoints after a step to `dead`, where checkpoints neither count nor are lost; return the steps.

        P19: while the packer is silent for a lease, nothing is moved.

        Raises:
            FolderTakenError: another process writes here now.
            OSError: another process may write here, since the packer has not been heard for a lease.
        """
        later = [other for other in self.steps() if other > step]
        dead = self._folder / "dead"
        if later and not self.is_current():
            raise OSError(f"{self.path(later[-1])} stays while the packer is silent: it may be of a successor")
        for other in later:
            self._ensure_ours()
            dead.mkdir(exist_ok=True)
            grave = dead / f"step_{other}"
            if (grave / SUMS).is_file():  # from a history given up earlier
                remove_folder(grave)
            while os.path.lexists(grave):  # not a checkpoint, or its removal failed
                grave = grave.with_name(f"{grave.name}.moved")
            self.path(other).rename(grave)
            self._checked.discard(other)  # a new checkpoint may take this name
        # the copies of later witnesses too: the newest would be taken for the end of the living history
        for copy in (self._folder / "witness").glob("step_*.json"):
            if int(copy.stem.removeprefix("step_")) > step:
                (self._folder / "dead" / "witness").mkdir(parents=True, exist_ok=True)
                copy.replace(self._folder / "dead" / "witness" / copy.name)
        return later

    def _prune(self, run: str) -> None:
        """Remove the older checkpoints of this run that are not to be kept.

        Raises:
            FolderTakenError: another process writes here now; its gang may have started from an older checkpoint.
        """
        keep, every = self._config.keep_last, self._config.keep_interval
        for step in self.steps()[:-keep] if keep else []:
            if every is not None and step % every == 0:  # keep_interval 10 keeps 10, 20, …
                continue
            try:
                is_ours = self.witness(step)["run"] == run
            except (OSError, ValueError, KeyError, TypeError):
                # a damaged checkpoint goes too; without checksums the folder may be anything of this name
                is_ours = (self.path(step) / SUMS).is_file()
            if is_ours:
                self._ensure_ours()
                # renamed first: a successor finds a whole checkpoint under the name, or none
                leaving = self._folder / f".step_{step}.pruned"
                remove_folder(leaving)
                try:
                    self.path(step).rename(leaving)
                except OSError as error:
                    log.warning("checkpoint not removed", checkpoint=str(self.path(step)), detail=str(error))
                remove_folder(leaving)


def _tell_buried(steps: Sequence[int]) -> None:
    for step in steps:
        log.warning("checkpoint of a dead history moved to checkpoints/dead", checkpoint=f"step_{step}")


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _settle(folder: Path, step: int) -> dict[str, str]:
    """Flush all files of a step's checkpoint to the disk, read them back, and return their digests.

    Raises:
        OSError: a file does not read back as written.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    written = {str(path.relative_to(folder)): file_digest(path) for path in files}
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    with task(f"read checkpoint of step {step} back", _bytes_below(folder), "bytes") as reading:
        for path in [*files, *folders]:  # a file's name is on the disk once its folder is flushed
            _sync(path)
        for name, digest in written.items():
            if file_digest(folder / name) != digest:
                raise OSError(f"{folder / name} does not read back as it was written; is the disk failing?")
            reading.advance((folder / name).stat().st_size)
    return written


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, and empty its page cache, so that the next read is from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
