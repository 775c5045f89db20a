"""The keys of a run's bus, in a folder that `bus.keys` names.

    server.secret  server.public    of the packer's control socket; only the packer needs the secret
    client.secret  client.public    of whoever connects; the public ones are the list of those who may

A line of a file is a key (64 hex digits) and words for people, the newest first. A `KeyRing` reads them anew whenever
they have changed, so a rotation needs no restart. While it lasts there are two keys in each file, and both are good.
Data sockets that bind make a pair of their own, which never touches a disk: its public half travels in the address.
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

from schemas.errors import ConfigError

log = structlog.get_logger("bus")

KINDS = ("server", "client")
SECRET_VARIABLES = {"server": "GRPO_BUS_SERVER_SECRET_KEY", "client": "GRPO_BUS_CLIENT_SECRET_KEY"}
"""Instead of the files of secrets, for deployments that hand out secrets as environment variables."""
_KEY = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class KeySet:
    """Keys as 32 bytes each, the newest first."""

    server_secrets: tuple[bytes, ...]
    """Empty where the packer does not run."""
    server_publics: tuple[bytes, ...]
    client_secrets: tuple[bytes, ...]
    client_publics: tuple[bytes, ...]


class KeyRing:
    """The keys of one folder as they are now. Thread-safe.

    Raises:
        ConfigError: they can't be used; only at the start, a process that has good keys keeps them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._stamp = _stamp(folder)
        self._keys = load(folder)

    def current(self) -> KeySet:
        """The keys in the files. Costs four looks at the file system."""
        with self._lock:
            stamp = _stamp(self.folder)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = load(self.folder)
                    log.info("keys read anew", folder=str(self.folder))
                except ConfigError as error:
                    log.warning("new keys can't be used; the ones before stay", problems=error.problems)
            return self._keys


def load(folder: Path) -> KeySet:
    """All keys of a folder; secrets from the environment where it has them.

    Raises:
        ConfigError: a file is missing, open to others, or has no keys; the contents are never shown.
    """
    if not folder.is_dir():
        raise ConfigError(f"bus.keys: there is no folder {folder}; `actors keys new {folder}` makes one")
    publics = {kind: tuple(_publics(folder, kind)) for kind in KINDS}
    secrets = {kind: _secrets(folder, kind) for kind in KINDS}
    if not secrets["client"]:
        raise ConfigError(f"bus.keys: {folder} has no client.secret, and {SECRET_VARIABLES['client']} is not set")
    return KeySet(secrets["server"], publics["server"], secrets["client"], publics["client"])


