"""uploads.json: what is on the hub, and what could not be pushed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.telemetry.reporter import replace
from actors.uploader.files import Saved

log = structlog.get_logger("uploader")

FILE = "uploads.json"


@dataclass
class Uploads:
    """Record of a run's uploads."""

    run: str
    """Id of the run."""
    repository: str = ""
    """Repository and branch, as OWNER/NAME or OWNER/NAME@BRANCH; empty before the first push."""
    pushed: list[dict[str, Any]] = field(default_factory=list)
    """Step, chain and commit of each checkpoint on the hub, oldest first."""
    attempted: str = ""
    """Chain of the checkpoint whose push was started last, before its end is known."""
    unpushed: dict[str, str] = field(default_factory=dict)
    """Reason for each checkpoint that is to be pushed and is not, by step."""
    missed: dict[str, int] = field(default_factory=dict)
    """Steps of checkpoints that were removed before they were pushed, by chain."""

    @property
    def chains(self) -> set[str]:
        """Chains of the checkpoints on the hub."""
        return {one["chain"] for one in self.pushed}

    def note_pushed(self, saved: Saved, commit: str) -> None:
        """Note a checkpoint that is on the hub."""
        self.pushed.append({"step": saved.step, "chain": saved.chain, "commit": commit})
        self.attempted = ""
        self.unpushed.pop(str(saved.step), None)

    @classmethod
    def load(cls, output: Path, run: str) -> "Uploads":
        """Return the record of a run; an empty one if the file is missing, damaged or of another run."""
        record = read_uploads(output)
        return record if record is not None and record.run == run else cls(run)

    def save(self, output: Path) -> None:
        """Write the file, atomically.

        Raises:
            OSError: the file can't be written.
        """
        replace(output / FILE, json.dumps(asdict(self)) + "\n")


def read_uploads(output: Path) -> Uploads | None:
    """Return the record in a run's folder; None if there is none that can be read."""
    try:
        return Uploads(**json.loads((output / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("uploads.json can't be read; checkpoints on the hub are looked up there", detail=repr(error))
        return None


def lines_of(record: Uploads | None) -> list[str]:
    """Return the result of the uploads as lines for people."""
    if record is None:
        return ["hub: nothing was pushed; logs/uploader-0.log has the reason"]
    lines = []
    if record.pushed:
        lines.append(f"hub: step {record.pushed[-1]['step']} is on {record.repository}")
    for step, reason in record.unpushed.items():
        lines.append(f"hub: step {step} is NOT pushed: {reason}")
    if record.unpushed:
        lines.append("hub: the same command pushes what is missing")
    if record.missed:
        steps = ", ".join(map(str, record.missed.values()))
        lines.append(f"hub: NOT pushed, since removed before (trainer.checkpoint.keep_last): step {steps}")
    return lines
