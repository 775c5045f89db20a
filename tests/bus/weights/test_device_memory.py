"""Weights on the device of the trainer: checksums, handles between processes, and updates with and without a rank."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.block_sums import BLOCK_BYTES, POINTS, PRIME, block_sums, digest_of
from bus.weights.device_memory import Block, DeviceMemory, plain_segments
from bus.weights.inside import grpo_actors_handles as handles
from bus.weights.process_groups import ProcessGroup, Wait
from bus.weights.rendezvous import RendezvousPublisher, RendezvousReceiver
from schemas.errors import ConfigError
from schemas.messages import Manifest, WeightMember, WeightUpdate
from tests.bus.weights.test_rendezvous import HOST, POLICY, in_thread, never, some_weights

KEY = bytes(range(32))


def memory() -> DeviceMemory:
    """The stand-in for a GPU's memory: that of this machine."""
    return DeviceMemory(lambda: torch.device("cpu"))


# --- places ----------------------------------------------------------------------------------------------------------


def test_places_are_equal_on_the_same_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's UUID, since processes number the GPUs that they see from 0; and by its machine."""
    uuids = {0: "GPU-a", 1: "GPU-b"}
    properties = lambda device: SimpleNamespace(uuid=uuids[device.index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    first, second = (DeviceMemory(lambda n=n: torch.device("cuda", n)).place for n in (0, 1))  # type: ignore[misc]
    assert first.startswith("cuda:")
    assert first.endswith("/GPU-a")
    assert first.removesuffix("GPU-a") == second.removesuffix("GPU-b")
    # another process, in which the same GPU has another number
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    assert DeviceMemory(lambda: torch.device("cuda", 3)).place == first
    monkeypatch.setattr(Path, "readlink", lambda path: Path("ipc:[1]"))
    assert DeviceMemory(lambda: torch.device("cuda", 3)).place != first


# --- checksums -------------------------------------------------------------------------------------------------------


def reference(data: bytes, key: bytes) -> list[list[int]]:
    """The same numbers with Python's integers, word by word."""
    drawn = np.frombuffer(blake3(b"points", key=key).digest(4 * POINTS), "<u4")
    points = [int(x) % (PRIME - 2) + 2 for x in drawn]
    found = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        words = np.frombuffer(block + bytes(len(block) % 2), "<i2").tolist()
        row = []
        for x in points:
            # Horner's rule, from the last word to the first
            value = 0
            for word in reversed(words):
                value = (value + word) * x % PRIME
            row.append(value)
        found.append(row)
    return found


@pytest.mark.parametrize(
    "num_bytes", [1, 2, 3, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7]
)
def test_the_numbers_of_blocks_are_exact(num_bytes: int) -> None:
    """A product of matrices in float64, and Python's integers: equal, with the largest words too."""
    for data in (np.random.default_rng(num_bytes).bytes(num_bytes), b"\xff\x7f" * (num_bytes // 2 + 1)):
        found = block_sums(torch.frombuffer(bytearray(data[:num_bytes]), dtype=torch.uint8), KEY)
        assert found.tolist() == reference(data[:num_bytes], KEY)


def test_numbers_do_not_depend_on_alignment() -> None:
    """The same bytes at an odd address, and in parts of many blocks."""
    data = torch.randint(0, 256, (3 * BLOCK_BYTES + 11,), dtype=torch.uint8)
    for shift in (1, 2, 7):
        shifted = torch.zeros(len(data) + shift, dtype=torch.uint8)
        shifted[shift:] = data
        assert torch.equal(block_sums(shifted[shift:], KEY), block_sums(data, KEY))
    assert block_sums(data[:0], KEY).shape == (0, POINTS)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_changes_the_digest(data: bytes, place: int, change: int) -> None:
    """So do a zero more at the end, and another key."""
    other = bytearray(data)
    other[place % len(data)] ^= change

    def digest(content: bytes, key: bytes = KEY) -> bytes:
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return digest_of(block_sums(flat, key), len(content), key)

    assert len({digest(data), digest(bytes(other)), digest(data + b"\0"), digest(data, bytes(32))}) == 4


def test_equal_weights_have_equal_digests_however_they_are_cut_and_never_equal_codes() -> None:
    """As with channel `rendezvous`; a digest tells all bits, names and shapes."""
    weights = some_weights()
    one, two, other = (memory().pack(w, size) for w, size in ((weights, 200), (weights, 9000), (some_weights(1), 200)))
    assert one.header.digest == two.header.digest != other.header.digest
    assert set(one.codes).isdisjoint(memory().pack(weights, 200).codes)
    renamed = replace(weights, tensors={name + "x": tensor for name, tensor in weights.tensors.items()})
    assert memory().pack(renamed, 200).header.digest != one.header.digest


def test_a_changed_bucket_is_refused() -> None:
    """Also one in the place of another, and one of another version."""
    packed = memory().pack(some_weights(), 200)
    memory().verify(packed.key, 0, packed.bytes_of[0], packed.codes[0])
    packed.bytes_of[1][7] ^= 1
    for key, number, code in ((packed.key, 1, 1), (packed.key, 1, 0), (bytes(32), 0, 0), (packed.key, 0, 2)):
        with pytest.raises(ValueError, match=f"bucket {number} arrived with other bytes"):
            memory().verify(key, number, packed.bytes_of[number], packed.codes[code])


# --- handles ---------------------------------------------------------------------------------------------------------

OPEN = """
import json, sys
from importlib import import_module
sys.path.insert(0, sys.argv[1])
blocks = import_module("grpo_actors_handles")
flat = blocks.opened(json.loads(sys.argv[2]))
tensors = blocks.tensors_in(flat, json.loads(sys.argv[3]))
print(json.dumps({name: [str(t.dtype), t.float().flatten().tolist()] for name, t in tensors.items()}))
flat.zero_()
"""


def test_another_process_reads_the_tensors_of_a_block_and_can_not_change_them() -> None:
    """As an inference server does: with our folder on its path, and nothing else of ours."""
    weights = some_weights()
    packed = memory().pack(weights, 200)
    shared = memory().share(packed.header, packed.bytes_of)()
    folder = str(Path(handles.__file__).parent)
    words = [sys.executable, "-I", "-c", OPEN, folder, json.dumps(shared["handle"]), json.dumps(shared["tensors"])]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert found == {
        name: [str(tensor.dtype), tensor.float().flatten().tolist()] for name, tensor in weights.tensors.items()
    }
    memory().verify(packed.key, 1, packed.bytes_of[1], packed.codes[1])


def test_a_block_vanishes_with_its_process() -> None:
    """Nothing is left in a folder by kill -9, and the handle leads nowhere."""
    code = (
        "import json, torch, os, time; from bus.weights.device_memory import Block; "
        "block = Block([100], torch.device('cpu')); print(json.dumps(block.handle()), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        handle = json.loads(maker.stdout.readline())
        flat = handles.opened(handle)
        maker.kill()
        maker.wait()
    assert not flat.any()  # what is mapped stays
    with pytest.raises(OSError, match=str(handle["file"])):
        handles.opened(handle)


def test_a_block_of_no_use_any_more_is_closed() -> None:
    """Versions come and go for weeks: no descriptor is left."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        packed = memory().pack(some_weights(), 200)
        packed.bytes_of[0].sum()
    del packed
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        ({"file": "/etc/passwd", "num_bytes": 10}, "is no block of memory"),
        ({"file": "/proc/1/fd/../../../etc/passwd", "num_bytes": 10}, "is no block of memory"),
        ({"gpu": "GPU-1", "num_bytes": 10}, "does not see GPU GPU-1; it sees none"),
    ],
    ids=str,
)
def test_a_handle_that_leads_elsewhere_is_refused(handle: Any, words: str) -> None:
    """The store through which a handle comes is not authenticated."""
    with pytest.raises(ValueError, match=words):
        handles.opened(handle)


def test_a_handle_longer_than_its_block_is_refused() -> None:
    """Memory behind the end of a file would kill the process that reads it."""
    block = Block([100], torch.device("cpu"))
    with pytest.raises(ValueError, match="is shorter than the 5000 bytes"):
        handles.opened(block.handle() | {"num_bytes": 5000})


def test_a_handle_of_gpu_memory_passes_json_and_opens_the_gpu_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA: the trainer calls its GPU 0, the engine's process calls the same one 1."""
    asked: list[Any] = []
    shared = (0, b"\x01\xffmemory", 4096, 512, b"counter", 3, b"event", True)

    class Storage:
        def _share_cuda_(self) -> Any:
            return shared

    class Flat:
        device = torch.device("cuda:0")

        def untyped_storage(self) -> Storage:
            return Storage()

        def numel(self) -> int:
            return 100

        def storage_offset(self) -> int:
            return 16

    def new_shared(*arguments: Any) -> torch.UntypedStorage:
        asked.append(arguments)
        return torch.arange(200, dtype=torch.uint8).untyped_storage()

    names = {"cuda:0": "GPU-a", "0": "GPU-b", "1": "GPU-a"}
    real_empty = torch.empty
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: type("P", (), {"uuid": names.get(d, names.get(str(d)))})
    )
    monkeypatch.setattr(handles, "beside", lambda device: nullcontext())
    handle = json.loads(json.dumps(handles.gpu_handle(Flat())))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(new_shared))
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: real_empty(*size, dtype=dtype))
    assert handles.opened(handle).tolist() == list(range(16, 116))
    assert asked == [(1, *shared[1:])]

    def refused(*_: Any) -> None:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(refused))
    with pytest.raises(OSError, match="memory of GPU GPU-a can't be mapped: pidfd_getfd"):
        handles.opened(handle)


def test_a_block_on_a_gpu_is_copied_before_anybody_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU works behind the program: the stream of the copy is waited for."""
    done: list[str] = []

    class Flat:
        is_cuda, device = True, torch.device("cuda", 0)

        def numel(self) -> int:
            return 5

        def copy_(self, other: torch.Tensor) -> None:
            done.append("copied")

    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr("bus.weights.device_memory.beside", lambda device: nullcontext(stream))
    monkeypatch.setattr("bus.weights.device_memory.opened", lambda handle: torch.zeros(5))
    block = Block([5], torch.device("cpu"))
    block._flat = Flat()
    block.overwrite({})
    assert done == ["copied", "waited"]


def test_work_beside_other_work_has_a_stream_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own context yields nothing."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(made.append(stream)))
    with handles.beside("cuda:1") as stream:
        assert made == [stream] == ["cuda:1"]


def test_a_block_on_a_gpu_lies_in_memory_that_others_may_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that grow are mapped only with rights of a debugger; the run's own setting is back afterwards."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    for settings in ("", "expandable_segments:False"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        with plain_segments():
            assert said == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with plain_segments():
        assert said == ["max_split_size_mb:64,expandable_segments:False"]
    assert said[1:] == ["max_split_size_mb:64,expandable_segments:True"]


def test_the_weights_of_a_trainer_that_is_gone_are_nobodys_fault() -> None:
    """Killed between its word and the engine's look: the update is given up, and the next one may map again."""
    block = Block([100], torch.device("cpu"))
    gone = json.dumps(block.handle() | {"file": "/proc/4194304/fd/3"}).encode()
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=3.0, memory=memory())
    manifest = publisher.publish(POLICY, some_weights())
    code = blake3(gone, key=bytes.fromhex(manifest.key)).hexdigest().encode()
    publisher._memory.lend = lambda flats, key: code + gone  # type: ignore[method-assign]
    receiver = RendezvousReceiver("A", HOST, 3.0, memory())
    thread, results = in_thread(lambda: receiver.receive(manifest, an_update({"A": 0}), never))
    with pytest.raises(UpdateAbandonedError):
        publisher.send(an_update({"A": 0}), never)
    thread.join(30.0)
    publisher.close()
    assert isinstance(results[0], UpdateAbandonedError)
    assert "the trainer has taken its weights back" in str(results[0])
    assert receiver.place == manifest.place


