"""Files of checkpoints for the hub: which belong to the model, and a copy that outlives the checkpoint's removal."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bus.run_folder import remove_folder

OWN = ("trainer", "witness.json", "checksums.json")
"""Names in a checkpoint that only a run reads."""
SUMS = "checksums.json"
CARD = "README.md"
"""Name of the model card."""
FOLDER = "uploads"
"""Folder in output_dir with the checkpoint that is being pushed."""


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint that has been saved: its step, and the chain of witnesses that tells histories apart."""

    step: int
    chain: str

    @property
    def name(self) -> str:
        """Name of its copy in the folder `uploads`."""
        return f"step_{self.step}.{self.chain[:16]}"


Known = dict[str, tuple[int, Saved]]
"""Checkpoints by the name of their witness, with the time at which the file was written."""


def saved_by(output: Path, known: Known | None = None) -> list[Saved]:
    """Return all checkpoints of the living history by the copies of their witnesses, oldest first.

    Args:
        output: folder of the run.
        known: witnesses read before, extended: a long run has thousands, each with the ordinals of its steps.
    """
    found, known = [], {} if known is None else known
    for path in (output / "checkpoints" / "witness").glob("step_*.json"):
        try:
            written = path.stat().st_mtime_ns
            if known.get(path.name, (0, None))[0] != written:
                witness = json.loads(path.read_text(encoding="utf-8"))
                known[path.name] = written, Saved(int(witness["step"]), str(witness["chain"]))
            found.append(known[path.name][1])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # moved away right now: its history was given up
    return sorted(found)


def run_of(output: Path) -> str:
    """Return the id of the run that has saved the newest checkpoint; empty if there is none."""
    newest = saved_by(output)[-1:]
    if not newest:
        return ""
    witness = output / "checkpoints" / "witness" / f"step_{newest[0].step}.json"
    return str(json.loads(witness.read_text(encoding="utf-8")).get("run", ""))


def place_of(output: Path, saved: Saved) -> Path | None:
    """Return a folder with a checkpoint's files: a copy made for the hub, or the checkpoint; None if both are gone."""
    copy, folder = output / FOLDER / saved.name, output / "checkpoints" / f"step_{saved.step}"
    if (copy / SUMS).is_file():
        return copy
    try:
        witness = json.loads((folder / "witness.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return folder if witness.get("chain") == saved.chain and (folder / SUMS).is_file() else None


def keep(output: Path, saved: Saved) -> Path | None:
    """Return a folder with a checkpoint's files that the run does not remove; None if the checkpoint is gone.

    The files are hard links, which cost no room; where a file system has none, they are copied.
    """
    source, copy = place_of(output, saved), output / FOLDER / saved.name
    if source is None or source == copy:
        return source
    staging = output / FOLDER / f".{saved.name}"
    remove_folder(staging)
    try:
        for file in sorted(json.loads((source / SUMS).read_text(encoding="utf-8"))):
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            _link(source / file, staging / file)
        _link(source / SUMS, staging / SUMS)
    except FileNotFoundError:  # removed meanwhile, by trainer.checkpoint.keep_last
        remove_folder(staging)
        return None
    staging.rename(copy)
    return copy


def forget_copies(output: Path, wanted: set[str] | None = None) -> None:
    """Remove the copies other than the wanted ones."""
    for path in (output / FOLDER).glob("*step_*"):
        if path.name not in (wanted or set()):
            remove_folder(path)


def model_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a checkpoint that transformers and peft load, each with its name in the repository."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in OWN and not name.parts[0].startswith("."):
            yield path, name.as_posix()


def all_files(folder: Path, below: str) -> Iterator[tuple[Path, str]]:
    """Yield all files of a checkpoint, each with its name in a folder of the repository."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, f"{below}/{path.relative_to(folder).as_posix()}"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
