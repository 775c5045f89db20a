"""The control channel on every transport: messages may be lost, late or doubled, and all still agree."""

import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from actors.ledger.peers import Peers
from bus import codec, threads
from bus.control import PUSH_INTERVAL_SECONDS, ControlClient, ControlServer, identity_of
from bus.control.connection import PackerConnection
from bus.counts import EdgeCounts
from bus.encryption import keys_for, secure_server
from bus.sockets import send_frames
from bus.topology import Addresses
from schemas.config.services import BusConfig
from schemas.errors import ConfigError
from schemas.messages import (
    DIRECTIVE_KINDS,
    HEARTBEAT_KINDS,
    Directive,
    Heartbeat,
    Message,
    Neighbours,
    ObserverDirective,
    ObserverHeartbeat,
    RolloutDirective,
    RolloutHeartbeat,
)
from tests.bus.conftest import MakeConfig, Place, connect
from tests.dropping import DroppingTransport
from tests.ports import free_port
from tests.schemas.messages.examples import DIRECTIVE_FIELDS, EXAMPLES, NEIGHBOURS, TABLES, example_frames

WAIT = 60.0
AT_ONCE = 30.0
"""Beside waiting for ever; machines stand still for seconds."""
ME = identity_of("screen", "b0")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes both sides at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def address(transport: str, make_config: MakeConfig) -> Place:
    """The control address of a run on each transport."""
    config = make_config(transport)
    return Place.of(Addresses(config).control, config.bus)


class Packer:
    """A server that remembers what it heard, and when."""

    def __init__(self, stack: ExitStack, address: Place, **options: Any) -> None:
        self.heard: list[tuple[float, bytes, Heartbeat]] = []
        self.server = ControlServer(address, self._hear, bus=address.bus, **options)
        self.server.start()
        stack.callback(self.server.close)

    def _hear(self, identity: bytes, heartbeat: Heartbeat) -> None:
        self.heard.append((time.monotonic(), identity, heartbeat))

    def say(self, step: int, *identities: bytes) -> None:
        """Publish a directive with this step."""
        self.server.publish(dict.fromkeys(identities or (ME,), _directive(step)))


class Actor:
    """A client that remembers the directives it got."""

    def __init__(
        self, stack: ExitStack, address: Place, heartbeat_type: type[Heartbeat] = ObserverHeartbeat, **options: Any
    ) -> None:
        self.directives: list[Directive] = []
        self.client = ControlClient(
            address, heartbeat_type, "screen", "b0", self.directives.append, bus=address.bus, **options
        )
        stack.callback(self.client.close)

    @property
    def step(self) -> int:
        """Of the newest directive."""
        return self.directives[-1].step if self.directives else -1


def _directive(step: int) -> ObserverDirective:
    return ObserverDirective(**DIRECTIVE_FIELDS | {"step": step}, progress={})


def _started(stack: ExitStack, address: Place, **options: Any) -> Actor:
    actor = Actor(stack, address, **options)
    actor.client.report(phase="running")
    actor.client.start()
    return actor


def _dealer(stack: ExitStack, address: Place, identity: bytes = ME) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    connect(socket, address, address.bus)
    stack.callback(socket.close, 0)
    return socket


def _steps(socket: "zmq.Socket[bytes]", quiet: float, at_least: int = 0) -> list[int]:
    """Steps of the directives until it has been quiet for so many seconds; `at_least` so many are waited for."""
    steps: list[int] = []
    while socket.poll(1000 * (WAIT if len(steps) < at_least else quiet)):
        message = codec.decode(socket.recv_multipart())
        assert isinstance(message, Directive)
        steps.append(message.step)
    return steps


def _steps_to(socket: "zmq.Socket[bytes]", last: int) -> list[int]:
    """Steps of the directives up to the first one of step `last`."""
    steps: list[int] = []
    while last not in steps:
        assert socket.poll(1000 * WAIT)
        message = codec.decode(socket.recv_multipart())
        assert isinstance(message, Directive)
        steps.append(message.step)
    return steps


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- heartbeats ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("long_queues")
def test_actor_beats_every_interval(address: Place, closing: ExitStack) -> None:
    """With nothing to report heartbeats come one interval apart, with rising sequence numbers."""
    packer = Packer(closing, address)
    started = time.monotonic()
    _started(closing, address, interval=0.05)
    _until(lambda: len(packer.heard) >= 6)
    heard = list(packer.heard)
    # the first one, urgent, and another while `heard` is read; whoever is held up makes them fewer, never more
    assert len(heard) <= 2 + (time.monotonic() - started) / 0.05
    # the shortest, since any other may be that of a thread that was held up
    assert min(later[0] - earlier[0] for earlier, later in itertools.pairwise(heard)) < 2.0
    heartbeats = [heartbeat for _, _, heartbeat in heard]
    assert [heartbeat.sequence for heartbeat in heartbeats] == list(range(1, len(heartbeats) + 1))
    assert heard[0][1] == ME


