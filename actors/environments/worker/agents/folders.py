"""Folders of trajectories: made, kept or removed, and found again when the worker was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .texts import as_bytes

PREFIX, LOCK, OUTPUT = "grpo-agent-", "grpo-agent.lock", "output.txt"
STALE_SECONDS = 60.0
"""Age from which a folder is removed whose worker has ended."""


class Folder:
    """Folder of a trajectory, in the folder for temporary files.

    A worker that is killed leaves it; another worker finds that nobody holds the lock any more.
    """

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self.shared = self.root / "shared"
        """What the program may write; nothing that the worker trusts lies there."""
        self.work, self.home, self.temporary = (self.shared / name for name in ("work", "home", "tmp"))
        for folder in (self.shared, self.work, self.home, self.temporary):
            folder.mkdir()
        self._lock = (self.root / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let go of the folder, which was kept or removed."""
        self._lock.close()

    def keep(self, target: Path, output: str) -> None:
        """Keep the folder, with the output of the program."""
        (self.root / OUTPUT).write_bytes(as_bytes(output))
        # without it, it is no folder of a trajectory any more
        (self.root / LOCK).unlink()
        if target != self.root:
            shutil.move(self.root, target)


def stale_folders() -> Iterator[Path]:
    """Yield the folders of trajectories whose workers were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        # another user's, or one that is just being removed
        with contextlib.suppress(OSError):
            facts = lock.lstat()
            is_ours = facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and not lock.parent.is_symlink()
            # a new folder has no lock for a moment
            if not is_ours or time.time() - facts.st_mtime < STALE_SECONDS:
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield lock.parent


def remove_tree(root: Path) -> None:
    """Remove a folder with everything in it, also what its owner may not write."""
    for parent, folders, _ in os.walk(root):
        for folder in folders:
            path = Path(parent, folder)
            # of a link it would change the target
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(root)
