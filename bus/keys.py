"""CURVE keys of a run's bus, in the folder `bus.keys`: functions to make, rotate and read keys.

    server.secret  server.public    key pair of the packer's control socket; only the packer needs the secret
    client.secret  client.public    key pair of every connecting socket; the public file lists all allowed keys

Each line holds a key (64 hex digits) and a comment, the newest key first. A `KeyRing` reloads changed files, so a
rotation needs no restart: during a rotation each file has two keys, and both are good. Bound data sockets make their
own key pair in memory, and their address contains the public half.
"""

import contextlib
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import zmq
from zmq.utils import z85

from bus import threads
from schemas.errors import ConfigError

log = structlog.get_logger("bus")

KINDS = ("server", "client")
SECRET_VARIABLES = {"server": "GRPO_BUS_SERVER_SECRET_KEY", "client": "GRPO_BUS_CLIENT_SECRET_KEY"}
"""Environment variables that replace the files of secrets, by kind."""
PATIENCE_SECONDS = 0.1
"""Seconds of waiting in `KeyRing.current` for a check of the files; then the previous keys are used."""
IDLE_SECONDS = 1.0
"""Seconds between two turns of an idle thread."""
_KEY = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class KeySet:
    """All keys of a folder, 32 bytes each, the newest first."""

    server_secrets: tuple[bytes, ...]
    """Secrets of the packer's control socket; empty on machines without server.secret."""
    server_publics: tuple[bytes, ...]
    client_secrets: tuple[bytes, ...]
    client_publics: tuple[bytes, ...]
    """Keys allowed to connect to this process."""


class KeyRing:
    """The current keys of a folder. Thread-safe.

    The file system of the folder may hang. So a thread checks the files, and `current` waits for the check no longer
    than PATIENCE_SECONDS before it returns the keys of the previous check.

    Args:
        folder: folder of the keys.

    Raises:
        ConfigError: the keys can't be used. Later problems are logged, and the previous keys stay.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp = _stamp(folder)
        self._keys = load(folder)
        self._looks = threading.Condition()
        self._asked = self._done = 0
        """Numbers of the newest check asked for, and of the newest finished check."""
        self._looking_since: float | None = None
        """Start (`time.monotonic`) of the check under way; None: none is."""
        self._thread: threading.Thread | None = None

    def current(self) -> KeySet:
        """Return the keys that the files hold now. Costs four calls of `stat`."""
        with self._looks:
            if self._thread is None:
                self._thread = threads.start("keys", self._run)
            self._asked += 1
            this = self._asked
            self._looks.notify_all()
            since = self._looking_since
            # a check that hangs must not cost every caller PATIENCE_SECONDS
            if since is None or time.monotonic() - since < PATIENCE_SECONDS:
                self._looks.wait_for(lambda: self._done >= this, PATIENCE_SECONDS)
            return self._keys

    def _run(self) -> None:
        while True:
            threads.mark("keys")
            with self._looks:
                if not self._looks.wait_for(lambda: self._asked > self._done, IDLE_SECONDS):
                    continue
                asked, self._looking_since = self._asked, time.monotonic()
            # outside of the lock: the file system may hang, and `current` must return meanwhile
            stamp = _stamp(self.folder)
            if stamp != self._stamp:
                # before `load`: bad files are logged once, and loaded again when they have changed
                self._stamp = stamp
                try:
                    self._keys = load(self.folder)
                    log.info("keys reloaded", folder=str(self.folder))
                except ConfigError as error:
                    log.warning("new keys can't be used; keeping the previous keys", problems=error.problems)
            with self._looks:
                self._done, self._looking_since = asked, None
                self._looks.notify_all()


def load(folder: Path) -> KeySet:
    """Return all keys of a folder. Secrets in environment variables (SECRET_VARIABLES) replace secrets in files.

    Raises:
        ConfigError: a file is missing, open to other users, or has no keys. The error never shows contents.
    """
    if not folder.is_dir():
        raise ConfigError(f"bus.keys: there is no folder {folder}; `actors keys new {folder}` makes one")
    publics: dict[str, tuple[bytes, ...]] = {}
    for kind in KINDS:
        path = _path(folder, kind, "public")
        # root may own a list: root can write to any file anyway
        publics[kind] = tuple(_parse(str(path), _lines(path, writable_by={os.getuid(), 0})))
        if not publics[kind]:
            raise ConfigError(f"bus.keys: {path} has no key")
    secrets: dict[str, tuple[bytes, ...]] = dict.fromkeys(KINDS, ())
    for kind, variable in SECRET_VARIABLES.items():
        if given := os.environ.get(variable):
            secrets[kind] = tuple(_parse(variable, [given]))
        elif _path(folder, kind, "secret").exists():
            secrets[kind] = tuple(_secrets_in(folder, kind))
    # every process connects somewhere: actors to the control socket, all to inboxes
    if not secrets["client"]:
        raise ConfigError(f"bus.keys: {folder} has no client.secret, and {SECRET_VARIABLES['client']} is not set")
    return KeySet(secrets["server"], publics["server"], secrets["client"], publics["client"])


def public_of(secret: bytes) -> bytes:
    """Return the public key (32 bytes) of a secret key (32 bytes)."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def new_secret() -> bytes:
    """Return a new random secret key, 32 bytes."""
    return z85.decode(zmq.curve_keypair()[1])


def fingerprint_of(public: bytes) -> str:
    """Return 16 hex digits of the SHA-256 of a public key, for people to compare."""
    return hashlib.sha256(public).hexdigest()[:16]


