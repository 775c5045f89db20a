"""callbacks.json: how far each event has been told, and the states of callbacks that have one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.callbacks.events import Told
from actors.telemetry.reporter import replace

log = structlog.get_logger("callbacks")

FILE = "callbacks.json"


@dataclass
class Memory:
    """Record of the callbacks' process that outlives a restart."""

    run: str
    """Id of the run."""
    told: Told = field(default_factory=Told)
    states: dict[str, Any] = field(default_factory=dict)
    """Attributes of callbacks with a method `state`, as transformers' ExportableState has it, by place and path."""

    @classmethod
    def load(cls, output: Path, run: str) -> "Memory":
        """Return the memory of a run; an empty one if the file is missing, damaged or of another run."""
        try:
            record = json.loads((output / FILE).read_text(encoding="utf-8"))
            if record["run"] == run:
                return cls(run, Told(**record["told"]), dict(record["states"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("callbacks.json can't be read; all events are told again", detail=repr(error))
        return cls(run)

    @staticmethod
    def run_of(output: Path) -> str:
        """Return the id of the run whose events have been told; empty without a file."""
        try:
            return str(json.loads((output / FILE).read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def save(self, output: Path) -> None:
        """Write the file, atomically.

        Raises:
            OSError: the file can't be written.
        """
        record = {"run": self.run, "told": asdict(self.told), "states": self.states}
        replace(output / FILE, json.dumps(record) + "\n")


def restore_states(callbacks: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set the attributes that callbacks had when they were last saved."""
    for key, callback in callbacks.items():
        for name, value in states.get(key, {}).items():
            setattr(callback, name, value)


def states_of(callbacks: Mapping[str, Any], lost: set[str]) -> dict[str, Any]:
    """Return the attributes that callbacks export by a method `state`.

    Args:
        callbacks: callbacks by place and path.
        lost: keys of callbacks whose state could not be taken; extended, and told once each.
    """
    found: dict[str, Any] = {}
    for key, callback in callbacks.items():
        state = getattr(callback, "state", None)
        if not callable(state) or key in lost:
            continue
        try:
            attributes = dict(state()["attributes"])
            json.dumps(attributes)
        except Exception as error:  # noqa: BLE001 - of the user's code
            lost.add(key)
            log.warning("state of a callback is not kept across restarts", callback=key, detail=repr(error))
        else:
            found[key] = attributes
    return found


def keyed(paths: Sequence[str], callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return callbacks by place and path, such as `0 my.py:Stop`."""
    return {f"{i} {path}": one for i, (path, one) in enumerate(zip(paths, callbacks, strict=True))}
