"""The run's own folder below `weights.directory`, for all weights that the run writes.

`weights.directory` may be a mount point, shared by several runs, or hold other files. So each run makes its own folder
there, with a marker to name the run. The run removes nothing outside this folder. A folder of the same name without
the run's marker is refused by name, and left untouched.

    weights.directory/grpo-actors-1000-3f2a91cc07de/     user id, and a digest of the resolved output_dir
        .grpo-actors.json                                {"run": "reverse", "output_dir": "/home/me/outputs/run"}
        .trainer.lock                                    held by the publishing trainer
        1.40/  1.41/  .1.42/                             versions; a dot in front: still being written
        server.inference-0/1.41.2/                       files of an engine for its server
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from schemas.config import RunConfig
from schemas.errors import ConfigError

log = structlog.get_logger("bus.weights")

MARKER = ".grpo-actors.json"
"""Name of the file that names the run of a folder."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of ours is made inside it
TRAINER = "trainer"
"""Owner of the versions: name of the trainer's lock."""
SCRATCH = "server."
"""Prefix of the name of an engine's scratch folder; the actor's name follows."""
VERSION = r"(\d+\.\d+|base)(\.\d+)?"
"""Pattern of the folders of versions: LINEAGE.VERSION or `base`; in a scratch folder the update's number follows."""
LOCK_SECONDS = 30.0
"""Seconds to wait for a lock: the predecessor may have been killed a moment ago."""
CLEAR_SECONDS = 1.0
"""Seconds to wait for a lock at the end of a run, when all its processes have stopped."""
LOCK_POLL_SECONDS = 0.05
"""Seconds between two attempts to take a lock."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. The marker in the folder names the run by its resolved `output_dir`."""

    path: Path
    run: str
    """Name of the run; for people."""
    output_dir: Path
    """Resolved path: two names of the same folder make the same run."""
    private: bool = False
    """True: the folder is closed to other users of the machine (mode 0700)."""

    def problem(self) -> str:
        """Return why the folder can't be used, with the remedy; empty if usable or not made yet."""
        try:
            found = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"weights.directory: {self.path} can't be used: {error.strerror}"
        remedy = "set another weights.directory, or move it away"
        if not stat.S_ISDIR(found.st_mode):
            return f"weights.directory: {self.path} is no folder; {remedy}"
        # private folders only: some network file systems show every file as owned by the same user
        if self.private and found.st_uid != os.getuid():
            return f"weights.directory: {self.path} belongs to another user (id {found.st_uid}); {remedy}"
        try:
            return self._problem_of_marker(remedy)
        except OSError as error:
            return f"weights.directory: {self.path} can't be read: {error.strerror}"

    def _problem_of_marker(self, remedy: str) -> str:
        try:
            marker = json.loads((self.path / MARKER).read_text(encoding="utf-8"))
            owner = str(marker["output_dir"])
        except FileNotFoundError:
            # no marker and nothing else (but a half-written marker): a process died right after it made the folder
            if all(entry.name.startswith(MARKER) for entry in self.path.iterdir()):
                return ""
            return f"weights.directory: {self.path} holds files and no {MARKER}, so it is not this run's; {remedy}"
        except (ValueError, KeyError, TypeError):
            return f"weights.directory: {self.path / MARKER} names no run; {remedy}"
        if owner != str(self.output_dir):
            return f"weights.directory: {self.path} belongs to the run with output_dir {owner}; {remedy}"
        return ""

    def take(self) -> None:
        """Make the folder and its marker if missing.

        Raises:
            ConfigError: the folder can't be made, or belongs to another run or user.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700 if self.private else 0o777)  # less the umask
            # checked after mkdir: another run may have made the folder first
            if problem := self.problem():
                raise ConfigError(problem)
            if self.private:  # a folder of this run that was made with another mode
                self.path.chmod(0o700)
            marker = self.path / MARKER
            if not marker.exists():
                # written aside under a random name: several actors may do this at once; no reader sees half a marker
                staging = marker.with_name(f"{MARKER}.{secrets.token_hex(4)}")
                text = json.dumps({"run": self.run, "output_dir": str(self.output_dir)})
                staging.write_text(text + "\n", encoding="utf-8")
                staging.replace(marker)
        except OSError as error:
            raise ConfigError(
                f"weights.directory: {self.path} can't be made: {error.strerror}; set a folder that can be written to"
            ) from error

    def hold(self, owner: str, patience: float | None = None) -> IO[bytes]:
        """Take the lock of `owner`, and return its open file. Closing the file or the process's end releases the lock.

        Two runs share a folder by mistake if both have the same `weights.directory` and the same `output_dir`, on two
        hosts or in two containers. The lock refuses the second run before it removes the versions of the first.

        Args:
            owner: TRAINER, or the name of a scratch folder.
            patience: seconds to wait; by default LOCK_SECONDS.

        Raises:
            ConfigError: another process holds the lock for longer than `patience` seconds.
        """
        patience = LOCK_SECONDS if patience is None else patience
        path, deadline = self.path / f".{owner}.lock", time.monotonic() + patience
        while (lock := _locked(path)) is None:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"weights.directory: {self.path} is in use by another process as {owner}, waited for {patience:g} "
                    f"s. If two runs have output_dir {self.output_dir}, on two hosts or in two containers, set another "
                    "output_dir or weights.directory for one of them"
                )
            time.sleep(LOCK_POLL_SECONDS)
        return lock

    def remove_versions(self) -> None:
        """Remove all versions, also half-written. The lock must be held. Does nothing in a folder of another run."""
        if self._is_ours():
            remove_named(self.path, rf"\.?{VERSION}")

    def clear(self) -> None:
        """Remove all parts whose owner is dead (by their locks), then the folder if nothing else is inside."""
        if not self._is_ours():
            return
        # lock files without a folder too: an engine may have died before it laid anything out
        locks = {path.name[1 : -len(".lock")] for path in self.path.glob(f".{SCRATCH}*.lock")}
        for owner in {TRAINER, *locks, *(path.name for path in self.path.glob(f"{SCRATCH}*"))}:
            try:
                lock = self.hold(owner, patience=CLEAR_SECONDS)
            except ConfigError:
                # the owner lives; the next start of the run removes its files
                continue
            with lock:
                if owner == TRAINER:
                    remove_named(self.path, rf"\.?{VERSION}")
                else:
                    _remove_scratch(self.path / owner)
                # while the lock is held: a process that opened the same file meanwhile finds it unlinked (`_locked`)
                (self.path / f".{owner}.lock").unlink(missing_ok=True)
        if all(entry.name.startswith(MARKER) for entry in self.path.iterdir()):
            for entry in self.path.iterdir():
                entry.unlink(missing_ok=True)
            _remove_empty(self.path)

    def _is_ours(self) -> bool:
        return (self.path / MARKER).is_file() and not self.problem()


class Scratch:
    """A folder of an actor inside the run's folder, for files to be read by an inference server.

    Nothing is made before the first `make`. A folder left by an earlier process of the actor is emptied at once.

    Args:
        folder: folder of the run.
        name: name of the scratch folder and of its lock.

    Raises:
        ConfigError: an earlier process's folder is there and can't be used, or is in use.
    """

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self.path = folder.path / name
        self._lock: IO[bytes] | None = None
        if self.path.is_dir():
            self.make()  # takes the lock, and removes the versions that an earlier process has left

    def make(self) -> Path:
        """Make the folder if missing, and return its path. The first call takes the lock and removes old versions.

        Raises:
            ConfigError: the folder can't be made, or is in use by another process.
        """
        if self._lock is None:
            self._folder.take()
            self._lock = self._folder.hold(self._name)
            remove_named(self.path, VERSION)
        self.path.mkdir(exist_ok=True)
        return self.path

    def close(self) -> None:
        """Remove the versions and the folder, and release the lock."""
        if self._lock is not None:
            _remove_scratch(self.path)
            self._lock.close()  # last: a successor may use the folder from here on
            self._lock = None


def remove_named(folder: Path, pattern: str) -> None:
    """Remove all subfolders whose whole name matches a pattern. A failure is logged."""
    # a link could lead out of the run's folder, to files of others
    if folder.is_symlink() or not folder.is_dir():
        return
    for entry in folder.iterdir():
        if re.fullmatch(pattern, entry.name):
            remove_folder(entry)


def remove_folder(folder: Path) -> None:
    """Remove a folder of the run with its contents. A failure is logged, not raised: the next start tries again."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("folder not removed", folder=str(folder), detail=str(error))


