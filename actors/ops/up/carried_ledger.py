"""Copy of the ledger's newest backup in `output_dir`, for a packer that is next started on another machine.

A ledger can't be on a network file system, and a batch system may give the packer another machine at each start. So the
packer's node copies each backup to `output_dir/nodes`, and installs the copy where its own ledger is missing or older.
The run then continues from the backup's checkpoint, as after `actors restore`: commits after the backup are lost, and
their groups are sampled again.
"""

import contextlib
import os
import shutil
import threading
from pathlib import Path

import structlog

from actors.ledger import LedgerReader
from actors.ledger.store import backup_paths
from actors.ops.previous_run import has_ledger
from actors.ops.up.share import NODES
from bus import threads
from schemas.config import RunConfig
from schemas.errors import ConfigError

log = structlog.get_logger("ledger")

LOOK_SECONDS = 2.0
"""Seconds between two looks for a newer backup."""


def is_carried(config: RunConfig) -> bool:
    """Return whether the ledger is outside of `output_dir`, so perhaps on a disk of one machine."""
    return not config.ledger_path.resolve().is_relative_to(config.output.resolve())


def carried_path(config: RunConfig) -> Path:
    """Return the path of the copy."""
    return config.output / NODES / "ledger.backup"


def bring_ledger(config: RunConfig) -> str:
    """Install the copy if this machine has no ledger of the run, or an older one. No packer may run.

    Returns:
        What was done; empty if the ledger of this machine is the newest.

    Raises:
        ConfigError: the copy fits no good checkpoint.
    """
    carried, path = carried_path(config), config.ledger_path
    if not is_carried(config) or not carried.is_file():
        return ""
    # each start of a packer counts the term up, and each restore by 1000 (P2)
    if has_ledger(config) and _term(path) >= _term(carried):
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    newer, older = backup_paths(path)
    older.unlink(missing_ok=True)
    _copy(carried, newer)
    from actors.ops.resume import restore_ledger  # here, since it loads numpy

    told = restore_ledger(config)
    # with the raised term: from here on every ledger left on another machine is older, whatever it holds
    _copy(path, newer)
    _copy(newer, carried)
    return f"the ledger of this machine is missing or older: {told}"


class LedgerCarrier:
    """Thread that copies each new backup of the ledger. A failed copy is a warning; the next look tries again."""

    def __init__(self, config: RunConfig) -> None:
        self._backup, self._carried = backup_paths(config.ledger_path)[0], carried_path(config)
        self._copied: tuple[int, int] = (0, 0)
        """Time of the newest change, in nanoseconds, and bytes of the backup that was copied."""
        self._stopping = threading.Event()
        self._carried.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threads.start("carrier", self._loop)

    def close(self) -> None:
        """Stop the thread, and copy the newest backup. Call once the packer has exited."""
        self._stopping.set()
        self._thread.join()
        self._look()

    def _loop(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            status = self._backup.stat()
            seen = (status.st_mtime_ns, status.st_size)
            if seen != self._copied:
                _copy(self._backup, self._carried)
                self._copied = seen
        except FileNotFoundError:  # no backup yet
            return
        except OSError as error:
            log.warning("backup of the ledger not copied", path=str(self._carried), detail=str(error))


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that the target is always whole, also after a power loss."""
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, staging)
    with staging.open("rb") as file:
        os.fsync(file.fileno())
    staging.replace(target)


def _term(path: Path) -> int:
    """Return the term of a ledger; 0 if the file can't be read."""
    try:
        ledger = LedgerReader.of(path)
    except ConfigError:
        return 0
    with contextlib.closing(ledger):
        return int(ledger.value("term") or 0)
