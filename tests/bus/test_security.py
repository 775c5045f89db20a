"""Who gets in: strangers of three kinds, floods of bytes before the handshake, keys that are rotated under traffic."""

import os
import socket as sockets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils import z85

from bus import codec, encryption, keys, topology
from bus.control import ControlClient, ControlServer, identity_of
from bus.counts import REFUSALS, EdgeCounts
from bus.data import Inbox, Outbox
from bus.encryption import keys_for, split_key
from bus.topology import Addresses
from schemas import limits
from schemas.config import RunConfig
from schemas.config.services import BusConfig
from schemas.errors import ConfigError
from schemas.messages import ObserverHeartbeat, RolloutGroup
from tests.bus.conftest import HANDSHAKE_MILLISECONDS, MakeConfig, Place
from tests.bus.test_control import Actor, Packer, _dealer, _started, _steps
from tests.bus.test_data import _group, _inbox, _outbox, _take
from tests.schemas.messages.examples import example_frames
from tests.strangers import knock

WAIT = 60.0
Stranger = Callable[["zmq.Socket[bytes]", bytes], None]
"""Gives a socket what somebody has who was not let in on the keys; the bytes are the server's public key."""


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes sockets at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    """A run on tcp with keys."""
    return make_config("tcp+curve")


@pytest.fixture
def address(config: RunConfig) -> Place:
    """Its control address."""
    return Place.of(Addresses(config).control, config.bus)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """New keys."""
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _problem(do: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        do()
    (problem,) = caught.value.problems
    return problem


# --- strangers -------------------------------------------------------------------------------------------------------


def _in_plaintext(socket: "zmq.Socket[bytes]", server: bytes) -> None:
    pass


def _without_a_key_of_ours(socket: "zmq.Socket[bytes]", server: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_keypair()[0]


def _with_an_unlisted_key(socket: "zmq.Socket[bytes]", server: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def _refused(counts: EdgeCounts, reason: str) -> int:
    """How many; who speaks plaintext may see that first, and leave before it is told."""
    return counts.refused[reason] + (counts.refused["incomplete"] if reason == "plaintext" else 0)


STRANGERS = pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (_in_plaintext, "plaintext"),
        (_without_a_key_of_ours, "wrong_server_key"),
        (_with_an_unlisted_key, "unlisted_key"),
    ],
)


@STRANGERS
def test_stranger_on_the_data_plane_is_not_heard_and_named_once(
    config: RunConfig, closing: ExitStack, stranger: Stranger, reason: str
) -> None:
    """Five strangers send good messages; only the friend's 50 arrive; five are counted, one line names the first."""
    inbox = _inbox(closing, config)
    endpoint, (server,) = split_key(inbox.address, keys_for(inbox.address, config.bus))
    with capture_logs() as logs:
        for _ in range(5):
            evil: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            closing.callback(evil.close, 0)
            stranger(evil, server)
            evil.setsockopt(zmq.RECONNECT_IVL, 60_000)
            evil.connect(endpoint)
            knock(evil, [b"rollout-0", *codec.encode(_group(777))])
        _until(lambda: _refused(inbox.counts, reason) == 5)
        outbox = _outbox(closing, config, inbox.address)
        for ordinal in range(50):
            assert outbox.try_send(_group(ordinal))
        assert _take(inbox, 50) == list(range(50))
    assert inbox.receive(0.1) is None
    assert inbox.counts.refused.total() == 5
    (line,) = [line for line in logs if line["event"] == "peer refused"]
    assert line["edge"] == "groups"
    assert line["reason"] in (reason, "incomplete" if reason == "plaintext" else reason)
    assert line["detail"] == REFUSALS[line["reason"]]
    assert line["peer"].startswith("127.0.0.1") or (line["peer"] == "unknown" and reason != "unlisted_key")


@STRANGERS
def test_stranger_on_the_control_plane_hears_nothing(
    address: Place, closing: ExitStack, stranger: Stranger, reason: str
) -> None:
    """With the identity of a peer it gets no directive and its heartbeat is not heard; the peer's are answered."""
    packer = Packer(closing, address)
    packer.say(4)
    evil: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    closing.callback(evil.close, 0)
    evil.setsockopt(zmq.IDENTITY, identity_of("screen", "b0"))
    stranger(evil, keys.load(Path(address.bus.keys)).server_publics[0])
    evil.connect(address)
    knock(evil, example_frames("observer_heartbeat"))
    _until(lambda: _refused(packer.server.counts, reason))
    assert not evil.poll(100)
    assert packer.heard == []
    peer = _dealer(closing, address)
    peer.send_multipart(example_frames("observer_heartbeat"))
    assert 4 in _steps(peer, 0.2, at_least=1)


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def _greeting(endpoint: str, stack: ExitStack) -> sockets.socket:
    """A TCP connection that has said that it speaks ZMTP 3 with CURVE, as a client that knows the protocol."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connection = stack.enter_context(sockets.create_connection((host, int(port)), timeout=WAIT))
    connection.sendall(_GREETING)
    answer = b""
    while len(answer) < 64:
        answer += (more := connection.recv(64 - len(answer)))
        assert more, "cut off already"
    return connection


def _is_cut_off(connection: sockets.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_stranger_that_says_nothing_is_cut_off(
    config: RunConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever connects has a handshake's time to show a key, here 0.1 s instead of 5."""
    assert HANDSHAKE_MILLISECONDS == 5000
    monkeypatch.setattr(topology, "HANDSHAKE_MILLISECONDS", 100)
    inbox = _inbox(closing, config)
    host, _, port = inbox.address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    connection = closing.enter_context(sockets.create_connection((host, int(port)), timeout=WAIT))
    with suppress(ConnectionError):  # a stranger that is held up is cut off before it has said that it speaks CURVE
        connection.sendall(_GREETING)
        while connection.recv(100):
            pass
    _until(lambda: inbox.counts.refused["incomplete"] == 1)


def test_frame_beyond_the_limit_is_cut_off_before_it_is_read_and_before_any_key(
    config: RunConfig, closing: ExitStack
) -> None:
    """A stranger announces a HELLO of 64 MiB and a byte: the connection ends at once, with none of it sent."""
    inbox = _inbox(closing, config)
    connection = _greeting(inbox.address.partition("#")[0], closing)
    connection.sendall(b"\x06" + struct.pack(">Q", limits.DATA_FRAME_BYTES + 1))
    started = time.monotonic()
    assert _is_cut_off(connection)
    assert time.monotonic() - started < topology.HANDSHAKE_MILLISECONDS / 1000


def test_message_that_is_no_handshake_is_counted(config: RunConfig, closing: ExitStack) -> None:
    """What is CURVE by name only ends the connection."""
    inbox = _inbox(closing, config)
    connection = _greeting(inbox.address.partition("#")[0], closing)
    connection.sendall(b"\x04\x06\x05HELLO")
    assert _is_cut_off(connection)
    _until(lambda: inbox.counts.refused["malformed"] == 1)


@pytest.mark.slow
def test_closed_sockets_leave_nothing_with_the_doorman(config: RunConfig) -> None:
    """Fifty inboxes and outboxes that came and went are watched no more, and no key may connect to them."""
    before = (0, 0)
    for number in range(51):
        inbox = Inbox("groups", Addresses(config), config.bus, "reward-0", f"boot-{number}")
        outbox = Outbox("groups", inbox.address, config.bus, "rollout-0")
        _until(lambda outbox=outbox, number=number: outbox.try_send(_group(number)))
        assert _take(inbox, 1) == [number]
        outbox.close()
        inbox.close()
        if number == 0:
            time.sleep(0.5)  # for those of tests before
            before = encryption.num_watched()
    _until(lambda: encryption.num_watched() <= before)


# --- plaintext -------------------------------------------------------------------------------------------------------


def test_peer_that_is_told_of_an_address_beyond_loopback_refuses_without_keys(closing: ExitStack) -> None:
    """An outbox, a control client and a control server name the address and the keys; allow_plaintext lets them."""
    bus = BusConfig()

    def client(bus: BusConfig) -> ControlClient:
        return ControlClient("tcp://10.0.0.5:1", ObserverHeartbeat, "screen", "b0", lambda directive: None, bus=bus)

    told = (
        "bus.keys: 10.0.0.5:1 is reachable from other machines and there are no keys; make some with `actors keys new"
    )
    for do in (
        lambda: Outbox("groups", "tcp://10.0.0.5:1", bus, "rollout-0"),
        lambda: client(bus),
        lambda: ControlServer("tcp://10.0.0.5:1", lambda identity, heartbeat: None, bus=bus),
    ):
        assert _problem(do).startswith(told)
    allowed = BusConfig(allow_plaintext=True)
    closing.callback(Outbox("groups", "tcp://10.0.0.5:1", allowed, "rollout-0").close)
    closing.callback(client(allowed).close)


def test_keys_on_one_side_only_are_named(config: RunConfig) -> None:
    """An address without a key is refused where there are keys, one with a key where there are none."""
    plain = "tcp://127.0.0.1:1"
    assert "127.0.0.1:1 speaks plaintext, and bus.keys is set here" in _problem(
        lambda: Outbox("groups", plain, config.bus, "rollout-0")
    )
    assert "127.0.0.1:1 is encrypted, and bus.keys is empty here" in _problem(
        lambda: Outbox("groups", f"{plain}#{bytes(32).hex()}", BusConfig(), "rollout-0")
    )


# --- rotation --------------------------------------------------------------------------------------------------------


def test_rotation_while_messages_flow_loses_nothing(config: RunConfig, closing: ExitStack) -> None:
    """Of 300 messages 100 are sent before, 100 within and 100 after a rotation: all arrive, on the one connection."""
    folder = Path(config.bus.keys)
    inbox = _inbox(closing, config)
    outbox = _outbox(closing, config, inbox.address)
    received: list[int] = []
    for ordinal in range(300):
        if ordinal == 100:
            keys.rotate(folder)
        if ordinal == 200:
            keys.finish(folder)
        _until(lambda ordinal=ordinal: outbox.try_send(_group(ordinal)))
        received += _take(inbox, 1)
    assert received == list(range(300))
    assert outbox.num_refused == 0
    assert inbox.counts.refused.total() == 0


def test_old_and_new_keys_are_good_until_the_rotation_is_finished(
    config: RunConfig, closing: ExitStack, tmp_path: Path
) -> None:
    """A peer that has only the old key gets in during a rotation and not after it; one with the new key always."""
    folder, inbox = Path(config.bus.keys), _inbox(closing, config)
    (old,) = keys.load(folder).client_secrets
    keys.rotate(folder)
    new, second = keys.load(folder).client_secrets
    assert second == old

    def gets_in(secret: bytes, ordinal: int) -> bool:
        before = inbox.counts.refused["unlisted_key"]
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        closing.callback(socket.close, 0)
        endpoint, (server,) = split_key(inbox.address, keys_for(inbox.address, config.bus))
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_of(secret))
        socket.connect(endpoint)
        socket.send_multipart([b"rollout-0", *codec.encode(_group(ordinal))])
        heard = None
        deadline = time.monotonic() + WAIT
        while heard is None and inbox.counts.refused["unlisted_key"] == before:
            heard = inbox.receive(0.05)
            assert time.monotonic() < deadline
        return heard is not None

    assert gets_in(old, 1)
    assert gets_in(new, 2)
    keys.finish(folder)
    assert not gets_in(old, 3)
    assert gets_in(new, 4)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_control_plane_goes_on_over_a_rotation(
    host: str, config: RunConfig, address: Place, closing: ExitStack
) -> None:
    """Nobody reconnects while it lasts; at its end the packer takes its new key, and peers come back with theirs."""
    place = Place.of(address.replace("127.0.0.1", host), address.bus)
    folder = Path(config.bus.keys)
    packer = Packer(closing, place)
    packer.say(1)
    actor = _started(closing, place, interval=0.05)
    _until(lambda: actor.step == 1)
    keys.rotate(folder)
    packer.say(2)
    _until(lambda: actor.step == 2)
    assert actor.client.num_refused == 0
    (new,) = set(keys.load(folder).server_publics[:1])
    assert packer.server.public_key != new
    keys.finish(folder)
    _until(lambda: packer.server.public_key == new)
    heard = len(packer.heard)
    packer.say(3)
    _until(lambda: actor.step == 3 and len(packer.heard) > heard + 2)
    late = _started(closing, place, interval=0.05)
    _until(lambda: late.step == 3)


