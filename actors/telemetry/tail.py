"""Reader of a run's files while they are written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.telemetry.reporter import record_of


class Tail:
    """Reader of records that are appended to a .jsonl file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""
        """Last line that was read, by which a file that was cut and has grown again is known."""

    def was_cut(self) -> bool:
        """Return whether lines that were read are gone, or have been replaced."""
        if not self._offset:
            return False
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except FileNotFoundError:
            return True

    def restart(self) -> None:
        """Read from the first line on at the next call of `new`."""
        self._offset, self._last = 0, b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were completed since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            # cut since the last look: `was_cut` finds it at the next one, as long as the place is kept
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                return
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line
                record = record_of(line)
                if record is not None:
                    yield record