# --- updates ---------------------------------------------------------------------------------------------------------


def an_update(members: dict[str, int], name: str = "1") -> WeightUpdate:
    """An update of these members, with their numbers of ranks."""
    listed = [WeightMember(boot_id=boot_id, num_ranks=ranks) for boot_id, ranks in members.items()]
    return WeightUpdate(update=name, process_group=name.partition("-")[0], policy=POLICY, members=listed)


@pytest.mark.parametrize("members", [{"A": 0}, {"A": 1}, {"A": 0, "B": 1, "C": 0, "D": 1}, {"A": 0, "B": 0}], ids=str)
def test_engines_beside_the_trainer_and_elsewhere_get_the_same_bits(members: dict[str, int]) -> None:
    """Gloo in NCCL's place; three versions, in the same memory."""
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=30.0, memory=memory())
    receivers = {boot_id: RendezvousReceiver(boot_id, HOST, 30.0, memory()) for boot_id in members}
    for version in range(3):
        weights = some_weights(version)
        policy = POLICY.model_copy(update={"version": version})
        manifest = publisher.publish(policy, weights)
        assert (manifest.channel, manifest.place) == ("device", memory().place)
        update = an_update(members, f"1-{version}").model_copy(update={"policy": policy})
        arriving = [in_thread(partial(receiver.receive, manifest, update, never)) for receiver in receivers.values()]
        publisher.send(update, never)
        for thread, results in arriving:
            thread.join(30.0)
            [received] = results
            assert isinstance(received, Weights), received
            assert received.files == weights.files
            assert all(torch.equal(received.tensors[name], tensor) for name, tensor in weights.tensors.items())
            assert received.share is not None
            shared = received.share()
            again = handles.tensors_in(handles.opened(shared["handle"]), shared["tensors"])
            assert all(torch.equal(again[name], tensor) for name, tensor in weights.tensors.items())
        publisher.prune(version)
        assert publisher.num_keys[1] <= 4 + 12 * len(members)  # handles are gone, gloo's own keys stay
    publisher.close()


