"""Checkpoints on disk: atomic, checksummed, with the witness of what they were trained on (P20).

checkpoints/step_40/          the model in Hugging Face format, or the adapter in PEFT format
    trainer/                  optimizer, RNG: to go on from here
    witness.json              steps since the checkpoint before: ordinals, drops, digests, chain
    checksums.json            sha256 of every file; written last, so a directory without it is not a checkpoint
checkpoints/witness/          a copy of every witness, which stays when its checkpoint goes
checkpoints/dead/             checkpoints of a history that was given up: later than one saved after them (P19)
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from bus.weights.filesystem import file_digest
from schemas.messages import CheckpointInfo

log = structlog.get_logger("checkpoints")


class CheckpointFolder:
    """The checkpoints of one run, under `output_dir/checkpoints`."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self._folder, self._keep_last = folder, keep_last
        self._checked: set[int] = set()
        """Steps whose files this process has written or checked: hashing gigabytes again would find nothing new."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self._folder / f"step_{step}"

    def save(
        self,
        step: int,
        chain: str,
        previous: int,
        steps: Sequence[dict[str, Any]],
        run: str,
        write: Callable[[Path], None],
    ) -> CheckpointInfo:
        """Write a checkpoint beside its name, read it back, and rename it.

        Args:
            step: that it stands for.
            chain: of witnesses up to it.
            previous: step of the checkpoint before, 0 for none.
            steps: records of the steps since then.
            run: id of the run.
            write: puts model and trainer state into a folder.
        """
        staging = self._folder / f".step_{step}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write(staging)
        witness = {"run": run, "step": step, "previous": previous, "chain": chain, "steps": list(steps)}
        (staging / "witness.json").write_text(json.dumps(witness), encoding="utf-8")
        sums = {
            str(path.relative_to(staging)): file_digest(path) for path in sorted(staging.rglob("*")) if path.is_file()
        }
        (staging / "checksums.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
        final = self.path(step)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        copies = self._folder / "witness"
        copies.mkdir(exist_ok=True)
        shutil.copyfile(final / "witness.json", copies / f"step_{step}.json")
        self._checked.add(step)
        self._bury([other for other in self._steps() if other > step])
        self._prune()
        return CheckpointInfo(step=step, chain=chain)

    def good(self, run: str) -> list[CheckpointInfo]:
        """This run's checkpoints whose files are as they were written, oldest first; bad ones are logged by name."""
        found = []
        for step in self._steps():
            problem = "" if step in self._checked else self._problem(step)
            if problem:
                log.warning("checkpoint not usable", checkpoint=str(self.path(step)), detail=problem)
                continue
            self._checked.add(step)
            witness = self.witness(step)
            if witness["run"] == run:
                found.append(CheckpointInfo(step=step, chain=witness["chain"]))
        return found

    def witness(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step was trained on since the one before."""
        return json.loads((self.path(step) / "witness.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

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

    def _bury(self, steps: list[int]) -> None:
        """Move checkpoints of a dead history away, where they neither count among the newest nor are lost."""
        dead = self._folder / "dead"
        for step in steps:
            dead.mkdir(exist_ok=True)
            shutil.rmtree(dead / f"step_{step}", ignore_errors=True)
            self.path(step).rename(dead / f"step_{step}")
            self._checked.discard(step)
            log.warning("checkpoint of a dead history moved", checkpoint=str(dead / f"step_{step}"))

    def _prune(self) -> None:
        for step in self._steps()[: -self._keep_last]:
            shutil.rmtree(self.path(step), ignore_errors=True)