# --- making and rotating ---------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make a folder with a new key pair of each kind.

    Raises:
        ConfigError: the folder has keys already, or can't be written.
    """
    with _in_words(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(path.exists() for path in _files(folder)):
            raise ConfigError(f"{folder}: has keys already; `actors keys rotate {folder}` replaces them in a run")
        for kind in KINDS:
            _add(folder, kind)


def rotate(folder: Path) -> None:
    """Start a rotation: put a new key pair of each kind first in the files. Old and new keys are both good.

    Raises:
        ConfigError: a rotation is under way, or the files can't be used.
    """
    if any(len(_secrets_in(folder, kind)) != 1 for kind in KINDS):
        raise ConfigError(f"{folder}: a rotation is under way; finish it with `actors keys rotate {folder} --finish`")
    with _in_words(folder):
        for kind in KINDS:
            _add(folder, kind)


def finish(folder: Path) -> None:
    """Finish a rotation: remove the older key pair of each kind. Keys added by hand stay.

    Raises:
        ConfigError: no rotation is under way, or the files can't be used.
    """
    secrets = {kind: _secrets_in(folder, kind) for kind in KINDS}
    if all(len(found) == 1 for found in secrets.values()):
        raise ConfigError(f"{folder}: no rotation is under way; `actors keys rotate {folder}` starts one")
    with _in_words(folder):
        for kind, (_, *old) in secrets.items():
            retired = {public_of(secret).hex() for secret in old}
            secret, public = _path(folder, kind, "secret"), _path(folder, kind, "public")
            _write(secret, _lines(secret)[:1], 0o600)
            _write(public, [line for line in _lines(public) if line.split()[0].lower() not in retired], 0o644)


def _add(folder: Path, kind: str) -> None:
    """Put a new key pair first in both files of a kind."""
    secret, made = new_secret(), time.strftime("made %Y-%m-%d %H:%M UTC", time.gmtime())
    # the public half first: a process that reads in between accepts a key that is not used yet; the other order would
    # let it use a key that no peer accepts
    for half, key, mode in (("public", public_of(secret), 0o644), ("secret", secret, 0o600)):
        path = _path(folder, kind, half)
        _write(path, [f"{key.hex()} {made}", *(_lines(path) if path.exists() else [])], mode)


def _write(path: Path, lines: Iterable[str], mode: int) -> None:
    """Replace a file atomically. The new file has its final mode from the start: no other user can read a secret."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    # EXCL: never write into a file, or through a link, that another user has put there
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        # before the rename: after a power cut the name must not lead to an empty file
        os.fsync(descriptor)
    staging.replace(path)


@contextlib.contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder}: keys can't be written: {error.strerror}") from None


# --- reading ---------------------------------------------------------------------------------------------------------


def _path(folder: Path, kind: str, half: str) -> Path:
    return folder / f"{kind}.{half}"


def _files(folder: Path) -> list[Path]:
    return [_path(folder, kind, half) for kind in KINDS for half in ("secret", "public")]


def _stamp(folder: Path) -> list[tuple[int, ...]]:
    """Return file times, sizes, ids, modes and owners of the key files: any change of a file changes them."""
    # modes and owners too: a secret that was opened to others is reported, though its content is the same
    stamps: list[tuple[int, ...]] = []
    for path in _files(folder):
        try:
            found = path.stat()
        except OSError:
            stamps.append(())
        else:
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid))
    return stamps


def _secrets_in(folder: Path, kind: str) -> list[bytes]:
    path = _path(folder, kind, "secret")
    return _parse(str(path), _lines(path, is_secret=True))


def _lines(path: Path, is_secret: bool = False, writable_by: Iterable[int] = ()) -> list[str]:
    """Return the lines of a key file, stripped, without empty lines.

    Args:
        path: the file.
        is_secret: True: the file must belong to this user, and be closed to others.
        writable_by: ids of allowed owners; other users must not be able to write. Empty: not checked.

    Raises:
        ConfigError: the file can't be read, or another user could read a secret or write to a list.
    """
    try:
        with path.open(encoding="utf-8") as file:
            # of the open file: the path may lead to another file a moment later
            found = os.fstat(file.fileno())
            owners, mode = {os.getuid()} if is_secret else set(writable_by), stat.S_IMODE(found.st_mode)
            if owners and found.st_uid not in owners:
                raise ConfigError(
                    f"bus.keys: {path} belongs to user {found.st_uid}, and this runs as user {os.getuid()}"
                )
            if is_secret and mode & 0o077:
                raise ConfigError(f"bus.keys: {path} is open to others (mode {mode:04o}); chmod 600 {path}")
            if owners and mode & 0o022:
                raise ConfigError(f"bus.keys: {path} may be written by others (mode {mode:04o}); chmod 644 {path}")
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"bus.keys: {path} can't be read: {getattr(error, 'strerror', error)}") from None


def _parse(where: str, lines: list[str]) -> list[bytes]:
    for number, line in enumerate(lines, 1):
        if not _KEY.fullmatch(line.split()[0]):
            raise ConfigError(f"bus.keys: {where}, line {number}: a line begins with a key of 64 hex digits")
    return [bytes.fromhex(line.split()[0]) for line in lines]


_rings: dict[Path, KeyRing] = {}
_rings_lock = threading.Lock()


def ring_of(folder: str) -> KeyRing:
    """Return the ring of a folder, shared by all sockets of the process.

    Raises:
        ConfigError: the keys in the folder can't be used.
    """
    path = Path(folder).absolute()
    with _rings_lock:
        if path not in _rings:
            _rings[path] = KeyRing(path)
        return _rings[path]