def test_training_goes_on_in_weights_that_were_published() -> None:
    """The learner lends its tensors for the call alone."""
    weights = some_weights()
    packed = memory().pack(weights, 1000)
    weights.tensors["d.bias"].add_(1)
    last = len(packed.codes) - 1
    memory().verify(packed.key, last, packed.bytes_of[last], packed.codes[last])


def receive_alone(change: Callable[[Manifest], Manifest], lent: Callable[[bytes], bytes] = lambda lent: lent) -> Any:
    """An engine beside the trainer, whose manifest or handle somebody has changed."""
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=3.0, memory=memory())
    manifest = change(publisher.publish(POLICY, some_weights()))
    honest = publisher._memory.lend
    publisher._memory.lend = lambda flats, key: lent(honest(flats, key))  # type: ignore[method-assign]
    update = an_update({"A": 0})
    receiver = RendezvousReceiver("A", HOST, 3.0, memory())
    thread, results = in_thread(lambda: receiver.receive(manifest, update, never))
    with pytest.raises(UpdateAbandonedError):
        publisher.send(update, never)
    thread.join(30.0)
    publisher.close()
    return results[0]


def test_a_handle_that_is_not_the_trainers_is_not_opened() -> None:
    """Whoever reaches the store can write there, and does not know the key of the version."""
    forged = b"0" * 64 + json.dumps({"file": "/proc/1/fd/1", "num_bytes": 1}).encode()
    assert "is not the trainer's" in str(receive_alone(lambda manifest: manifest, lambda lent: forged))