def test_urgent_change_is_beaten_at_once_and_any_other_waits(address: Place, closing: ExitStack) -> None:
    """An urgent report does not wait for the interval; one that is not urgent, or changes nothing, does."""
    packer = Packer(closing, address)
    actor = _started(closing, address, interval=60.0)
    _until(lambda: len(packer.heard) == 1)
    actor.client.report(urgent=False, metrics_url="http://later")
    actor.client.report(phase="running")
    time.sleep(0.05)
    assert len(packer.heard) == 1
    actor.client.report(phase="draining")
    _until(lambda: len(packer.heard) == 2)
    assert packer.heard[-1][2].phase == "draining"
    assert packer.heard[-1][2].metrics_url == "http://later"


@pytest.mark.usefixtures("long_queues")
def test_urgent_changes_are_at_most_ten_a_second_after_a_burst(address: Place, closing: ExitStack) -> None:
    """Changes every millisecond for 0.6 s make at most 10 heartbeats at once and 6 more; the last says the last."""
    packer = Packer(closing, address)
    actor = _started(closing, address, interval=60.0)
    started = time.monotonic()
    number = 0
    # on and on, if need be: a client that is held up sends one heartbeat for many changes
    while (elapsed := time.monotonic() - started) < 0.6 or (len(packer.heard) < 10 and elapsed < WAIT):
        number += 1
        actor.client.report(metrics_url=f"http://{number}")
        time.sleep(0.001)
    most = 10 + 10 * (time.monotonic() - started) + 1
    _until(lambda: packer.heard and packer.heard[-1][2].metrics_url == f"http://{number}")
    assert 10 <= len(packer.heard) <= most + 1


def test_beats_carry_the_run_and_no_fingerprint_once_the_packer_has_answered(
    address: Place, closing: ExitStack
) -> None:
    """The first heartbeat says which build this is; after a directive it says the run instead."""
    packer = Packer(closing, address)
    packer.say(1)
    actor = _started(closing, address, interval=0.03)
    _until(lambda: actor.directives)
    # some that were sent before the answer came may still be under way
    _until(lambda: packer.heard and packer.heard[-1][2].run)
    seen = len(packer.heard)
    _until(lambda: len(packer.heard) > seen + 1)
    first, last = packer.heard[0][2], packer.heard[-1][2]
    assert first.fingerprint
    assert first.run == ""
    assert last.fingerprint is None
    assert last.run == "r1"


# --- states ----------------------------------------------------------------------------------------------------------


def test_state_answers_each_beat(address: Place, closing: ExitStack) -> None:
    """Five heartbeats of a peer whose directive does not change are answered five times."""
    packer = Packer(closing, address)
    peer = _dealer(closing, address)
    peer.send_multipart(example_frames("observer_heartbeat"))
    _until(lambda: packer.heard)
    packer.say(3)
    assert _steps_to(peer, 3) == [3]
    for _ in range(5):
        peer.send_multipart(example_frames("observer_heartbeat"))
    _until(lambda: len(packer.heard) == 6)
    packer.say(4)  # after the answers, so that all of them have come when this one has
    assert _steps_to(peer, 4) == [3] * 5 + [4]


def test_changed_state_is_sent_unasked_and_an_unchanged_one_is_not(address: Place, closing: ExitStack) -> None:
    """After one heartbeat a peer hears each change without another one, and equal directives only once."""
    packer = Packer(closing, address)
    peer = _dealer(closing, address)
    peer.send_multipart(example_frames("observer_heartbeat"))
    _until(lambda: packer.heard)
    packer.say(1)
    assert _steps(peer, 0.1, at_least=1) == [1]
    for _ in range(3):
        packer.say(1)
    assert _steps(peer, 0.1) == []
    packer.say(2)
    assert _steps(peer, 0.1, at_least=1) == [2]


def test_changes_are_pushed_at_most_once_per_20_ms_and_the_newest_wins(address: Place, closing: ExitStack) -> None:
    """Of a change every millisecond few are sent, in order, and the last one always is."""
    packer = Packer(closing, address)
    peer = _dealer(closing, address)
    peer.send_multipart(example_frames("observer_heartbeat"))
    _until(lambda: packer.heard)
    started = time.monotonic()
    last = 0
    # on and on, if need be: a server that is held up sends one directive for many changes
    while last < 100 or (not peer.poll(0) and time.monotonic() - started < WAIT):
        packer.say(last)
        last += 1
        time.sleep(0.001)
    packer.say(last)
    most = (time.monotonic() - started) / PUSH_INTERVAL_SECONDS + 2
    steps = _steps_to(peer, last)
    assert steps == sorted(steps)
    assert 2 <= len(steps) <= most