def public_of(secret: bytes) -> bytes:
    """The public half of a pair."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def new_secret() -> bytes:
    """The secret half of a new pair."""
    return z85.decode(zmq.curve_keypair()[1])


def fingerprint_of(public: bytes) -> str:
    """A short name of a public key, for people to compare."""
    return hashlib.sha256(public).hexdigest()[:16]


# --- making and rotating ---------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Write a new set of keys.

    Raises:
        ConfigError: there are keys already, or the folder can't be written.
    """
    with _in_words(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(path.exists() for path in _files(folder)):
            raise ConfigError(f"{folder}: has keys already; `actors keys rotate {folder}` replaces them in a run")
        for kind in KINDS:
            _add(folder, kind)


def rotate(folder: Path) -> None:
    """Put a new pair before each: from now on both are good, and the new one is used first.

    Raises:
        ConfigError: a rotation is under way, or the files can't be used.
    """
    if any(len(_secrets_in(folder, kind)) != 1 for kind in KINDS):
        raise ConfigError(f"{folder}: a rotation is under way; end it with `actors keys rotate {folder} --finish`")
    with _in_words(folder):
        for kind in KINDS:
            _add(folder, kind)


def finish(folder: Path) -> None:
    """Drop the older pair of each kind; other keys that somebody has put into the files stay.

    Raises:
        ConfigError: no rotation is under way, or the files can't be used.
    """
    secrets = {kind: _secrets_in(folder, kind) for kind in KINDS}
    if all(len(found) == 1 for found in secrets.values()):
        raise ConfigError(f"{folder}: no rotation is under way; `actors keys rotate {folder}` begins one")
    with _in_words(folder):
        for kind, (_, *old) in secrets.items():
            retired = {public_of(secret).hex() for secret in old}
            secret, public = _path(folder, kind, "secret"), _path(folder, kind, "public")
            _write(secret, _lines(secret)[:1], 0o600)
            _write(public, [line for line in _lines(public) if line.split()[0].lower() not in retired], 0o644)


def _add(folder: Path, kind: str) -> None:
    """The public half first: who reads in between knows a key that nobody uses yet."""
    secret, made = new_secret(), time.strftime("made %Y-%m-%d %H:%M UTC", time.gmtime())
    for half, key, mode in (("public", public_of(secret), 0o644), ("secret", secret, 0o600)):
        path = _path(folder, kind, half)
        _write(path, [f"{key.hex()} {made}", *(_lines(path) if path.exists() else [])], mode)


def _write(path: Path, lines: Iterable[str], mode: int) -> None:
    """Replace a file in one go; it is never there with another mode."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
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
    """What is another one when a file has been written, replaced, removed or opened to others."""
    stamps: list[tuple[int, ...]] = []
    for path in _files(folder):
        try:
            found = path.stat()
        except OSError:
            stamps.append(())
        else:
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid))
    return stamps


def _publics(folder: Path, kind: str) -> list[bytes]:
    path = _path(folder, kind, "public")
    keys = _parse(str(path), _lines(path, writable_by={os.getuid(), 0}))
    if not keys:
        raise ConfigError(f"bus.keys: {path} has no key")
    return keys


def _secrets(folder: Path, kind: str) -> tuple[bytes, ...]:
    variable = SECRET_VARIABLES[kind]
    if given := os.environ.get(variable):
        return tuple(_parse(variable, [given]))
    return tuple(_secrets_in(folder, kind)) if _path(folder, kind, "secret").exists() else ()


def _secrets_in(folder: Path, kind: str) -> list[bytes]:
    path = _path(folder, kind, "secret")
    return _parse(str(path), _lines(path, is_secret=True))


def _lines(path: Path, is_secret: bool = False, writable_by: Iterable[int] = ()) -> list[str]:
    """Lines that are not empty.

    Raises:
        ConfigError: somebody else could read a secret, or write to a list.
    """
    try:
        with path.open(encoding="utf-8") as file:
            _check_owner(path, os.fstat(file.fileno()), is_secret, writable_by)
            return [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"bus.keys: {path} can't be read: {getattr(error, 'strerror', error)}") from None


def _check_owner(path: Path, found: os.stat_result, is_secret: bool, writable_by: Iterable[int]) -> None:
    owners = {os.getuid()} if is_secret else set(writable_by)
    if owners and found.st_uid not in owners:
        raise ConfigError(f"bus.keys: {path} belongs to user {found.st_uid}, and this runs as user {os.getuid()}")
    mode = stat.S_IMODE(found.st_mode)
    if is_secret and mode & 0o077:
        raise ConfigError(f"bus.keys: {path} is open to others (mode {mode:04o}); chmod 600 {path}")
    if owners and mode & 0o022:
        raise ConfigError(f"bus.keys: {path} may be written by others (mode {mode:04o}); chmod 644 {path}")


def _parse(where: str, lines: list[str]) -> list[bytes]:
    for number, line in enumerate(lines, 1):
        if not _KEY.fullmatch(line.split()[0]):
            raise ConfigError(f"bus.keys: {where}, line {number}: a line begins with a key of 64 hex digits")
    return [bytes.fromhex(line.split()[0]) for line in lines]


_rings: dict[Path, KeyRing] = {}
_rings_lock = threading.Lock()


def ring_of(folder: str) -> KeyRing:
    """The ring of a folder, the same one for all sockets of this process.

    Raises:
        ConfigError: its keys can't be used.
    """
    path = Path(folder).absolute()
    with _rings_lock:
        if path not in _rings:
            _rings[path] = KeyRing(path)
        return _rings[path]