def _remove_scratch(scratch: Path) -> None:
    remove_named(scratch, VERSION)
    _remove_empty(scratch)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty: the rest is not the run's
        folder.rmdir()


def _locked(path: Path) -> IO[bytes] | None:
    """Open and lock a file. Return None while another process holds the lock."""
    lock = path.open("ab")  # makes the file if missing, and leaves an existing one as it is
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        # a file system without locks: nothing protects two runs with one folder from each other
        return lock
    # the previous holder has removed the file between our open and our lock: a third process would make a new one
    if os.fstat(lock.fileno()).st_nlink == 0:
        lock.close()
        return None
    return lock


# --- places of a run -------------------------------------------------------------------------------------------------


def weights_directory(config: RunConfig) -> Path:
    """Return the directory for the run's folder.

    The directory is `weights.directory` if set. Otherwise: shared memory if the bus stays on this host, a folder of
    `output_dir` if the bus is on tcp.
    """
    if config.weights.directory:
        return Path(config.weights.directory).absolute()
    return config.output / "weights" if config.bus.control.startswith("tcp") else _shared_memory(config)


def weights_folder(config: RunConfig) -> RunFolder:
    """Return the run's folder to which versions are published."""
    return _own_folder(config, weights_directory(config))


def scratch_folder(config: RunConfig, own: bool) -> RunFolder:
    """Return the run's folder in which engines lay out files for their servers.

    Args:
        config: configuration of the run.
        own: True if the actor starts the server itself, so that both see this host's shared memory. The folder is then
            in shared memory unless `weights.directory` is set.
    """
    in_memory = own and not config.weights.directory
    return _own_folder(config, _shared_memory(config) if in_memory else weights_directory(config))


def scratch_of(config: RunConfig, actor: str, own: bool) -> Scratch:
    """Return the scratch folder of an actor. `own`: as for `scratch_folder`."""
    return Scratch(scratch_folder(config, own), f"{SCRATCH}{actor}")


def folders_of(config: RunConfig) -> Iterator[RunFolder]:
    """Yield all possible folders of a run on this machine, each once."""
    yield from {folder.path: folder for folder in (weights_folder(config), scratch_folder(config, own=True))}.values()


def _own_folder(config: RunConfig, directory: Path) -> RunFolder:
    output_dir = config.output.resolve()
    tag = hashlib.sha256(str(output_dir).encode()).hexdigest()[:12]
    in_memory = directory.resolve().is_relative_to(SHARED_MEMORY)
    return RunFolder(directory / f"grpo-actors-{os.getuid()}-{tag}", config.name, output_dir, private=in_memory)


def _shared_memory(config: RunConfig) -> Path:
    """Return /dev/shm, or a folder of `output_dir` on systems without it."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else config.output / "weights"
