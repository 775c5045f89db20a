"""Weights as versioned directories: on /dev/shm the shared-memory way of one host, on a shared disk the way of many.

A version is written beside its final name, read back for its digest, and renamed: whoever sees the name sees the whole
version. The directory of a full version holds `model.safetensors`, that of an adapter is a PEFT adapter as it is.
"""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog
from blake3 import blake3

from bus.weights import Weights
from schemas.messages import Manifest, Policy, WeightUpdate

log = structlog.get_logger("bus.weights")

FILE_NAMES = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}


class FilesystemPublisher:
    """Writes versions under `directory/lineage.version`, and keeps the newest `keep` of them."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._published: list[Manifest] = []
        if directory.exists():
            shutil.rmtree(directory)  # versions of a dead trainer: nothing names them any more
        directory.mkdir(parents=True)

    def publish(self, policy: Policy, weights: Weights) -> Manifest:
        """Write one version; atomic."""
        from safetensors.torch import save_file  # here: torch is slow to import, and the first beat should not wait

        final = self._directory / str(policy)
        staging = self._directory / f".{policy}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        for name, text in weights.files.items():
            (staging / name).write_text(text, encoding="utf-8")
        path = staging / FILE_NAMES[weights.content]
        save_file(weights.tensors, path)
        manifest = Manifest(
            policy=policy,
            channel="filesystem",
            content=weights.content,
            uri=str(final),
            digest=file_digest(path),
            num_bytes=path.stat().st_size,
        )
        staging.rename(final)
        self._published.append(manifest)
        return manifest

    def published(self) -> list[Manifest]:
        """Versions on disk, oldest first."""
        return list(self._published)

    def prune(self, keep_version: int) -> None:
        """Remove all but the newest `keep`, and none from `keep_version` on."""
        old = [m for m in self._published[: -self._keep] if m.policy.version < keep_version]
        for manifest in old:
            shutil.rmtree(manifest.uri, ignore_errors=True)
            self._published.remove(manifest)

    def close(self) -> None:
        """Remove everything: the run's checkpoints are elsewhere."""
        shutil.rmtree(self._directory, ignore_errors=True)


class FilesystemReceiver:
    """Reads what a `FilesystemPublisher` wrote."""

    def receive(
        self, manifest: Manifest, update: WeightUpdate | None = None, check: Callable[[], object] = bool
    ) -> Weights:
        """The version's tensors on the CPU. Files need nobody's presence: there is nothing to wait for.

        Raises:
            ValueError: the file is not the one that the manifest names.
            OSError: it can't be read (pruned meanwhile, or not on this machine).
        """
        from safetensors.torch import load_file

        path = Path(manifest.uri) / FILE_NAMES[manifest.content]
        digest = file_digest(path)
        if digest != manifest.digest:
            raise ValueError(
                f"weights {manifest.policy} at {path}: digest {digest[:12]}…, the trainer published "
                f"{manifest.digest[:12]}…; is weights.directory on a file system that all hosts share?"
            )
        files = {}
        if manifest.content == "adapter":
            files["adapter_config.json"] = json.dumps(json.loads((path.parent / "adapter_config.json").read_text()))
        return Weights(content=manifest.content, tensors=load_file(path), files=files, directory=manifest.uri)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, hex, by all cores."""
    if not path.is_file():  # else the error would not name it
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
