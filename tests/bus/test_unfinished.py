"""Messages that never end: their connections are shut and counted, memory stays flat, and others are heard."""

import contextlib
import os
import socket as sockets
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus import threads, unfinished
from bus.control import ControlServer
from bus.data import Inbox
from bus.growth import Growth
from schemas import limits
from schemas.config import RunConfig
from schemas.messages import Heartbeat
from tests.bus.conftest import MakeConfig
from tests.bus.test_data import _group, _inbox, _outbox, _take
from tests.bus.test_security import _greeting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells bytes per connection"),
]
WAIT = 60.0
ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes sockets at the end."""
    with ExitStack() as stack:
        yield stack


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Turns:
    """Turns of the watch and of the socket's reader, so that a peer sends no more than so many bytes in each.

    A thread that is held up for seconds, on a busy machine, then has not more to shut than one that is not.
    """

    def __init__(self) -> None:
        self._of_watch = self._of_reader = 0
        threads.on_mark = self._mark

    def close(self) -> None:
        """Count no more."""
        threads.on_mark = None

    def read(self) -> None:
        """Note a turn of the reader."""
        self._of_reader += 1

    def next(self, closed: Callable[[], bool]) -> None:
        """Wait until both have had a whole turn, or the connection is closed."""
        watch, reader = self._of_watch + 2, self._of_reader + 2
        while not closed() and (self._of_watch < watch or self._of_reader < reader):
            time.sleep(0.001)

    def _mark(self, place: str) -> None:
        self._of_watch += place == "unfinished"
        self._of_reader += place == "control.server"


@pytest.fixture
def turns() -> Iterator[Turns]:
    """Turns of this test."""
    made = Turns()
    yield made
    made.close()


class Endless:
    """A peer that speaks ZMTP by hand: frames of one message, each with another to follow, until it is cut off.

    With `turns` it sends so many bytes in a turn.
    """

    def __init__(
        self,
        address: str,
        kind: bytes,
        frame: bytes,
        *,
        at_most: int,
        turns: Turns | None = None,
        in_a_turn: int = 32 * MIB,
    ) -> None:
        self._turns, self._in_a_turn, self._closed = turns, in_a_turn, False
        host, port = address.removeprefix("tcp://").split(":")
        self._socket = sockets.create_connection((host, int(port)), timeout=WAIT)
        self._socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        got = b""
        while len(got) < 64:
            got += self._socket.recv(64 - len(got))
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self._socket.sendall(b"\x04" + bytes([len(ready)]) + ready)
        self._frame, self._at_most, self.sent = frame, at_most, 0
        self.cut_off = False
        self._thread = threading.Thread(target=self._send, daemon=True)

    def start(self) -> "Endless":
        """Begin to send."""
        self._thread.start()
        return self

    def say(self, data: bytes) -> None:
        """Send these bytes."""
        self._socket.sendall(data)

    def close(self) -> None:
        """Leave."""
        self._closed = True
        with contextlib.suppress(OSError):  # wakes the thread, which `close` alone does not
            self._socket.shutdown(sockets.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():
            self._thread.join(WAIT)

    def _send(self) -> None:
        chunk = self._frame * max(1, 65536 // len(self._frame))
        with contextlib.suppress(OSError):
            while self.sent < self._at_most:
                self._socket.sendall(chunk)
                self.sent += len(chunk)
                if self._turns and self.sent % self._in_a_turn < len(chunk):
                    self._turns.next(lambda: self._closed)
            self._socket.settimeout(WAIT)
            while self._socket.recv(1 << 20):
                time.sleep(0.01)
        self.cut_off = True


def large(size: int) -> bytes:
    """A frame of this many bytes, with another to follow."""
    return b"\x03" + struct.pack(">Q", size) + bytes(size)


TINY = b"\x01\x00"


def _until(condition: Callable[[], object], read: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        read()


@pytest.fixture
def config(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on loopback without keys, with bounds that a test reaches in no time."""
    monkeypatch.setattr(limits, "DATA_UNFINISHED_BYTES", 40 * MIB)
    return make_config("tcp")