def test_an_engine_that_may_not_map_the_trainers_memory_asks_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as another user: the first update fails in words, and the next one comes over the wire."""

    def refused(handle: Any) -> None:
        raise PermissionError(13, "Permission denied", handle["file"])

    monkeypatch.setattr("bus.weights.device_memory.opened", refused)
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=3.0, memory=memory())
    manifest = publisher.publish(POLICY, some_weights())
    receiver = RendezvousReceiver("A", HOST, 3.0, memory())
    assert receiver.place == manifest.place
    thread, results = in_thread(lambda: receiver.receive(manifest, an_update({"A": 0}), never))
    with pytest.raises(UpdateAbandonedError):
        publisher.send(an_update({"A": 0}), never)
    thread.join(30.0)
    assert "can't be mapped ([Errno 13] Permission denied" in str(results[0])
    assert receiver.place == ""
    update = an_update({"A": 1}, "2")
    thread, results = in_thread(lambda: receiver.receive(manifest, update, never))
    publisher.send(update, never)
    thread.join(30.0)
    publisher.close()
    assert isinstance(results[0], Weights)


def test_a_trainer_on_another_kind_of_device_is_named() -> None:
    """No copy leads from a GPU's memory into that of an engine on a CPU."""
    error = receive_alone(lambda manifest: manifest.model_copy(update={"place": "cuda:kernel/GPU-1"}))
    assert "the trainer's weights are on cuda, the engine is on cpu; set weights.channel: rendezvous" in str(error)


