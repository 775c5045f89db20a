"""Weights as files: whole or not there, checked by digest, kept as long as they are asked for."""

from pathlib import Path

import pytest
import torch

from bus.weights import Weights
from bus.weights.filesystem import FilesystemPublisher, FilesystemReceiver
from schemas.messages import Policy

FULL = Weights("full", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})
ADAPTER = Weights("adapter", {"lora": torch.ones(3)}, {"adapter_config.json": '{"r": 4}'})


@pytest.fixture
def publisher(tmp_path: Path) -> FilesystemPublisher:
    """Keeps two versions."""
    return FilesystemPublisher(tmp_path / "weights", keep=2)


@pytest.mark.parametrize("weights", [FULL, ADAPTER], ids=["full", "adapter"])
def test_what_is_published_is_received(publisher: FilesystemPublisher, weights: Weights) -> None:
    """Same content, tensors bit by bit, dtypes and files."""
    manifest = publisher.publish(Policy(lineage=1, version=0), weights)
    received = FilesystemReceiver().receive(manifest)
    assert (received.content, received.files) == (weights.content, weights.files)
    assert received.tensors.keys() == weights.tensors.keys()
    for name, tensor in weights.tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert torch.equal(received.tensors[name], tensor)


def test_a_version_appears_whole(publisher: FilesystemPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tensors are being written, and when that fails, nothing has the final name."""
    seen = []

    def full_disk(tensors: dict[str, torch.Tensor], path: Path) -> None:
        seen.extend(entry.name for entry in path.parent.parent.iterdir())
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            publisher.publish(Policy(lineage=1, version=0), FULL)
    assert "1.0" not in seen
    assert publisher.published() == []
    manifest = publisher.publish(Policy(lineage=1, version=0), FULL)  # the rest of the failure is not in the way
    assert FilesystemReceiver().receive(manifest).tensors.keys() == {"a", "b"}


def test_other_bytes_than_published_are_refused_by_name(publisher: FilesystemPublisher) -> None:
    """The message names the policy, the file, and the key to look at."""
    manifest = publisher.publish(Policy(lineage=1, version=3), FULL)
    path = Path(manifest.uri) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"weights 1\.3 at {path}: digest .*weights\.directory"):
        FilesystemReceiver().receive(manifest)


def test_pruning_keeps_the_newest_and_all_that_are_asked_for(publisher: FilesystemPublisher) -> None:
    """Of versions 0 to 4 the newest two stay, and none from `keep_version` on goes."""
    for version in range(5):
        publisher.publish(Policy(lineage=1, version=version), FULL)
    publisher.prune(keep_version=2)
    assert [m.policy.version for m in publisher.published()] == [2, 3, 4]
    publisher.prune(keep_version=100)
    assert [m.policy.version for m in publisher.published()] == [3, 4]
    assert all(Path(m.uri).is_dir() for m in publisher.published())


def test_a_pruned_version_can_no_longer_be_received(publisher: FilesystemPublisher) -> None:
    """An engine that comes too late gets an OSError and waits for a newer manifest."""
    manifests = [publisher.publish(Policy(lineage=1, version=version), FULL) for version in range(3)]
    publisher.prune(keep_version=3)
    with pytest.raises(OSError, match=r"1\.0"):
        FilesystemReceiver().receive(manifests[0])


def test_a_new_publisher_starts_with_an_empty_directory(tmp_path: Path) -> None:
    """Versions of a dead trainer are named by nobody; closing removes the directory."""
    first = FilesystemPublisher(tmp_path / "weights", keep=2)
    old = Path(first.publish(Policy(lineage=1, version=7), FULL).uri)
    second = FilesystemPublisher(tmp_path / "weights", keep=2)
    assert second.published() == []
    assert not old.exists()
    second.close()
    assert not (tmp_path / "weights").exists()