def test_forgotten_and_unknown_peers_get_no_answer_and_do_no_harm(address: Place, closing: ExitStack) -> None:
    """A peer without a directive is heard and not answered; others are; a directive for nobody is dropped."""
    packer = Packer(closing, address)
    packer.say(1, ME, b"never/seen")
    peer, stranger = _dealer(closing, address), _dealer(closing, address, b"stranger/1")
    for socket in (peer, stranger):
        socket.send_multipart(example_frames("observer_heartbeat"))
    assert 1 in _steps(peer, 0.1, at_least=1)
    assert _steps(stranger, 0.05) == []
    packer.server.publish({ME: None})

    def heartbeats_in_vain() -> bool:
        peer.send_multipart(example_frames("observer_heartbeat"))
        return not _steps(peer, 0.05)

    heard = len(packer.heard)
    _until(heartbeats_in_vain)
    _until(lambda: len(packer.heard) > heard)


@pytest.mark.parametrize(("heartbeat_type", "directive_type"), list(zip(HEARTBEAT_KINDS, DIRECTIVE_KINDS, strict=True)))
def test_both_sides_agree_though_half_of_all_messages_are_lost(
    heartbeat_type: type[Heartbeat],
    directive_type: type[Directive],
    address: Place,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every second heartbeat and directive lost, the newest report and the newest directive get through."""
    transport = DroppingTransport(0.5, seed=1)
    transport.replace_sending(monkeypatch)
    packer = Packer(closing, address)
    actor = Actor(closing, address, heartbeat_type, interval=0.02)
    example = dict(EXAMPLES[heartbeat_type.kind])
    fields = {name: example[name] for name in set(heartbeat_type.model_fields) - {"run", "name", "boot_id", "sequence"}}
    del fields["fingerprint"], fields["term"], fields["neighbours"]
    actor.client.report(**fields)
    actor.client.start()
    for step in range(10):
        packer.server.publish({ME: EXAMPLES[directive_type.kind].model_copy(update={"step": step})})
        actor.client.report(metrics_url=f"http://{step}")
        time.sleep(0.005)
    _until(lambda: actor.step == 9 and packer.heard and packer.heard[-1][2].metrics_url == "http://9")
    final = EXAMPLES[directive_type.kind].model_copy(update={"step": 9})
    assert actor.directives[-1].equals(final)
    kinds = {heartbeat_type.kind, directive_type.kind} | ({"neighbours"} if directive_type.apart else set())
    # a table is sent only until one has arrived, so perhaps none is lost
    _until(lambda: kinds == set(transport.sent) and kinds - {"neighbours"} <= set(transport.lost) <= kinds)


@pytest.mark.usefixtures("long_queues")
def test_dropping_transport_loses_what_it_counts_and_delivers_the_rest(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats are numbered by their sender: those counted as sent arrive once, the numbers of others are missing."""
    transport = DroppingTransport(0.5, seed=1)
    transport.replace_sending(monkeypatch)
    packer = Packer(closing, address)
    actor = _started(closing, address, interval=0.01)
    _until(lambda: len(packer.heard) >= 20)
    actor.client.close()
    # `close` does not wait for ever for the thread, which sends a last one
    _until(lambda: not actor.client._thread.is_alive())
    sent, lost = (counted["observer_heartbeat"] for counted in (transport.sent, transport.lost))
    _until(lambda: len(packer.heard) == sent)
    numbers = [heartbeat.sequence for _, _, heartbeat in packer.heard]
    assert len(set(numbers)) == sent
    assert lost > 0
    assert numbers[-1] > sent


def test_bad_frames_are_named_and_good_beats_still_answered(address: Place, closing: ExitStack) -> None:
    """A peer that sends junk is counted and logged by its identity; the packer goes on answering others."""
    packer = Packer(closing, address)
    packer.say(1)
    stranger, peer = _dealer(closing, address, b"evil/1"), _dealer(closing, address)
    with capture_logs() as logs:
        stranger.send_multipart([b"junk"])
        stranger.send_multipart([b"\x93\xa6gossip\x01\x80"])
        stranger.send_multipart(example_frames("observer_directive"))  # good, but no heartbeat
        _until(lambda: packer.server.counts.dropped.total() == 2)
        peer.send_multipart(example_frames("observer_heartbeat"))
        assert 1 in _steps(peer, 0.05, at_least=1)
    assert packer.server.counts.dropped["unknown_kind"] == packer.server.counts.dropped["malformed"] == 1
    dropped = [line["peer"].split(" at ")[0] for line in logs if line["event"] == "frame dropped"]
    assert dropped == ["evil/1"], "one line in a while, whatever a stranger sends"


def test_bad_state_is_counted_and_the_next_good_one_is_taken(address: Place, closing: ExitStack) -> None:
    """An actor drops what it can't decode and keeps sending heartbeats."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    if ring := keys_for(address, address.bus):
        secure_server(router, ring, ring.current().server_secrets[0], EdgeCounts("control"))
    router.bind(address)
    closing.callback(router.close, 0)
    actor = _started(closing, address, interval=0.05)
    identity, *_ = router.recv_multipart()
    router.send_multipart([identity, b"junk"])
    router.send_multipart([identity, *example_frames("observer_heartbeat")])  # good, but no directive
    router.send_multipart([identity, *example_frames("observer_directive")])
    _until(lambda: actor.directives)
    assert [directive.kind for directive in actor.directives] == ["observer_directive"]
    assert actor.client.counts.dropped["malformed"] == 1


# --- ends and beginnings ---------------------------------------------------------------------------------------------


def test_address_of_a_server_that_leaves_in_a_moment_is_waited_for(address: Place, closing: ExitStack) -> None:
    """A socket that was closed is closed by a thread of libzmq, whenever that gets its turn."""
    before = Packer(closing, address).server
    leaves = threading.Timer(0.2, before.close)
    leaves.start()
    closing.callback(leaves.join)
    Packer(closing, address)


@pytest.mark.parametrize("transport", ["tcp", "inproc", "tcp+curve"])  # ipc takes the path over
def test_address_that_another_server_holds_is_refused_by_name(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: the other might be about to leave."""
    monkeypatch.setattr("bus.control.server.BIND_SECONDS", 0.5)
    Packer(closing, address)
    with pytest.raises(ConfigError, match=rf"bus.control: {re.escape(address)} can't be bound: Address already in use"):
        ControlServer(address, lambda identity, heartbeat: None, bus=address.bus)


@pytest.mark.parametrize("transport", ["tcp", "tcp+curve"])
@pytest.mark.parametrize("number", ["127.0.0.1", "[::1]"])
def test_a_name_with_several_addresses_is_bound_to_all_that_this_machine_has(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """Actors elsewhere may resolve the name to any of them; 203.0.113.7 belongs to another machine."""
    port = address.rpartition(":")[2]
    numbers = [f"tcp://{host}:{port}" for host in ("203.0.113.7", "127.0.0.1", "[::1]")]
    monkeypatch.setattr("bus.hosts.endpoints_of", lambda name, port: numbers)
    packer = Packer(closing, Place.of(f"tcp://localhost:{port}", address.bus))
    actor = _started(closing, Place.of(f"tcp://{number}:{port}", address.bus))
    packer.say(5)
    _until(lambda: actor.step == 5)


def test_an_address_of_another_machine_is_refused_with_the_key_to_change() -> None:
    """Of a packer behind NAT `bus.control` is the gateway's address."""
    bus = BusConfig(allow_plaintext=True)
    with pytest.raises(ConfigError, match=r"203.0.113.7:5555 can't be bound: .*; start .* or set bus.host: 0.0.0.0"):
        ControlServer("tcp://203.0.113.7:5555", lambda identity, heartbeat: None, bus=bus)


def test_probe_tells_a_dead_peer_from_a_living_one(address: Place, closing: ExitStack) -> None:
    """A peer that is there gets its directive once more; of a closed socket the packer hears that it is lost."""
    lost: list[bytes] = []
    packer = Packer(closing, address, on_lost=lost.append)
    actor = _started(closing, address, interval=60.0)
    _until(lambda: packer.heard)
    packer.say(3)
    _until(lambda: len(packer.heard) > 1)  # it sends a heartbeat at once when it knows its run
    number = len(actor.directives)
    packer.server.probe(ME)
    _until(lambda: len(actor.directives) > number)
    assert lost == []
    actor.client.close()

    def probe() -> bool:
        packer.server.probe(ME)
        return bool(lost)

    _until(probe)
    assert set(lost) == {ME}


@pytest.mark.parametrize("transport", ["tcp", "ipc", "tcp+curve"])  # an inproc peer lives and dies with its process
def test_restarted_packer_is_found_again(address: Place, closing: ExitStack) -> None:
    """A new server on the same address hears the same peers and is heard by them, without anybody's help."""
    first = Packer(closing, address)
    first.say(1)
    actor = _started(closing, address, interval=0.03)
    _until(lambda: actor.step == 1)
    first.server.close()
    silent_from = time.monotonic()
    _until(lambda: actor.client.silent_seconds > 0.1)
    second = Packer(closing, address)
    second.say(2)
    _until(lambda: actor.step == 2 and second.heard)
    assert second.heard[-1][1] == ME
    assert actor.client.silent_seconds < time.monotonic() - silent_from


def test_a_move_counts_once_the_packer_is_heard_again_over_another_way(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data connections from before are dead then. A packer that was only silent has moved nothing."""
    way = "tcp://10.0.0.1:5555", "10.0.0.2"
    monkeypatch.setattr(PackerConnection, "way", property(lambda self: way))
    packer = Packer(closing, address)
    actor = _started(closing, address, interval=0.02)
    packer.say(0)
    _until(lambda: actor.step == 0)
    for number, found in enumerate([way, ("tcp://10.0.0.1:5555", "10.0.0.7"), ("tcp://10.0.0.9:5555", "10.0.0.7")]):
        packer.server.publish({ME: None})
        _until(lambda: actor.client.silent_seconds > 0.1)
        way = found
        packer.say(number + 1)
        _until(lambda: actor.step == number + 1)  # noqa: B023
        assert actor.client.num_moves == number


def test_silence_of_a_dead_packer_is_measured_and_blocks_nobody(address: Place, closing: ExitStack) -> None:
    """Without a packer reports return at once, however many, and the silence grows."""
    actor = _started(closing, address, interval=0.01)
    started = time.monotonic()
    for number in range(1000):
        actor.client.report(metrics_url=str(number))
    assert time.monotonic() - started < AT_ONCE
    before = actor.client.silent_seconds
    time.sleep(0.1)
    assert actor.client.silent_seconds >= before + 0.1
    actor.client.close()
    assert time.monotonic() - started < 2 * AT_ONCE


@pytest.mark.slow
def test_a_packer_whose_round_does_not_end_is_silent_until_it_does(address: Place, closing: ExitStack) -> None:
    """Older directives are repeated for `stale_after`, not longer; a peer told in the middle of a round is answered."""
    told, stale_after = b"screen/2", 0.5
    packer = Packer(closing, address, stale_after=stale_after)
    held, asked = _started(closing, address, interval=0.01), _dealer(closing, address, told)
    _until(lambda: packer.say(1, ME, told) or held.step == 1)
    _until(lambda: held.client.silent_seconds > 2 * stale_after)

    def is_told() -> bool:
        packer.server.publish({told: _directive(2)}, round_ended=False)
        asked.send_multipart(example_frames("observer_heartbeat"))
        return 2 in _steps(asked, quiet=0.1)

    # others are told nothing, but for what a client that was held up has not read yet
    _until(lambda: is_told() and held.client.silent_seconds > 2 * stale_after)
    _until(lambda: packer.say(3, ME) or held.step == 3)


@pytest.mark.usefixtures("long_queues")
def test_last_beat_and_last_state_are_sent_on_close(address: Place, closing: ExitStack) -> None:
    """What was reported or published just before the end still leaves."""
    packer = Packer(closing, address)
    packer.say(1)
    actor = _started(closing, address, interval=60.0)
    _until(lambda: actor.step == 1)
    packer.say(2)
    packer.server.close()
    _until(lambda: actor.step == 2)
    port = f"tcp://127.0.0.1:{free_port()}"
    elsewhere = Place.of(port if address.startswith("tcp") else f"{address}-2", address.bus)
    other = Packer(closing, elsewhere)
    leaver = _started(closing, elsewhere, interval=60.0)
    leaver.client.report(urgent=False, phase="done")
    leaver.client.close()
    _until(lambda: other.heard and other.heard[-1][2].phase == "done")


@pytest.mark.parametrize("started", [True, False])
def test_close_is_idempotent_and_never_hangs(started: bool, address: Place) -> None:
    """Both sides close twice, begun or not, with the other one there or gone, and leave the address free."""
    bus = address.bus
    for _ in range(2):
        with ExitStack() as stack:
            server = _retry(lambda: ControlServer(address, lambda identity, heartbeat: None, bus=bus))
            client = ControlClient(
                address, ObserverHeartbeat, "screen", "b0", lambda directive: None, interval=0.01, bus=bus
            )
            client.report(phase="running")
            if started:
                server.start()
                client.start()
            begun = time.monotonic()
            for closable in (server, client, client, server):
                closable.close()
            client.report(phase="done")
            server.publish({ME: _directive(1)})
            assert time.monotonic() - begun < AT_ONCE
            stack.close()


def _retry(make: Callable[[], ControlServer]) -> ControlServer:
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return make()
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_hundred_peers_are_all_answered(address: Place, closing: ExitStack) -> None:
    """Each of 100 peers gets its own directive, not another's."""
    packer = Packer(closing, address)
    identities = [identity_of(f"rollout-{number}", "b") for number in range(100)]
    packer.server.publish({identity: _directive(number) for number, identity in enumerate(identities)})
    peers = [_dealer(closing, address, identity) for identity in identities]
    heartbeat = RolloutHeartbeat(**dict(EXAMPLES["rollout_heartbeat"]) | {"holds": np.zeros((0, 2), np.int64)})
    for peer in peers:
        peer.send_multipart(codec.encode(heartbeat))
    for number, peer in enumerate(peers):
        assert peer.poll(WAIT * 1000)
        assert codec.decode(peer.recv_multipart()).equals(_directive(number))
    _until(lambda: len(packer.heard) == 100)


# --- a thread that is held up ----------------------------------------------------------------------------------------

LEASE = 0.9


class Listeners:
    """Leases of peers behind one real server, looked at in rounds of another thread, as the packer does.

    The clock of leases goes on with the rounds, so that a test that is held up ends nobody's lease.
    """

    def __init__(self, stack: ExitStack, address: Place, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("bus.listening.time", SimpleNamespace(monotonic=lambda: self.now))
        self.held, self.over = threading.Event(), threading.Event()
        """While `held` is set and `over` is not, the server reads nothing."""
        self.peers = Peers(LEASE)
        self._read: dict[str, int] = {}
        """Number of the newest heartbeat that the server has read, by name."""
        self._heard: queue.SimpleQueue[tuple[str, Heartbeat, float]] = queue.SimpleQueue()
        self.server = ControlServer(address, self._hear, bus=address.bus.model_copy(update={"lease": LEASE}))
        self.server.start()
        stack.callback(self.server.close)
        self.names = [f"peer-{number}" for number in range(size)]
        self._sockets = [_dealer(stack, address, f"{name}/b0".encode()) for name in self.names]
        self._sequence = 0
        self.expired: set[str] = set()

    def _hear(self, identity: bytes, heartbeat: Heartbeat) -> None:
        self._heard.put((identity.decode(), heartbeat, self.server.listened))
        self._read[heartbeat.name] = heartbeat.sequence

    def heartbeat(self, *silent: str) -> None:
        """All peers but these send heartbeats, which the server reads unless it is held up."""
        self._sequence += 1
        for name, socket in zip(self.names, self._sockets, strict=True):
            if name not in silent:
                fields = dict(EXAMPLES["observer_heartbeat"]) | {
                    "name": name,
                    "boot_id": "b0",
                    "sequence": self._sequence,
                }
                with suppress(zmq.Again):
                    socket.send_multipart(codec.encode(ObserverHeartbeat(**fields)), zmq.NOBLOCK)
        if self.over.is_set() or not self.held.is_set():
            _until(lambda: all(self._read.get(name) == self._sequence for name in self.names if name not in silent))

    def round(self) -> None:
        """One round."""
        listened = self.server.listened
        while not self._heard.empty():
            identity, heartbeat, arrived = self._heard.get()
            self.peers.heard(arrived, identity, heartbeat)
        self.expired.update(self.peers.expire(listened))

    def go_on(self, seconds: float, *silent: str) -> None:
        """Heartbeats and rounds for so long."""
        until = self.now + seconds
        while self.now < until:
            self.heartbeat(*silent)
            self.round()
            self.now += 0.05


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 20, 150])
def test_a_server_that_is_held_up_ends_nobodys_lease_and_notices_the_dead_afterwards(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Held up for two leases while rounds go on: all that are alive live on; one that had died is late afterwards."""
    listeners = Listeners(closing, address, size + 1, monkeypatch)
    listeners.go_on(0.1)
    assert len(listeners.peers.identities()) == size + 1

    def hold_up(place: str) -> None:
        if place == "control.server" and not listeners.held.is_set():
            listeners.held.set()
            listeners.over.wait(WAIT)

    monkeypatch.setattr(threads, "on_mark", hold_up)
    assert listeners.held.wait(WAIT)
    listeners.go_on(2 * LEASE, "peer-0")
    listeners.over.set()
    listeners.go_on(0.3 * LEASE, "peer-0")
    assert listeners.expired <= {"peer-0/b0"}
    _until(lambda: listeners.go_on(0.05, "peer-0") or listeners.expired)
    assert listeners.expired == {"peer-0/b0"}
    assert len(listeners.peers.identities()) == size


def test_beats_are_read_while_a_huge_batch_of_states_is_encoded(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many large directives published at once some are still to be encoded when the next heartbeat is heard."""
    unencoded: list[int] = []

    class Watching(Packer):
        def _hear(self, identity: bytes, heartbeat: Heartbeat) -> None:
            unencoded.append(self.server.num_unencoded)

    encode = codec.encode

    def slowly(message: Any) -> list[Any]:
        if not unencoded:
            time.sleep(0.03)  # all would take a minute
        return encode(message)

    packer = Watching(closing, address)
    peer = _dealer(closing, address)
    frames = example_frames("observer_heartbeat")
    monkeypatch.setattr(codec, "encode", slowly)
    identities = [f"peer-{number}/b".encode() for number in range(2000)]
    packer.server.publish(dict.fromkeys(identities, _directive(1)))
    peer.send_multipart(frames)
    _until(lambda: unencoded)
    assert unencoded[0]
    packer.server.publish(dict.fromkeys(identities))


def test_of_states_published_for_one_peer_only_the_newest_is_encoded(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is held up has no more to do afterwards than one that is not."""
    encoded: list[int] = []
    held, go_on = threading.Event(), threading.Event()

    def hold_up(place: str) -> None:
        if place == "control.server":
            held.set()
            go_on.wait(WAIT)

    monkeypatch.setattr(threads, "on_mark", hold_up)
    packer = Packer(closing, address)
    assert held.wait(WAIT)
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda message: encoded.append(message.step) or encode(message))
    for step in range(100):
        packer.say(step)
    go_on.set()
    _until(lambda: encoded)
    packer.server.close()
    assert encoded == [99]


def test_a_state_that_is_too_large_harms_no_other_peer(address: Place, closing: ExitStack) -> None:
    """The server says so, the peer keeps the directive before, and newer ones of any size that travels still come."""
    packer = Packer(closing, address)
    actor = _started(closing, address, interval=0.05)
    packer.say(1)
    _until(lambda: actor.step == 1)
    with capture_logs() as logs:
        packer.server.publish({ME: _directive(2).model_copy(update={"progress": {"text": "x" * (2 << 20)}})})
        _until(lambda: any(line["event"] == "a directive is too large to be sent" for line in logs))
    heard = len(packer.heard)
    _until(lambda: len(packer.heard) > heard + 2)
    assert actor.step == 1
    packer.say(3)
    _until(lambda: actor.step == 3)


# --- tables of neighbours -----------------------------------------------------------------------------------------


def _for_rollout(load: int = 3, step: int = 3, neighbours: Neighbours | None = None) -> RolloutDirective:
    """A directive whose engines have a load; `neighbours`: another table, of as many processes."""
    example = EXAMPLES["rollout_directive"]
    assert isinstance(example, RolloutDirective)
    changes = {"step": step, "neighbour_loads": np.array([load, 0, 1, 2], np.int16)}
    return example.model_copy(update=changes | ({"neighbours": neighbours} if neighbours else {}))


def _rollout_beat(table: str, sequence: int) -> list[bytes | memoryview]:
    return codec.encode(EXAMPLES["rollout_heartbeat"].model_copy(update={"neighbours": table, "sequence": sequence}))


def _answer(peer: "zmq.Socket[bytes]", *more: Neighbours) -> tuple[list[str], RolloutDirective]:
    """The kinds of the messages up to the next directive, and the directive; `more`: tables that have come before."""
    kinds, tables = [], TABLES | {table.table: table for table in more}
    while True:
        assert peer.poll(WAIT * 1000)
        message = codec.decode(peer.recv_multipart(), tables=tables)
        kinds.append(message.kind)
        if isinstance(message, Neighbours):
            tables[message.table] = message
        else:
            assert isinstance(message, RolloutDirective)
            return kinds, message


def test_a_table_comes_before_the_directive_to_a_peer_that_does_not_name_it(address: Place, closing: ExitStack) -> None:
    """To a peer whose heartbeats name the table the directive comes alone, however often; a new table comes once."""
    packer = Packer(closing, address)
    peer = _dealer(closing, address)
    peer.send_multipart(_rollout_beat("", 1))
    _until(lambda: packer.heard)
    packer.server.publish({ME: _for_rollout()})
    assert _answer(peer)[0] == ["neighbours", "rollout_directive"]
    name = next(iter(TABLES))
    for sequence in range(2, 6):
        peer.send_multipart(_rollout_beat(name, sequence))
        assert _answer(peer)[0] == ["rollout_directive"]
    peer.send_multipart(_rollout_beat("", 6))
    assert _answer(peer)[0] == ["neighbours", "rollout_directive"], "a process that has started again has none"
    other = Neighbours.of("r1", list(reversed(NEIGHBOURS.engines)), NEIGHBOURS.rewards)
    packer.server.publish({ME: _for_rollout(neighbours=other)})
    kinds, directive = _answer(peer)
    assert kinds == ["neighbours", "rollout_directive"]
    assert directive.neighbours.equals(other)
    packer.server.publish({ME: _for_rollout(step=4, neighbours=other)})
    assert _answer(peer, other)[0] == ["rollout_directive"], "sent already, though no heartbeat has named it yet"


@pytest.mark.parametrize("number", [1, 20, 200])
def test_a_table_is_encoded_once_for_all(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also over many rounds: it is the largest part of a directive, and equal for all."""
    encoded: list[str] = []
    encode = codec.encode

    def counted(message: Message) -> list[bytes | memoryview]:
        encoded.append(message.kind)
        return encode(message)

    monkeypatch.setattr("bus.control.server.codec.encode", counted)
    packer = Packer(closing, address)
    for step in range(3):
        packer.server.publish(
            {identity_of(f"rollout-{n}", "b"): _for_rollout(step=step) for n in range(number)} | {ME: _directive(step)}
        )
        _until(lambda: not packer.server.num_unencoded)
    _until(lambda: encoded.count("observer_directive") >= 1)
    assert encoded.count("neighbours") == 1
    assert encoded.count("rollout_directive") >= number


def test_loads_alone_are_not_sent_unasked_and_each_answer_has_the_newest(address: Place, closing: ExitStack) -> None:
    """Loads change with each heartbeat of an engine: to tell them at once would be a message to everybody for each."""
    packer = Packer(closing, address)
    mine, other = _dealer(closing, address), identity_of("rollout-9", "b")
    name = next(iter(TABLES))
    mine.send_multipart(_rollout_beat(name, 1))
    _until(lambda: packer.heard)
    packer.server.publish({ME: _for_rollout(load=1), other: _for_rollout(load=1)})
    assert _answer(mine)[1].neighbour_loads.tolist() == [1, 0, 1, 2]
    packer.server.publish({ME: _for_rollout(load=2)})
    packer.server.publish({other: _for_rollout(load=5)})
    _until(lambda: not packer.server.num_unencoded)
    assert not mine.poll(200)
    mine.send_multipart(_rollout_beat(name, 2))
    assert _answer(mine)[1].neighbour_loads.tolist() == [5, 0, 1, 2], "from the directive of another peer"
    packer.server.publish({ME: _for_rollout(load=5, step=4)})
    assert _answer(mine)[1].step == 4, "anything else is sent at once"
    packer.server.publish({other: _for_rollout(load=6)}, loads=np.array([7, 8, 3, 4], np.int16))
    _until(lambda: not packer.server.num_unencoded and packer.server._loads is None)
    mine.send_multipart(_rollout_beat(name, 3))
    assert _answer(mine)[1].neighbour_loads.tolist() == [7, 8, 3, 4], "loads of a round"
    packer.server.publish({}, loads=np.array([9], np.int16))
    packer.server.publish({other: _for_rollout(load=6, step=5)})
    _until(lambda: not packer.server.num_unencoded and packer.server._loads is None)
    mine.send_multipart(_rollout_beat(name, 4))
    assert len(_answer(mine)[1].neighbour_loads) == 4, "loads of another number of engines belong to another table"


def test_a_table_lost_on_its_way_is_asked_for(
    address: Place, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directive that names it is not handed on; the next heartbeat, sent at once, brings both."""
    lost: list[list[bytes]] = []

    def lossy(socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        if msgpack.unpackb(frames[1])[0] == "neighbours" and len(lost) < 3:
            lost.append(frames)
            return
        send_frames(socket, frames)

    monkeypatch.setattr("bus.control.server.send_frames", lossy)
    packer = Packer(closing, address)
    packer.server.publish({ME: _for_rollout()})
    actor = Actor(closing, address, RolloutHeartbeat, interval=WAIT)
    none = np.zeros((0, 2), np.int64)
    actor.client.report(phase="running", free_slots=0, failures=[], holds=none)
    actor.client.start()
    _until(lambda: actor.directives)
    assert len(lost) == 3
    assert actor.directives[-1].equals(_for_rollout())
    actor.client.report(metrics_url="http://again")
    _until(lambda: packer.heard[-1][2].neighbours in TABLES)
    assert actor.client.counts.dropped["unknown_table"] >= 1


def test_a_table_of_another_run_is_dropped(address: Place, closing: ExitStack) -> None:
    """Addresses are reused: a packer of another run may answer."""
    packer = Packer(closing, address)
    actor = _started(closing, address)
    packer.say(1)
    _until(lambda: actor.directives)
    foreign = Neighbours.of("other", [], [])
    actor.client._keep(foreign)
    assert actor.client.counts.dropped["foreign_run"] == 1
    assert not actor.client._tables


@pytest.mark.parametrize("number", [0, 3, 2100])
def test_loads_end_the_directive_whatever_their_number(address: Place, closing: ExitStack, number: int) -> None:
    """Few are in the header, filled up to 8 bytes, many in a frame behind it. Loads of another number are not taken."""
    one = NEIGHBOURS.engines[0]
    table = Neighbours.of("r1", [one.model_copy(update={"name": f"inference-{n}"}) for n in range(number)], [])
    changes = {
        "neighbours": table,
        "engine_policies": np.full(number, -1, np.int8),
        "open_rewards": np.zeros(0, np.uint8),
        "neighbour_loads": np.arange(number, dtype=np.int16),
    }
    packer, peer = Packer(closing, address), _dealer(closing, address)
    peer.send_multipart(_rollout_beat(table.table, 1))
    _until(lambda: packer.heard)
    packer.server.publish({ME: _for_rollout().model_copy(update=changes)})
    assert _answer(peer, table)[1].neighbour_loads.tolist() == list(range(number))
    for sequence, loads in ((2, np.arange(number, dtype=np.int16) + 7), (3, np.zeros(number + 1, np.int16))):
        packer.server.publish({}, loads=loads)
        packer.server.publish({b"other/b": _directive(sequence)})
        _until(lambda: not packer.server.num_unencoded and packer.server._loads is None)
        peer.send_multipart(_rollout_beat(table.table, sequence))
        assert _answer(peer, table)[1].neighbour_loads.tolist() == [7 + n for n in range(number)]
