"""stop.json: the wish of a callback that training stops, from its process to `actors up`.

A file, since it must outlive both processes: a run that is killed while it stops goes on stopping when it is started
again. `actors up` removes the file once the run has stopped.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STOP = "stop.json"


@dataclass(frozen=True)
class StopWish:
    """Wish that training stops."""

    run: str
    """Id of the run; a wish for another run counts for nothing."""
    callback: str
    """Class of the callback."""
    step: int
    """Step whose events the callback had seen."""


def ask_to_stop(output: Path, wish: StopWish) -> None:
    """Write the wish, atomically and to the disk."""
    staging = output / f".{STOP}"
    with staging.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(wish)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    staging.replace(output / STOP)


def wish_to_stop(output: Path) -> StopWish | None:
    """Return the wish; None if there is none."""
    try:
        record = json.loads((output / STOP).read_text(encoding="utf-8"))
        return StopWish(str(record["run"]), str(record["callback"]), int(record["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_wish(output: Path) -> None:
    """Remove the wish."""
    (output / STOP).unlink(missing_ok=True)
