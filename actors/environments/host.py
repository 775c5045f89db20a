"""Environment host: worker processes for rollout actors of other machines (`actors run environment`).

Consumes `start` and `end` of actors, and frames for workers. Emits the frames of workers, beats, and `ended`. A worker
runs what this machine's run.yaml says: an actor names an environment, and neither a file nor an interpreter. Each wait
has a limit: an actor that is silent loses its workers.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

import structlog
import zmq
import zmq.asyncio

from actors.environments.local import KILL_SECONDS, LocalPlace, LocalProcess
from actors.environments.remote import socket_of_bus
from actors.environments.spec import EnvironmentSpec
from actors.environments.worker.wire import BEAT_SECONDS, MESSAGE_BYTES, Message, pack, unpack
from bus.counts import EdgeCounts
from bus.encryption import keys_for, secure_server
from bus.hosts import choose_family
from schemas.config.services import BusConfig
from schemas.errors import ConfigError

log = structlog.get_logger("environments")

ACTOR_SILENCE_SECONDS = 20.0
"""Seconds without a frame of an actor, which sends beats, after which its worker is killed."""
MOST_WORKERS = 1024
"""Most workers at the same time; a holder of the keys could start any number otherwise."""
LINGER_MILLISECONDS = 1000


@dataclass(eq=False)
class _Session:
    """A worker, and the connection of its actor."""

    name: str
    """ACTOR/WORKER, the same for all successors."""
    spec: EnvironmentSpec
    process: LocalProcess
    heard: float
    num_sent: int = 0
    num_received: int = 0
    is_loaded: bool = False
    reason: str = ""
    """Why the host has killed the worker; empty if it has not."""
    is_bystander: bool = False


class EnvironmentHost:
    """Host of workers.

    Args:
        specs: environments by label.
        address: where to listen, `tcp://HOST:PORT`.
        bus: keys.
    """

    def __init__(self, specs: Mapping[str, EnvironmentSpec], address: str, bus: BusConfig) -> None:
        self._specs, self._address, self._bus = specs, address, bus
        self.sessions: dict[bytes, _Session] = {}
        """Workers with their connections, by identity."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End all workers and return from `run`. Thread-safe."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            ConfigError: the address can't be used.
        """
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            return
        self._socket = self._bound()
        try:
            async with LocalPlace(None, self._from_worker) as self._place:
                log.info("environment host listens", address=self._address, environments=sorted(self._specs))
                serving = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
                stopping = asyncio.create_task(self._stopping.wait())
                try:
                    done, _ = await asyncio.wait([*serving, stopping], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await self._end_all()
                    for task in (*serving, stopping):
                        task.cancel()
                for task in done:
                    # of a task that has failed
                    task.result()
        finally:
            self._socket.close(LINGER_MILLISECONDS)

    def _bound(self) -> zmq.asyncio.Socket:
        ring = keys_for(self._address, self._bus)
        socket = socket_of_bus(zmq.ROUTER)
        # the bus sets options, which are the same for both kinds of sockets
        plain = cast("zmq.Socket[bytes]", socket)
        # an actor that connects again is known by its name before the loss of its connection is
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        choose_family(plain, self._address)
        if ring is not None:
            # all actors have this key pair, and it identifies the circle of trust
            secure_server(plain, ring, ring.current().client_secrets[0], EdgeCounts("environment"))
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"--listen: {self._address} can't be used: {error.strerror}") from None
        return socket

    async def _end_all(self) -> None:
        for one in self.sessions.values():
            self._kill(one, "the environment host was stopped", is_bystander=True)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=2 * KILL_SECONDS)

    # --- messages ------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                await self._take(identity, frames)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                log.warning("frame dropped", peer=repr(identity), reason=f"{type(error).__name__}: {error}"[:500])

    async def _take(self, identity: bytes, frames: list[bytes]) -> None:
        """Handle a message of an actor."""
        one = self.sessions.get(identity)
        if one is not None:
            one.heard = time.monotonic()
        if len(frames) == 1:
            if one is not None:
                one.num_received += 1
                data = frames[0] if one.is_loaded else self._loading(identity, one, frames[0])
                if data:
                    await one.process.send(data)
                return
            message: Message = {"kind": "beat"}
        else:
            message = unpack(frames[1])
        match message["kind"]:
            case "start" if one is None:
                self._start(identity, str(message["environment"]), str(message["worker"]))
            case "end" if one is not None:
                self._kill(one, "was ended by its actor")
            case "beat" if one is None:
                words = "the environment host does not know it, and was started again"
                self._tell(identity, "ended", words=words, bystander=True)
            case "beat" if one is not None and message["sent"] != one.num_received:
                self._kill(one, "frames were lost with the connection", is_bystander=True)

    def _start(self, identity: bytes, label: str, name: str) -> None:
        """Start a worker in place of its predecessor."""
        for older in self.sessions.values():
            if older.name == name:
                self._kill(older, "its actor has started another worker in its place", is_bystander=True)
        spec, words = self._specs.get(label), ""
        if spec is None:
            words = f"run.yaml of the environment host has no environment {label!r}, but {', '.join(self._specs)}"
        elif len(self.sessions) >= MOST_WORKERS:
            words = f"the environment host has {MOST_WORKERS} workers already; start another one"
        if spec is None or words:
            self._tell(identity, "ended", words=words)
            return
        process = self._place.process(name, identity, spec)
        one = self.sessions[identity] = _Session(name, spec, process, time.monotonic())
        log.info("worker started", environment=label, worker=name)
        task = asyncio.create_task(self._run(identity, one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, identity: bytes, one: _Session) -> None:
        """Run a worker to its end, and tell its actor."""
        words, event = "can't be run", ""
        try:
            end = await one.process.run()
            words, event = one.reason or end.words, end.event
        except Exception as error:  # noqa: BLE001 - a value that is no text in the variables, say
            words = f"can't be run: {type(error).__name__}: {error}"
        finally:
            one.process.kill_now()
            del self.sessions[identity]
            log.info("worker ended", environment=one.spec.name, worker=one.name, reason=words)
            self._tell(identity, "ended", words=words, event=event, bystander=one.is_bystander)

    def _kill(self, one: _Session, words: str, *, is_bystander: bool = False) -> None:
        if not one.reason:
            one.reason, one.is_bystander = words, is_bystander
        one.process.kill()

    def _loading(self, identity: bytes, one: _Session, data: bytes) -> bytes:
        """Return a frame of the actor for a worker that has not loaded; empty if the host answers in its place.

        A `load` gets this machine's path. It fails if actor and host mean different environments.
        """
        message = unpack(data)
        if message["kind"] != "load":
            return data
        spec, there, name = one.spec, message.get("options"), _name(str(message.get("path")))
        words = ""
        if there != unpack(pack({"kind": "load", "options": spec.options}))["options"]:
            words = f"the options of {spec.title} are {there} in run.yaml of the actor, and {spec.options} in that of"
        elif name != _name(spec.path):
            words = f"{spec.title} is {name} in run.yaml of the actor, and {spec.path} in that of"
        if words:
            failed = {"kind": "failed", "call": message.get("call"), "error": f"{words} the environment host"}
            self._from_worker(identity, pack(failed))
            return b""
        one.is_loaded = True
        return pack(message | {"path": spec.path})

    def _from_worker(self, identity: bytes, data: bytes) -> None:
        if (one := self.sessions.get(identity)) is not None:
            one.num_sent += 1
            self._socket.send_multipart([identity, data])

    def _tell(self, identity: bytes, kind: str, **content: Any) -> None:
        """Send a message of the host to an actor; libzmq drops it if the actor is gone."""
        self._socket.send_multipart([identity, b"", pack({"kind": kind, **content})])

    async def _watch(self) -> None:
        """Send beats, and kill the workers of silent actors."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            # after a pause of this process the beats of the actors are still to be read
            was_held_up, last = now - last > 2 * BEAT_SECONDS, now
            await self._place.look()
            for identity, one in list(self.sessions.items()):
                self._tell(identity, "beat", sent=one.num_sent)
                silent = time.monotonic() - one.heard
                if silent > ACTOR_SILENCE_SECONDS and not was_held_up:
                    self._kill(one, f"its actor was silent for {silent:.0f} s", is_bystander=True)


def _name(path: str) -> str:
    """Return the last part of a path, which is the same on all machines: `file.py:Env`."""
    return PurePath(path).name
