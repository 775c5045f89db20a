"""Weights as files: whole or not there, checked by digest, kept as long as they are asked for."""

import resource
import signal
from pathlib import Path

import pytest
import torch

from bus.weights import Weights
from bus.weights.filesystem import FilesystemPublisher, FilesystemReceiver
from schemas.messages import PolicyVersion
from tests.folders import folder_at

FULL = Weights("full", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})
ADAPTER = Weights("adapter", {"lora": torch.ones(3)}, {"adapter_config.json": '{"r": 4}'})


@pytest.fixture
def publisher(tmp_path: Path) -> FilesystemPublisher:
    """Keeps two versions."""
    return FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)


@pytest.mark.parametrize("weights", [FULL, ADAPTER], ids=["full", "adapter"])
def test_what_is_published_is_received(publisher: FilesystemPublisher, weights: Weights, tmp_path: Path) -> None:
    """Same content, tensors bit by bit, dtypes and files."""
    manifest = publisher.publish(PolicyVersion(lineage=1, version=0), weights)
    received = FilesystemReceiver(tmp_path).receive(manifest)
    assert (received.content, received.files) == (weights.content, weights.files)
    assert received.tensors.keys() == weights.tensors.keys()
    for name, tensor in weights.tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert torch.equal(received.tensors[name], tensor)


def test_a_version_appears_whole(
    publisher: FilesystemPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While tensors are being written, and when that fails, nothing has the final name."""
    seen = []

    def full_disk(tensors: dict[str, torch.Tensor], path: Path) -> None:
        seen.extend(entry.name for entry in path.parent.parent.iterdir())
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            publisher.publish(PolicyVersion(lineage=1, version=0), FULL)
    assert "1.0" not in seen
    assert publisher.published() == []
    manifest = publisher.publish(PolicyVersion(lineage=1, version=0), FULL)  # the rest of the failure is not in the way
    assert FilesystemReceiver(tmp_path).receive(manifest).tensors.keys() == {"a", "b"}


def test_other_bytes_than_published_are_refused_by_name(publisher: FilesystemPublisher, tmp_path: Path) -> None:
    """The message names the policy, the file, and the key to look at."""
    manifest = publisher.publish(PolicyVersion(lineage=1, version=3), FULL)
    path = Path(manifest.uri) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"weights 1\.3 at {path}: digest .*weights\.directory"):
        FilesystemReceiver(tmp_path).receive(manifest)


def test_pruning_keeps_the_newest_and_all_that_are_asked_for(publisher: FilesystemPublisher) -> None:
    """Of versions 0 to 4 the newest two stay, and none from `keep_version` on goes."""
    for version in range(5):
        publisher.publish(PolicyVersion(lineage=1, version=version), FULL)
    publisher.prune(keep_version=2)
    assert [m.policy.version for m in publisher.published()] == [2, 3, 4]
    publisher.prune(keep_version=100)
    assert [m.policy.version for m in publisher.published()] == [3, 4]
    assert all(Path(m.uri).is_dir() for m in publisher.published())


def test_a_pruned_version_can_no_longer_be_received(publisher: FilesystemPublisher, tmp_path: Path) -> None:
    """An engine that comes too late gets an OSError and waits for a newer manifest."""
    manifests = [publisher.publish(PolicyVersion(lineage=1, version=version), FULL) for version in range(3)]
    publisher.prune(keep_version=3)
    with pytest.raises(OSError, match=r"1\.0"):
        FilesystemReceiver(tmp_path).receive(manifests[0])


def test_a_new_publisher_starts_without_the_versions_of_a_dead_one(tmp_path: Path) -> None:
    """Versions of a dead trainer are named by nobody; closing removes the run's folder."""
    first = FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)
    old = Path(first.publish(PolicyVersion(lineage=1, version=7), FULL).uri)
    first.leave()
    second = FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)
    assert second.published() == []
    assert not old.exists()
    second.close()
    assert not (tmp_path / "weights").exists()


def test_a_half_written_version_of_a_dead_trainer_is_removed(tmp_path: Path) -> None:
    """It takes memory, and its name is free."""
    FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2).leave()
    half = tmp_path / "weights" / ".1.3"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    FilesystemPublisher(folder_at(tmp_path / "weights"), keep=2)
    assert not half.exists()


def test_a_version_without_room_is_told_in_words_and_leaves_nothing(
    publisher: FilesystemPublisher, tmp_path: Path
) -> None:
    """An OSError with folder, bytes needed, bytes free and the key, whatever error safetensors has for it."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"0\.004 GB of weights can't be written to .*, where \S+ GB are free: .*"
        ) as told:
            publisher.publish(PolicyVersion(lineage=1, version=0), Weights("full", {"a": torch.zeros(1 << 20)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "set weights.directory to a folder with room" in str(told.value)
    assert str(tmp_path / "weights") in str(told.value)
    assert [path.name for path in (tmp_path / "weights").iterdir() if not path.name.startswith(".")] == []
    assert not (tmp_path / "weights" / ".1.0").exists()
    assert publisher.publish(PolicyVersion(lineage=1, version=0), FULL).policy.version == 0


@pytest.mark.parametrize("files", [{"../../escaped": "x"}, {"adapter_config.json": "{}", "evil.py": "x"}])
def test_no_file_but_the_adapters_own_is_written(publisher: FilesystemPublisher, files: dict[str, str]) -> None:
    """Names of files come with the weights, and may come from a peer."""
    with pytest.raises(ValueError, match=r"allowed are: adapter_config\.json"):
        publisher.publish(PolicyVersion(lineage=1, version=0), Weights("adapter", {"a": torch.zeros(1)}, files))
    assert publisher.published() == []


def test_a_manifest_that_leads_outside_the_weights_directory_is_refused(tmp_path: Path) -> None:
    """By its path, and by a symlink: nothing of this machine is read that a peer names."""
    outside = FilesystemPublisher(folder_at(tmp_path / "elsewhere" / "run"), keep=2)
    manifest = outside.publish(PolicyVersion(lineage=1, version=0), FULL)
    inside = tmp_path / "weights"
    inside.mkdir()
    (inside / "link").symlink_to(manifest.uri)
    for uri in (manifest.uri, f"{inside}/../elsewhere/run/1.0", f"{inside}/link"):
        with pytest.raises(ValueError, match=r"not below weights\.directory"):
            FilesystemReceiver(inside).receive(manifest.model_copy(update={"uri": uri}))
    assert FilesystemReceiver(tmp_path / "elsewhere").receive(manifest).tensors.keys() == {"a", "b"}
