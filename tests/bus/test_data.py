"""Inbox and Outbox on every transport: what is accepted arrives, what is bad is named, nobody waits for ever."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from bus import keys
from bus.data import Inbox, Outbox
from bus.topology import Addresses
from schemas import limits
from schemas.config import RunConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import RolloutGroup
from tests.bus.conftest import MakeConfig, connect
from tests.marks import first_of
from tests.ports import free_port
from tests.schemas.messages.examples import GROUP_FIELDS, example_frames

ROOT = Path(__file__).parents[2]
WAIT = 60.0
AT_ONCE = 30.0
"""Beside waiting for ever; machines stand still for seconds."""


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes sockets at the end."""
    with ExitStack() as stack:
        yield stack


class FixedPort(Addresses):
    """An inbox that comes later at an address which is known before."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._fixed = f"tcp://127.0.0.1:{free_port()}" if self.transport == "tcp" else self._local("later")

    def to_bind(self, actor: str, boot_id: str) -> str:
        """Where both meet."""
        return self._fixed


def _inbox(stack: ExitStack, config: RunConfig, boot_id: str = "b0", addresses: Addresses | None = None) -> Inbox:
    inbox = Inbox("groups", addresses or Addresses(config), config.bus, "reward-0", boot_id)
    stack.callback(inbox.close)
    return inbox


def _outbox(
    stack: ExitStack, config: RunConfig, address: str, sender: str = "rollout-0", connected: bool = True
) -> Outbox:
    """One that is connected, unless told otherwise: before that it takes nothing."""
    outbox = Outbox("groups", address, config.bus, sender)
    stack.callback(outbox.close)
    if connected:
        _until(lambda: outbox.has_room)
    return outbox


def _raw(stack: ExitStack, inbox: Inbox, config: RunConfig) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    connect(socket, inbox.address, config.bus)
    stack.callback(socket.close, 0)
    return socket


def _group(ordinal: int, num_tokens: int = 5) -> RolloutGroup:
    return RolloutGroup(
        **GROUP_FIELDS
        | {
            "ordinal": ordinal,
            "sample_offsets": np.array([0, 3, num_tokens]),
            "token_ids": np.full(num_tokens, ordinal, np.int32),
            "loss_mask": np.ones(num_tokens, np.uint8),
            "logprobs": np.zeros(num_tokens, np.float32),
        }
    )


def _take(inbox: Inbox, count: int) -> list[int]:
    """Ordinals of the next messages; each is whole."""
    ordinals = []
    for _ in range(count):
        message = inbox.receive(WAIT)
        assert isinstance(message, RolloutGroup)
        assert set(message.token_ids.tolist()) == {message.ordinal}
        ordinals.append(message.ordinal)
    return ordinals


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_messages_arrive_whole_and_are_counted(transport: str, make_config: MakeConfig, closing: ExitStack) -> None:
    """All messages of a sender arrive in order; both ends count the same messages and bytes."""
    config = make_config(transport)
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    for ordinal in range(20):
        assert outbox.try_send(_group(ordinal, 5 + 5000 * (ordinal % 3)))
    assert _take(inbox, 20) == list(range(20))
    assert inbox.receive(0.0) is None
    assert inbox.counts.num_messages == outbox.counts.num_messages == 20
    assert inbox.counts.num_bytes == outbox.counts.num_bytes > 4 * 5000 * 13


def test_receive_returns_after_its_timeout(transport: str, make_config: MakeConfig, closing: ExitStack) -> None:
    """With nothing to receive, 0 seconds is at once and 0.05 seconds is 0.05 seconds."""
    inbox = _inbox(closing, make_config(transport))
    started = time.monotonic()
    assert inbox.receive(0.0) is None
    assert inbox.receive(0.05) is None
    assert 0.05 <= time.monotonic() - started < AT_ONCE


def test_slow_consumer_makes_the_sender_stop_and_loses_nothing(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """With HWM 1 and small kernel buffers try_send soon says False at once; after the reader resumes all arrive."""
    config = make_config(transport, high_water_mark=1, socket_buffer_bytes=4096)
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    accepted = 0
    full_since = 0.0
    while not full_since or time.monotonic() - full_since < 0.1:  # what is on its way makes room for a moment
        started = time.monotonic()
        if outbox.try_send(_group(accepted, 10_000)):
            accepted, full_since = accepted + 1, 0.0
        else:
            full_since = full_since or started
        assert time.monotonic() - started < AT_ONCE
        assert accepted < 50, "HWM 1 holds nothing back"
    received: list[int] = []
    deadline = time.monotonic() + WAIT
    while len(received) < accepted + 30:
        if outbox.counts.num_messages < accepted + 30:
            outbox.try_send(_group(outbox.counts.num_messages, 10_000))
        message = inbox.receive(0.01)
        if isinstance(message, RolloutGroup):
            received.append(message.ordinal)
        assert time.monotonic() < deadline
    assert received == list(range(accepted + 30))


def _stalled(keys_folder: str, seconds: float, *words: str) -> tuple[int, int]:
    """Messages sent before a receiver stood still, and those that it received afterwards (`tests.bus.stalled`)."""
    command = [sys.executable, "-m", "tests.bus.stalled", keys_folder, str(seconds), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    num, received = map(int, done.stdout.split())
    return num, received


@pytest.mark.slow
@pytest.mark.parametrize("has_keys", first_of([True, False]))
def test_a_sender_killed_while_its_receiver_stands_still_does_no_harm(tmp_path: Path, has_keys: bool) -> None:
    """Longer than the five seconds between two heartbeats of ZMTP, whose timer would end the receiver's process."""
    if has_keys:
        keys.make(tmp_path / "keys")
    num, received = _stalled(str(tmp_path / "keys") if has_keys else "", 8.0, "kill")
    assert 0 < received <= num