def test_packer_that_restarts_in_a_rotation_is_found_under_its_new_key(
    config: RunConfig, address: Place, closing: ExitStack
) -> None:
    """A peer that knows the old server key finds the new one in the file, and one that starts then tries both."""
    first = Packer(closing, address)
    first.say(1)
    actor = _started(closing, address, interval=0.05)
    _until(lambda: actor.step == 1)
    first.server.close()
    keys.rotate(Path(config.bus.keys))
    second = Packer(closing, address)
    second.say(2)
    _until(lambda: actor.step == 2)


def test_peer_that_is_listed_late_gets_in_by_itself(config: RunConfig, closing: ExitStack, tmp_path: Path) -> None:
    """Control and data ask again after a refusal: once their key is in client.public, they are in."""
    theirs = tmp_path / "theirs"
    keys.make(theirs)
    ours = Path(config.bus.keys)
    listed = (theirs / "client.public").read_text()
    for kind in ("server.public",):
        (theirs / kind).write_text((ours / kind).read_text())
    bus = config.bus.model_copy(update={"keys": str(theirs)})
    place, inbox = Place.of(Addresses(config).control, config.bus), _inbox(closing, config)
    packer = Packer(closing, place)
    packer.say(5)
    with capture_logs() as logs:
        actor = _started(closing, Place.of(place, bus), interval=0.05)
        outbox = Outbox("groups", inbox.address, bus, "rollout-9")
        closing.callback(outbox.close)
        _until(lambda: packer.server.counts.refused["unlisted_key"] and inbox.counts.refused["unlisted_key"])
        _until(lambda: len([line for line in logs if line["event"] == "connection refused by peer"]) >= 2)
    told = {line["detail"] for line in logs if line["event"] == "connection refused by peer"}
    assert told == {"the peer does not know this actor's key: is it in client.public of bus.keys there?"}
    assert actor.step == -1
    (ours / "client.public").write_text((ours / "client.public").read_text() + listed)
    _until(lambda: actor.step == 5)
    _until(lambda: outbox.try_send(_group(3)) and isinstance(inbox.receive(0.05), RolloutGroup))
    keys.rotate(ours)
    keys.finish(ours)
    assert keys.public_of(keys.load(theirs).client_secrets[0]) in keys.load(ours).client_publics, "others' keys stay"