def test_a_trainer_that_lends_nothing_is_given_up_in_words() -> None:
    """It died between the name of the update and its handles."""
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=2.0, memory=memory())
    manifest, update = publisher.publish(POLICY, some_weights()), an_update({"A": 0})
    receiver = RendezvousReceiver("A", HOST, 2.0, memory())
    thread, results = in_thread(lambda: receiver.receive(manifest, update, never))
    stopped = threading.Event()
    publisher._lend = lambda *_: stopped.wait(20.0)  # type: ignore[method-assign, assignment]
    sending, _ = in_thread(lambda: publisher.send(update, never))
    thread.join(30.0)
    stopped.set()
    sending.join(30.0)
    publisher.close()
    assert isinstance(results[0], UpdateAbandonedError)
    assert "the trainer lent no weights" in str(results[0])


class Nccl:
    """A stand-in for torch's group of NCCL: each broadcast ends when the test says so."""

    calls: list[Any]
    done = threading.Event()

    class Options:
        """Its options."""

        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        handling = os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        self.calls.append((store, rank, size, options._timeout.total_seconds(), handling))

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Note the device."""
        self.calls.append(device)

    def broadcast(self, flat: torch.Tensor, root: int) -> Any:
        """Return work that ends with `done`."""

        def wait(*timeout: Any) -> None:
            assert not timeout, "NCCL aborts a group when this timeout is over"

        return SimpleNamespace(is_completed=self.done.is_set, wait=wait)

    def abort(self) -> None:
        """End all work."""
        self.calls.append("aborted")
        self.done.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stand-in was asked; torchrun has told the watchdog to end the process."""
    monkeypatch.setattr(Nccl, "calls", [], raising=False)
    monkeypatch.setattr(Nccl, "done", threading.Event())
    monkeypatch.setattr("bus.weights.process_groups.beside", lambda device: nullcontext())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return Nccl.calls


def test_a_group_of_gpus_that_is_given_up_is_aborted_and_ends_no_process(nccl: list[Any]) -> None:
    """Members meet when the group is made; a member that never sends costs `weights.timeout`."""
    device = torch.device("cuda", 1)
    group = ProcessGroup("1", lambda: "store", 1, 3, HOST, Wait(never, 30.0), device)
    coming = group.broadcast(torch.zeros(3), Wait(never, 0.2))
    with pytest.raises(UpdateAbandonedError, match=r"a bucket was not transferred within weights\.timeout"):
        coming.wait()
    group.leave()
    wait_for_end_of("weights-left")
    assert nccl == [("store", 1, 3, 60.0, "0"), device, "aborted"]


def test_a_bucket_between_gpus_is_there_when_its_broadcast_has_ended(nccl: list[Any]) -> None:
    """No wait of torch is called that would abort the group."""
    group = ProcessGroup("1", lambda: "store", 1, 2, HOST, Wait(never, 30.0), torch.device("cuda", 0))
    flat = torch.zeros(3)
    coming = group.broadcast(flat, Wait(never, 30.0))
    threading.Timer(0.1, Nccl.done.set).start()
    assert coming.wait() is flat


def test_gpus_without_nccl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch for another vendor's GPUs."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"weights\.channel: device needs NCCL between GPUs"):
        ProcessGroup("1", lambda: "store", 1, 2, HOST, Wait(never, 30.0), torch.device("cuda", 0))


def wait_for_end_of(name: str) -> None:
    """Wait until no thread has this name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30.0)