@pytest.mark.long
@pytest.mark.parametrize("seconds", [3.0, 20.0, 40.0])
def test_a_receiver_that_stands_still_loses_nothing(seconds: float) -> None:
    """Its connection stays, though it answers nothing: with heartbeats of ZMTP it was closed after 15 s."""
    num, received = _stalled("", seconds)
    assert received == num


@pytest.mark.parametrize("transport", ["tcp", "ipc"])  # with keys the address names one, inproc is never apart
def test_nothing_is_queued_for_a_receiver_that_is_not_connected(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """Before the peer has bound, and after it has gone, a try fails; once it is there again all arrives."""
    config = make_config(transport, high_water_mark=2)
    addresses = FixedPort(config)
    outbox = _outbox(closing, config, addresses.to_bind("", ""), connected=False)
    assert not any(outbox.try_send(_group(ordinal)) for ordinal in range(3))
    first = _inbox(closing, config, addresses=addresses)
    _until(lambda: outbox.try_send(_group(3)))
    assert _take(first, 1) == [3]
    first.close()
    # not by a try: what is accepted until the end is noticed would fill the queue, which looks the same
    _until(lambda: not outbox.has_room)
    assert not any(outbox.try_send(_group(ordinal)) for ordinal in range(4, 8))
    second = _inbox_at_last(closing, config, addresses)
    _until(lambda: outbox.try_send(_group(8)))
    assert _take(second, 1) == [8]
    assert outbox.counts.num_messages == 2, "what was refused does not count as sent"


def _inbox_at_last(stack: ExitStack, config: RunConfig, addresses: Addresses) -> Inbox:
    """ZeroMQ's own thread frees an address some time after `close`."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return _inbox(stack, config, addresses=addresses)
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_sender_that_joins_late_is_heard(transport: str, make_config: MakeConfig, closing: ExitStack) -> None:
    """An inbox takes from senders as they come."""
    config = make_config(transport)
    inbox = _inbox(closing, config)
    for number in range(3):
        assert _outbox(closing, config, inbox.address, f"rollout-{number}").try_send(_group(number))
        assert _take(inbox, 1) == [number]


def test_peer_that_restarts_is_reached_at_its_new_address(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """Another boot binds elsewhere; the outbox of the dead one fills up and never blocks, a new one reaches the new."""
    config = make_config(transport, high_water_mark=1)
    old = _inbox(closing, config, "first-boot")
    to_old = _outbox(closing, config, old.address)
    assert to_old.try_send(_group(0))
    assert _take(old, 1) == [0]
    old.close()
    _until(lambda: not to_old.try_send(_group(1)))
    new = _inbox(closing, config, "second-boot")
    assert new.address != old.address
    assert _outbox(closing, config, new.address).try_send(_group(2))
    assert _take(new, 1) == [2]


def test_bad_frames_are_counted_by_reason_and_named_and_good_ones_follow(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """Each bad message is counted under its reason, one line names the sender, the next good message arrives."""
    config = make_config(transport)
    inbox = _inbox(closing, config)
    good = example_frames("rollout_group")
    stranger = _raw(closing, inbox, config)
    bad = {
        "malformed": [[b"evil\n", b"junk"], [b"evil\n"]],
        "unknown_kind": [[b"evil\n", msgpack.packb(["gossip", 1, {}])]],
        "unknown_version": [[b"evil\n", msgpack.packb(["rollout_group", 77, {}])]],
        "bad_array": [[b"evil\n", *good[:-1]]],
        "bad_header": [[b"evil\n", msgpack.packb(["observer_heartbeat", 2, {"%": ["", []]}])]],
    }
    with capture_logs() as logs:
        for messages in bad.values():
            for frames in messages:
                stranger.send_multipart(frames)
        stranger.send_multipart([b"friend", *good])
        message = inbox.receive(WAIT)
    assert isinstance(message, RolloutGroup)
    assert message.ordinal == 12
    assert inbox.counts.dropped == {reason: len(bad.get(reason, [])) for reason in inbox.counts.dropped}
    assert inbox.counts.num_messages == 1
    assert len(logs) == 1, "one line in five seconds, whatever a stranger sends"
    assert logs[0]["edge"] == "groups"
    assert logs[0]["reason"] == "malformed"
    assert logs[0]["peer"].startswith(r"'evil\n'")
    assert not transport.startswith("tcp") or logs[0]["peer"].endswith(" at 127.0.0.1")


def test_receive_ends_in_time_under_a_flood_of_bad_frames(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """A stranger who sends nothing but junk can't hold the reader beyond its timeout."""
    config = make_config(transport)
    inbox = _inbox(closing, config)
    stranger = _raw(closing, inbox, config)
    for _ in range(50):
        stranger.send_multipart([b"evil", b"junk"])
    assert inbox.receive(0.02) is None
    assert inbox.receive(0.0) is None
    _until(lambda: inbox.receive(0.02) is None and inbox.counts.dropped["malformed"] == 50)


def test_oversize_message_is_refused_and_others_arrive(
    transport: str, make_config: MakeConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp and ipc a frame beyond the limit is cut off before it is read; inproc refuses it when decoding."""
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 100_000)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 100_000)
    config = make_config(transport)
    inbox = _inbox(closing, config)
    stranger = _raw(closing, inbox, config)
    stranger.send_multipart([b"evil", *example_frames("rollout_group")[:-1], bytes(1_000_000)])
    assert inbox.receive(0.1) is None
    assert inbox.counts.dropped["oversize"] == (1 if transport == "inproc" else 0)
    assert _outbox(closing, config, inbox.address).try_send(_group(1))
    assert _take(inbox, 1) == [1]


def test_array_that_no_receiver_would_take_is_refused_at_the_sender(
    make_config: MakeConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be cut off there and sent again for ever; the error says how large it is and what to lower."""
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 100_000)
    outbox = _outbox(closing, make_config("inproc"), "inproc://nobody")
    assert outbox.try_send(_group(0, 25_000))
    with pytest.raises(RunFailedError, match=r"100004 bytes in one array, and 100000 .* packer\.groups_per_step"):
        outbox.try_send(_group(0, 25_001))


def test_closed_inbox_and_outbox_may_be_closed_again(transport: str, make_config: MakeConfig) -> None:
    """Closing twice is closing once, with messages still queued."""
    config = make_config(transport)
    inbox = Inbox("groups", Addresses(config), config.bus, "reward-0", "b0")
    outbox = Outbox("groups", inbox.address, config.bus, "rollout-0")
    outbox.try_send(_group(0))
    started = time.monotonic()
    for closable in (outbox, inbox, outbox, inbox):
        closable.close()
    assert time.monotonic() - started < AT_ONCE


def test_arrays_of_received_messages_can_be_computed_with(
    transport: str, make_config: MakeConfig, closing: ExitStack
) -> None:
    """Views of frames give the right numbers however the transport aligned them, and outlive the inbox."""
    config = make_config(transport)
    inbox = _inbox(closing, config)
    assert _outbox(closing, config, inbox.address).try_send(_group(7))
    message: Any = inbox.receive(WAIT)
    inbox.close()
    assert message.token_ids.sum() == 35
    assert message.lengths_G.tolist() == [3, 2]
    assert not message.token_ids.flags.writeable