def test_log_of_a_refusal_has_its_reason_though_the_owner_clears_it_at_once(config: RunConfig) -> None:
    """An owner that connects again as soon as it is told has emptied `Link.refused` by the time of the log line."""
    link = encryption.Link()
    link.on_refused = lambda: setattr(link, "refused", "")
    ring, nobody = keys_for(Addresses(config).control, config.bus), zmq.curve_keypair()[0]
    with zmq.Context.instance().socket(zmq.REP) as server, zmq.Context.instance().socket(zmq.PUSH) as client:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        encryption.secure_client(client, ring, [z85.decode(nobody)], attempt=0)
        encryption.watch_link(client, link, "tcp://server", until_heard=True)
        with capture_logs() as logs:
            client.connect(f"tcp://127.0.0.1:{port}")
            _until(lambda: any(line["event"] == "connection refused by peer" for line in logs))
    assert all(line["detail"] for line in logs if line["event"] == "connection refused by peer")


# --- files -----------------------------------------------------------------------------------------------------------


def test_new_keys_are_closed_to_others_and_never_overwritten(folder: Path) -> None:
    """Secrets have mode 0600 in a folder of mode 0700; a second `new` changes nothing."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"server.secret": 0o600, "client.secret": 0o600, "server.public": 0o644, "client.public": 0o644}
    assert folder.stat().st_mode & 0o777 == 0o700
    before = keys.load(folder)
    assert "has keys already; `actors keys rotate" in _problem(lambda: keys.make(folder))
    assert keys.load(folder) == before
    assert keys.public_of(before.server_secrets[0]) == before.server_publics[0] != before.client_publics[0]


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("client.secret", 0o640, "is open to others (mode 0640); chmod 600"),
        ("server.secret", 0o604, "is open to others (mode 0604); chmod 600"),
        ("client.secret", 0o620, "is open to others (mode 0620); chmod 600"),
        ("client.public", 0o664, "may be written by others (mode 0664); chmod 644"),
        ("server.public", 0o646, "may be written by others (mode 0646); chmod 644"),
    ],
)
def test_files_that_others_could_read_or_write_are_refused(folder: Path, name: str, mode: int, words: str) -> None:
    """The error names the file, its mode and the command that mends it."""
    (folder / name).chmod(mode)
    problem = _problem(lambda: keys.load(folder))
    assert problem.startswith(f"bus.keys: {folder / name} {words}")


def test_files_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret must be the user's own; a list may also be root's."""
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    problem = _problem(lambda: keys.load(folder))
    assert problem.endswith(f"belongs to user {mine}, and this runs as user 4711")


