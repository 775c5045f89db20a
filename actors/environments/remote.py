"""Workers on other machines: the actor's side of a connection to an environment host (`host`).

Each worker has a connection of its own. Frames of two parts, the first of them empty, are between actor and host; all
others are those of the worker. Both sides count the others, and tell their count with each beat: a connection that was
broken may have lost some, and a call without an answer would look like the environment's fault.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Self, cast

import zmq
import zmq.asyncio

from actors.environments.place import End, OnFrame
from actors.environments.spec import EnvironmentSpec, Hosts
from actors.environments.worker.wire import BEAT_SECONDS, MESSAGE_BYTES, pack, unpack
from bus.encryption import Link, keys_for, secure_client, watch_link
from bus.hosts import choose_family
from bus.keys import KeyRing
from schemas.config.services import bracketed

HOST_SILENCE_SECONDS = 10.0
"""Seconds without a frame of the host, which sends beats, after which its worker counts as lost."""
END_SECONDS = 30.0
"""Longest wait for the end of a worker that the host was told to kill."""
LINGER_MILLISECONDS = 1000


class RemoteProcess:
    """A worker process of an environment host, from its start to its end."""

    def __init__(self, place: "RemotePlace", name: str, identity: bytes) -> None:
        self._place, self._name, self._identity = place, name, identity
        self._socket: zmq.asyncio.Socket | None = None
        self._link = Link()
        self._is_killed, self._killed_at = False, 0.0
        self._num_sent = self._num_received = 0

    async def run(self) -> End:
        """Let the host start the process, and wait for its end, or for that of the host."""
        if self._is_killed:
            return End("was ended before its start")
        hosts, address = self._place.hosts, self._place.address_of(self._name)
        try:
            endpoint = await _numeric(address)
        except OSError as error:
            return self._lost(f"environment host {address}: {error.strerror or error}")
        try:
            self._socket = self._connected(address, endpoint)
            owner = hosts.owner
            self._tell("start", environment=self._place.environment, worker=f"{owner}/{self._name}")
            return await self._until_over(self._socket, address)
        finally:
            if self._socket is not None:
                self._tell("end")
                self._socket.close(LINGER_MILLISECONDS)
                self._socket = None

    def _connected(self, address: str, endpoint: str) -> zmq.asyncio.Socket:
        socket = socket_of_bus(zmq.DEALER)
        # the bus sets options, which are the same for both kinds of sockets
        plain = cast("zmq.Socket[bytes]", socket)
        socket.setsockopt(zmq.IDENTITY, f"{self._place.hosts.owner}/{self._identity.decode()}".encode())
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)
        if (ring := self._place.rings[address]) is not None:
            secure_client(plain, ring, ring.current().client_publics, self._place.attempt_of(self._name))
            watch_link(plain, self._link, address, until_heard=True)
        choose_family(plain, endpoint)
        socket.connect(endpoint)
        return socket

    async def _until_over(self, socket: zmq.asyncio.Socket, address: str) -> End:
        """Pass on the frames of the worker until it ends, or until the host is silent."""
        heard = beaten = time.monotonic()
        while True:
            waited = await socket.poll(1000 * BEAT_SECONDS)
            now = time.monotonic()
            if now - beaten >= BEAT_SECONDS:
                beaten = now
                self._tell("beat", sent=self._num_sent)
            if self._link.refused:
                return self._lost(f"environment host {address} refused the connection: {self._link.refused}")
            if self._is_killed and now - self._killed_at > END_SECONDS:
                return self._lost(f"environment host {address} has not ended it within {END_SECONDS:g} s")
            if not waited:
                if now - heard > HOST_SILENCE_SECONDS:
                    return self._lost(
                        f"environment host {address} was silent for {HOST_SILENCE_SECONDS:g} s; is `actors run "
                        "environment` running there, with the same bus.keys?"
                    )
                continue
            heard = now
            if (end := self._take(await socket.recv_multipart(), address)) is not None:
                return end

    def _take(self, frames: list[bytes], address: str) -> End | None:
        """Handle a message of the host; return the end of the worker if it has ended."""
        if len(frames) == 1:
            self._num_received += 1
            self._place.on_frame(self._identity, frames[0])
            return None
        try:
            message = unpack(frames[-1])
            if message["kind"] == "beat" and message["sent"] != self._num_received:
                return self._lost(f"environment host {address}: frames were lost with the connection")
            if message["kind"] == "ended":
                words = f"{message['words']} (environment host {address})"
                if message.get("bystander"):
                    return self._lost(words)
                return End(words, str(message.get("event", "")))
        except (ValueError, KeyError) as error:
            return self._lost(f"environment host {address} sent what is no message of the protocol: {error!r}")
        return None

    def _lost(self, words: str) -> End:
        """Return the end of a worker that neither it nor the user's code is to blame for; the next host is tried."""
        self._place.move(self._name)
        return End(f"was lost: {words}", is_bystander=True)

    async def send(self, data: bytes) -> None:
        """Send a frame to the worker; one for a worker that is gone is dropped."""
        if self._socket is not None:
            self._num_sent += 1
            await self._socket.send(data)

    def kill(self) -> None:
        """Let the host kill the process."""
        if not self._is_killed:
            self._is_killed, self._killed_at = True, time.monotonic()
            self._tell("end")

    def kill_now(self) -> None:
        """Let the host kill the process."""
        self.kill()

    def _tell(self, kind: str, **content: Any) -> None:
        """Send a message to the host."""
        if self._socket is not None:
            # with room for all messages; done when this returns
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([b"", pack({"kind": kind, **content})])