def test_message_without_end_ends_its_connection_and_others_are_heard(
    config: RunConfig, closing: ExitStack, turns: Turns
) -> None:
    """400 MiB of frames of 1 MiB: cut off soon after the bound of 40, counted, named; memory is given back."""
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    assert outbox.try_send(_group(1))
    assert _take(inbox, 1) == [1]
    before = _resident()
    peer = Endless(inbox.address, b"PUSH", large(MIB), at_most=400 * MIB, turns=turns).start()
    closing.callback(peer.close)
    most = 0

    def read() -> None:
        nonlocal most
        turns.read()
        assert inbox.receive(0.01) is None
        most = max(most, _resident() - before)

    with capture_logs() as logs:
        _until(lambda: inbox.counts.dropped["unfinished"], read)
    _until(lambda: peer.cut_off, read)
    assert peer.sent < 300 * MIB
    assert most < 200 * MIB
    (line,) = [line for line in logs if line.get("reason") == "unfinished"]
    assert line["peer"].startswith("127.0.0.1:")
    _until(lambda: _resident() - before < 40 * MIB, read)
    assert outbox.try_send(_group(2))
    assert _take(inbox, 1) == [2]
    assert inbox.counts.dropped["unfinished"] == 1


def test_frames_of_no_bytes_are_stopped_long_before_the_bound_in_bytes(
    make_config: MakeConfig, closing: ExitStack, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 64 bytes for 2 on the wire: the growth of the process tells, at the bounds of a real run."""
    monkeypatch.setattr(limits, "UNFINISHED_GROWTH_BYTES", 32 * MIB)
    inbox = _inbox(closing, make_config("tcp"))
    before = _resident()
    peer = Endless(inbox.address, b"PUSH", TINY, at_most=60 * MIB, turns=turns, in_a_turn=4 * MIB).start()
    closing.callback(peer.close)
    _until(lambda: inbox.counts.dropped["unfinished"], lambda: turns.read() or inbox.receive(0.01))
    assert peer.sent < 40 * MIB
    _until(lambda: peer.cut_off, lambda: turns.read() or inbox.receive(0.01))
    assert _resident() - before < 1500 * MIB


def test_without_counters_of_threads_the_growth_of_the_process_tells(
    make_config: MakeConfig, closing: ExitStack, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that does not count new pages per thread: frames of no bytes are stopped all the same."""
    monkeypatch.setattr(limits, "UNFINISHED_GROWTH_BYTES", 32 * MIB)
    monkeypatch.setattr(Growth, "faulted", lambda self: None)
    inbox = _inbox(closing, make_config("tcp"))
    peer = Endless(inbox.address, b"PUSH", TINY, at_most=60 * MIB, turns=turns, in_a_turn=4 * MIB).start()
    closing.callback(peer.close)
    _until(lambda: inbox.counts.dropped["unfinished"], lambda: turns.read() or inbox.receive(0.01))
    assert peer.sent < 40 * MIB


class Relay:
    """Passes what one outbox sends on to an address, so many bytes in each turn of the reader, as a network does."""

    def __init__(self, address: str, bytes_in_a_turn: int) -> None:
        self._to, self._most = address.removeprefix("tcp://").split(":"), bytes_in_a_turn
        self.turns = 0
        """Turns of the reader so far."""
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                here, _ = self._listener.accept()
                there = sockets.create_connection((self._to[0], int(self._to[1])))
                threading.Thread(target=self._pass, args=(there, here), daemon=True).start()
                threading.Thread(target=self._pass, args=(here, there), daemon=True).start()

    def _pass(self, source: sockets.socket, target: sockets.socket) -> None:
        passed, turn = 0, self.turns
        with source, target, contextlib.suppress(OSError):
            while not self._closed.is_set() and (data := source.recv(64 << 10)):
                target.sendall(data)
                passed += len(data)
                while passed >= self._most and not self._closed.is_set():
                    if self.turns > turn:
                        passed, turn = 0, self.turns
                    else:
                        time.sleep(0.001)
            source.shutdown(sockets.SHUT_RDWR)
            target.shutdown(sockets.SHUT_RDWR)


def test_honest_peers_are_heard_while_the_receiver_grows(
    make_config: MakeConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function loads its judge while large groups come over a network: no connection is ended for that."""
    monkeypatch.setattr(limits, "UNFINISHED_GROWTH_BYTES", 8 * MIB)
    config = make_config("tcp")
    inbox = _inbox(closing, config)
    relays = [Relay(inbox.address, MIB // 2) for _ in range(2)]
    outboxes = []
    for relay in relays:
        closing.callback(relay.close)
        outboxes.append(_outbox(closing, config, relay.address))
    for number, outbox in enumerate(outboxes):
        for ordinal in (2 * number, 2 * number + 1):
            _until(lambda b=outbox, o=ordinal: b.try_send(_group(o, 2 * MIB)), lambda: time.sleep(0.01))
    model: list[bytes] = []
    received: list[int] = []

    def grow() -> None:
        if len(model) < 60:
            model.append(b"\x01" * (12 * MIB))
        _next(inbox, received)
        for relay in relays:
            relay.turns += 1
        time.sleep(0.02)

    _until(lambda: len(received) == 4 or inbox.counts.dropped["unfinished"], grow)
    assert inbox.counts.dropped["unfinished"] == 0
    assert sorted(received) == [0, 1, 2, 3]
    assert len(model) > 20


def test_where_all_together_are_too_many_only_the_slowest_goes(
    make_config: MakeConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three messages of 12 MiB and room for 30: the one that stands still ends, and those under way go on."""
    monkeypatch.setattr(limits, "DATA_UNFINISHED_TOTAL_BYTES", 30 * MIB)
    inbox = _inbox(closing, make_config("tcp"))
    stalled = Endless(inbox.address, b"PUSH", large(MIB), at_most=12 * MIB).start()
    closing.callback(stalled.close)
    _until(lambda: inbox._gate.unfinished >= 12 * MIB, lambda: inbox.receive(0.01))
    for connection in inbox._gate._connections.values():
        connection.began -= 3600.0  # it stands still for an hour: slower than others that are held up for seconds
    others = [Endless(inbox.address, b"PUSH", large(MIB), at_most=12 * MIB).start() for _ in range(2)]
    for other in others:
        closing.callback(other.close)
    _until(lambda: stalled.cut_off, lambda: inbox.receive(0.01))
    deadline = time.monotonic() + 2 * unfinished.SWEEP_SECONDS
    while time.monotonic() < deadline:
        inbox.receive(0.05)
    assert inbox.counts.dropped["unfinished"] == 1
    assert not any(other.cut_off for other in others)


def test_large_and_many_messages_of_honest_peers_are_not_touched(config: RunConfig, closing: ExitStack) -> None:
    """Ten times the bound over one connection, in messages that end, each up to the bound: all arrive."""
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    num_tokens = 3 * MIB  # 27 MiB a message
    received: list[int] = []
    for ordinal in range(15):
        _until(lambda o=ordinal: outbox.try_send(_group(o, num_tokens)), lambda: _next(inbox, received))
    _until(lambda: len(received) == 15, lambda: _next(inbox, received))
    assert received == list(range(15))
    assert inbox.counts.dropped["unfinished"] == 0


def _next(inbox: Inbox, received: list[int]) -> None:
    message = inbox.receive(0.01)
    if message is not None:
        received.append(message.ordinal)  # type: ignore[attr-defined]


def test_reader_that_is_away_ends_no_honest_connection(config: RunConfig, closing: ExitStack) -> None:
    """What waits in the socket is whole: nobody knows until it is read, so nobody is shut meanwhile."""
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    sent = 0
    while sent < 4 and outbox.try_send(_group(sent, 2 * MIB)):
        sent += 1
    time.sleep(2.5 * unfinished.SWEEP_SECONDS)
    assert _take(inbox, sent) == list(range(sent))
    assert inbox.counts.dropped["unfinished"] == 0


def test_a_flood_of_whole_messages_does_not_hide_one_without_end(
    config: RunConfig, closing: ExitStack, turns: Turns
) -> None:
    """The socket is never empty, and the connection is found all the same: sockets serve their connections in turn."""
    inbox = _inbox(closing, config)
    stop = threading.Event()
    outbox = _outbox(closing, config, inbox.address)

    def flood() -> None:
        while not stop.is_set():
            outbox.try_send(_group(1))

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    closing.callback(flooding.join, WAIT)
    closing.callback(stop.set)
    peer = Endless(inbox.address, b"PUSH", large(MIB), at_most=400 * MIB, turns=turns).start()
    closing.callback(peer.close)
    _until(lambda: inbox.counts.dropped["unfinished"], lambda: turns.read() or inbox.receive(0.01))
    assert peer.sent < 350 * MIB


def test_control_plane_ends_a_beat_without_end_and_hears_the_others(
    make_config: MakeConfig, closing: ExitStack, turns: Turns
) -> None:
    """2 MiB of an unfinished heartbeat are the most; a peer that sends heartbeats goes on."""
    config, before = make_config("tcp"), _resident()
    heartbeats: list[Heartbeat] = []
    server = ControlServer(config.bus.control, lambda identity, heartbeat: heartbeats.append(heartbeat), bus=config.bus)
    closing.callback(server.close)
    server.start()
    peer = Endless(server.endpoint, b"DEALER", large(64 << 10), at_most=2048 * MIB, turns=turns).start()
    closing.callback(peer.close)
    _until(lambda: server.counts.dropped["unfinished"], lambda: time.sleep(0.01))
    _until(lambda: peer.cut_off, lambda: time.sleep(0.01))
    assert server.counts.dropped["unfinished"] == 1
    assert peer.sent < 1024 * MIB
    assert _resident() - before < 600 * MIB


def test_the_same_holds_with_keys_before_any_is_shown(
    make_config: MakeConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's HELLO that grows beyond what a peer may have unfinished is cut off before it is whole."""
    monkeypatch.setattr(limits, "DATA_UNFINISHED_BYTES", 2 * MIB)
    monkeypatch.setattr(unfinished, "SWEEP_SECONDS", 0.1)
    inbox = _inbox(closing, make_config("tcp+curve"))
    stranger = _greeting(inbox.address.partition("#")[0], closing)
    stranger.sendall(b"\x06" + struct.pack(">Q", 60 * MIB) + bytes(6 * MIB))
    _until(lambda: inbox.counts.dropped["unfinished"], lambda: inbox.receive(0.01))


def test_closed_sockets_are_watched_no_more(make_config: MakeConfig) -> None:
    """Inboxes that came and went leave nothing behind."""
    config = make_config("tcp")
    before = -1
    for number in range(21):
        with ExitStack() as stack:
            inbox = _inbox(stack, config, f"boot-{number}")
            outbox = _outbox(stack, config, inbox.address)
            assert outbox.try_send(_group(number))
            assert _take(inbox, 1) == [number]
        if number == 0:
            time.sleep(2 * unfinished.SWEEP_SECONDS)
            before = unfinished.num_watched()
    _until(lambda: unfinished.num_watched() <= before, lambda: time.sleep(0.01))


def test_process_without_descriptors_says_so_and_counts_whom_it_does_not_take() -> None:
    """A hundred connections where forty descriptors are left: one line in words, and peers that are in stay."""
    program = """
import resource, socket, time
from bus.data import Inbox
from bus.topology import Addresses
from pathlib import Path
from tests.ring.harness import ring_config
config = ring_config(Path("/nowhere"), bus={"control": "tcp://127.0.0.1:1"})
inbox = Inbox("scored", Addresses(config), config.bus, "packer", "b")
used = max(int(name.name) for name in Path("/proc/self/fd").iterdir())
host, port = inbox.address.removeprefix("tcp://").split(":")
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 150, used + 150))
mine = []
try:
    while True:
        mine.append(socket.create_connection((host, int(port))))
except OSError:
    pass
deadline = time.monotonic() + 60
while not inbox.counts.refused["not_accepted"] and time.monotonic() < deadline:
    # the socket may have accepted all of them with the last descriptors: then one more has to come
    try:
        mine.append(socket.create_connection((host, int(port))))
    except OSError:
        mine.pop().close()
    inbox.receive(0.05)
print("refused", inbox.counts.refused["not_accepted"] > 0)
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "refused True" in answer.stdout, answer.stdout + answer.stderr
    assert "connections can't be accepted" in answer.stdout + answer.stderr
    assert "no descriptors left" in answer.stdout + answer.stderr


def test_a_process_without_descriptors_still_ends_messages_without_end() -> None:
    """The peer takes the last descriptor: its connection is known and shut all the same."""
    program = """
import os, resource, time
from pathlib import Path
from bus.data import Inbox
from bus.topology import Addresses
from schemas import limits
from tests.bus.test_unfinished import MIB, Endless, large
from tests.ring.harness import ring_config
limits.DATA_UNFINISHED_BYTES = 40 * MIB
config = ring_config(Path("/nowhere"), bus={"control": "tcp://127.0.0.1:1"})
inbox = Inbox("scored", Addresses(config), config.bus, "packer", "b")
time.sleep(0.5)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
spare = []
try:
    while True:
        spare.append(os.dup(0))
except OSError:
    os.close(spare.pop()), os.close(spare.pop())
peer = Endless(inbox.address, b"PUSH", large(MIB), at_most=300 * MIB)
try:
    os.dup(0)
    print("a descriptor was left")
except OSError:
    print("no descriptor left")
peer.start()
deadline = time.monotonic() + 60
while not peer.cut_off and peer.sent < 300 * MIB and time.monotonic() < deadline:
    inbox.receive(0.05)
print("shut", inbox.counts.dropped["unfinished"], "sent", peer.sent // MIB, flush=True)
os._exit(0)
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "no descriptor left" in answer.stdout, answer.stdout + answer.stderr
    assert "shut 1" in answer.stdout, answer.stdout + answer.stderr