def test_broken_and_missing_keys_are_named_and_never_shown(folder: Path) -> None:
    """No folder, no client.secret, an empty list, a line that is no key: each by name, without what the line holds."""
    assert "`actors keys new" in _problem(lambda: keys.load(folder / "nowhere"))
    secret = folder / "client.secret"
    good = secret.read_text()
    secret.write_text(f"{good}topsecret!\n")
    problem = _problem(lambda: keys.load(folder))
    assert problem == f"bus.keys: {secret}, line 2: a line begins with a key of 64 hex digits"
    secret.unlink()
    assert "has no client.secret, and GRPO_BUS_CLIENT_SECRET_KEY is not set" in _problem(lambda: keys.load(folder))
    (folder / "client.public").write_text("")
    assert _problem(lambda: keys.load(folder)) == f"bus.keys: {folder / 'client.public'} has no key"


def test_secrets_may_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in for the files of secrets, also where those would be refused."""
    before = keys.load(folder)
    monkeypatch.setenv("GRPO_BUS_CLIENT_SECRET_KEY", before.client_secrets[0].hex())
    (folder / "client.secret").unlink()
    (folder / "server.secret").chmod(0o644)
    monkeypatch.setenv("GRPO_BUS_SERVER_SECRET_KEY", before.server_secrets[0].hex())
    assert keys.load(folder) == before
    monkeypatch.setenv("GRPO_BUS_SERVER_SECRET_KEY", "nonsense")
    problem = _problem(lambda: keys.load(folder))
    assert problem == "bus.keys: GRPO_BUS_SERVER_SECRET_KEY, line 1: a line begins with a key of 64 hex digits"


def test_packer_needs_the_server_secret_and_others_do_not(
    config: RunConfig, address: Place, closing: ExitStack
) -> None:
    """On a machine without it an inbox and a client work, and a packer is refused by name."""
    (Path(config.bus.keys) / "server.secret").unlink()
    _inbox(closing, config)
    Actor(closing, address)
    problem = _problem(lambda: ControlServer(address, lambda identity, heartbeat: None, bus=config.bus))
    assert problem == (
        f"bus.keys: {config.bus.keys} has no server.secret, which the packer needs; copy the file there, or set "
        f"{keys.SECRET_VARIABLES['server']}"
    )


def test_process_that_has_good_keys_keeps_them_when_the_files_go_bad(folder: Path) -> None:
    """Half-copied or open files are said in a line and change nothing; mended ones are taken."""
    ring = keys.KeyRing(folder)
    before = ring.current()
    (folder / "client.secret").chmod(0o644)
    with capture_logs() as logs:
        assert [ring.current() for _ in range(3)] == [before] * 3
    assert [line["event"] for line in logs] == ["new keys can't be used; keeping the previous keys"]
    (folder / "client.secret").chmod(0o600)
    keys.rotate(folder)
    assert ring.current().client_secrets[1:] == before.client_secrets


def test_files_on_a_file_system_that_hangs_hold_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe in place of a file, whose opening waits: the keys of before are given at once, and new ones afterwards."""
    monkeypatch.setattr(keys, "PATIENCE_SECONDS", 0.1)
    ring = keys.KeyRing(folder)
    before, path = ring.current(), folder / "client.public"
    path.rename(folder / "aside")
    os.mkfifo(path, 0o644)
    assert [ring.current() for _ in range(1000)] == [before] * 1000
    (folder / "aside").rename(folder / "client.public.new")
    with path.open("w"):  # the hanging call comes back
        (folder / "client.public.new").replace(path)
    keys.rotate(folder)
    _until(lambda: ring.current() != before)


def test_rotations_are_one_at_a_time(folder: Path) -> None:
    """A second one is refused until the first is finished, and there is nothing to finish before it has begun."""
    assert "no rotation is under way" in _problem(lambda: keys.finish(folder))
    old = keys.load(folder)
    keys.rotate(folder)
    assert "a rotation is under way" in _problem(lambda: keys.rotate(folder))
    during = keys.load(folder)
    assert during.server_secrets[1:] == old.server_secrets
    assert during.client_publics[1:] == old.client_publics
    keys.finish(folder)
    after = keys.load(folder)
    assert (after.server_secrets, after.client_publics) == (during.server_secrets[:1], during.client_publics[:1])
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.secret")} == {0o600}
    assert len(list(folder.iterdir())) == 4, "no staging files stay"
