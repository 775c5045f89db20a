"""Weights as versioned directories: in /dev/shm for engines on the same host, on a shared disk for several hosts.

A version is written under a temporary name, read back for its digest, and renamed, so a version under its final name is
whole. A full version is a directory with `model.safetensors`; an adapter is a PEFT adapter directory. All are in the
run's own folder (`bus.run_folder`); nothing outside is read, written or removed.
"""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from blake3 import blake3

from bus.run_folder import TRAINER, RunFolder, remove_folder
from bus.weights import Weights, check_files
from schemas.messages import Manifest, PolicyVersion, WeightUpdate

if TYPE_CHECKING:
    import torch

log = structlog.get_logger("bus.weights")

FILE_NAMES = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}
"""Name of the file of tensors, by content."""


class FilesystemPublisher:
    """Writes versions into the run's folder as directories `LINEAGE.VERSION`.

    Args:
        folder: folder of the run.
        keep: number of the newest versions kept by `prune`.

    Raises:
        ConfigError: the folder can't be made, is not this run's, or another trainer publishes there.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._published: list[Manifest] = []
        folder.take()
        self._lock = folder.hold(TRAINER)
        # left by a dead trainer: no manifest names them any more. Only now: the lock proves that no trainer lives
        folder.remove_versions()

    def publish(self, policy: PolicyVersion, weights: Weights) -> Manifest:
        """Write a version atomically, and return its manifest.

        Raises:
            OSError: the version can't be written, mostly for lack of room. Its partial files are removed.
        """
        from safetensors import SafetensorError  # not at the top: importing torch would delay the first heartbeat
        from safetensors.torch import save_file

        check_files(weights.content, weights.files)
        self._folder.take()
        final, staging = self._folder.path / str(policy), self._folder.path / f".{policy}"
        remove_folder(staging)  # left by an attempt of this process that could not be cleaned up
        try:
            staging.mkdir()
            for name, text in weights.files.items():
                (staging / name).write_text(text, encoding="utf-8")
            path = staging / FILE_NAMES[weights.content]
            save_file(weights.tensors, path)
            # of the file on the disk, not of the tensors: engines compare the digest with the file that they read
            digest, num_bytes = file_digest(path), path.stat().st_size
            staging.rename(final)
        except (OSError, SafetensorError) as error:
            # safetensors reports a full disk as an error of its own
            remove_folder(staging)
            raise no_room(weights.tensors, self._folder.path, error) from error
        manifest = Manifest(
            policy=policy,
            channel="filesystem",
            content=weights.content,
            uri=str(final),
            digest=digest,
            num_bytes=num_bytes,
        )
        self._published.append(manifest)
        return manifest

    def published(self) -> list[Manifest]:
        """Return the manifests of the versions on disk, oldest first."""
        return list(self._published)

    def prune(self, keep_version: int) -> None:
        """Remove all versions but the newest `keep`. Versions from `keep_version` on stay."""
        # engines may still ask for `keep_version` and newer, however many these are
        old = [m for m in self._published[: -self._keep] if m.policy.version < keep_version]
        for manifest in old:
            remove_folder(Path(manifest.uri))
            self._published.remove(manifest)

    def close(self) -> None:
        """Remove all versions: the run is done, and its checkpoints are elsewhere."""
        self.leave()  # first: `clear` takes the same lock
        self._folder.clear()

    def leave(self) -> None:
        """Release the lock to another trainer. Versions stay: engines may still load them."""
        self._lock.close()


def no_room(tensors: "Mapping[str, torch.Tensor]", folder: Path, error: Exception, reader: str = "") -> OSError:
    """Return an error about weights not written: needed and free bytes, the cause, and the remedy.

    Args:
        tensors: the weights.
        folder: target folder.
        error: error of the attempt.
        reader: name of the reading server; empty: all engines.
    """
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    try:
        free = f"{shutil.disk_usage(folder).free / 1e9:.3f} GB are free"
    except OSError:
        free = "the folder no longer exists"
    target = f"for {reader} to {folder}" if reader else f"to {folder}"
    return OSError(
        f"{needed / 1e9:.3f} GB of weights can't be written {target}, where {free}: {reason}; set "
        "weights.directory to a folder with room for weights.keep + 1 versions, or free space"
    )


class FilesystemReceiver:
    """Reads the versions of a `FilesystemPublisher`.

    Args:
        directory: `weights.directory` of this actor. A manifest with a path outside is refused.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def receive(
        self, manifest: Manifest, update: WeightUpdate | None = None, check: Callable[[], object] = bool
    ) -> Weights:
        """Read a version, check its digest, and return its weights with tensors on the CPU.

        Args:
            manifest: manifest of the version, from the packer.
            update: ignored: files need no update.
            check: ignored: there is nothing to wait for.

        Raises:
            ValueError: the file has another digest than the manifest, or is outside `weights.directory`.
            OSError: the file can't be read: pruned meanwhile, or not on this machine.
        """
        from safetensors.torch import load_file

        folder = Path(manifest.uri)
        # resolved: the path came from a peer, and may hold `..` or lead through a link
        if not folder.resolve().is_relative_to(self._directory.resolve()):
            raise ValueError(
                f"weights {manifest.policy}: the trainer names {folder}, which is not below weights.directory "
                f"{self._directory} of this actor; give all actors of a run the same weights.directory"
            )
        path = folder / FILE_NAMES[manifest.content]
        digest = file_digest(path)
        if digest != manifest.digest:
            raise ValueError(
                f"weights {manifest.policy} at {path}: digest {digest[:12]}…, the trainer published "
                f"{manifest.digest[:12]}…; is weights.directory on a file system that all hosts share?"
            )
        files = {}
        if manifest.content == "adapter":
            # parsed and written again: the digest does not cover this file, so it is checked to be JSON at least
            files["adapter_config.json"] = json.dumps(json.loads((path.parent / "adapter_config.json").read_text()))
        return Weights(content=manifest.content, tensors=load_file(path), files=files, directory=manifest.uri)


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file in hex, computed on all cores.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not path.is_file():  # blake3's own error does not name the file
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