class RemotePlace:
    """Worker processes of environment hosts, which take them in turn.

    Args:
        spec: what the workers run.
        hosts: where they run.
        on_frame: called with each frame of a worker.
    """

    def __init__(self, spec: EnvironmentSpec, hosts: Hosts, on_frame: OnFrame) -> None:
        self.environment, self.hosts, self.on_frame = spec.name, hosts, on_frame
        self._moves: dict[str, int] = {}
        self.rings: Mapping[str, KeyRing | None] = {}
        """Keys by address; None: none are needed."""

    async def __aenter__(self) -> Self:
        """Read the keys.

        Raises:
            ConfigError: they can't be used, or a host is beyond loopback without keys.
        """
        self.rings = {address: keys_for(address, self.hosts.bus) for address in self.hosts.addresses}
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing: each process has closed its connection."""

    def process(self, name: str, identity: bytes) -> RemoteProcess:
        """Return a process that has not been started."""
        return RemoteProcess(self, name, identity)

    async def look(self) -> None:
        """Do nothing: processes are the host's concern."""

    def attempt_of(self, name: str) -> int:
        """Return the number of times that a worker's host was lost: each try uses another pair of keys."""
        return self._moves.get(name, 0)

    def address_of(self, name: str) -> str:
        """Return the address of a worker's host."""
        first = int(name.rpartition("-")[2])
        return self.hosts.addresses[(first + self._moves.get(name, 0)) % len(self.hosts.addresses)]

    def move(self, name: str) -> None:
        """Let the successor of a worker start on the next host."""
        self._moves[name] = self._moves.get(name, 0) + 1


def socket_of_bus(kind: int) -> zmq.asyncio.Socket:
    """Return an asynchronous socket of the context whose authenticator admits the keys of the run."""
    return zmq.asyncio.Context.shadow(zmq.Context.instance().underlying).socket(kind)


async def _numeric(address: str) -> str:
    """Return an address with a number in place of the host's name: libzmq would resolve it in its only thread.

    Raises:
        OSError: the name can't be resolved.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    work = asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port))
    try:
        found = await asyncio.wait_for(work, HOST_SILENCE_SECONDS)
    except TimeoutError:
        raise OSError(f"its name was not resolved within {HOST_SILENCE_SECONDS:g} s") from None
    return f"tcp://{bracketed(str(found[0][4][0]))}:{port}"
