"""`actors run inference-pool`: an inference actor for each server that is there, for as long as it is there.

    inference.pool.urls ──names──▶ addresses ──that listen──▶ processes `actors run inference`

Looks every `inference.pool.sync_interval`. A server that has come gets an actor, which takes work only once it has
loaded the current weights; one whose address is gone has its actor finish what it does and leave; one that has died
ends its actor by itself, and is tried again at later looks. None of these is a failure of the run. Waits on State for
the end of the run; the kernel ends the actors when this process dies.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import structlog

from actors.children import Child, how_it_ended, wait_for
from actors.membership import DRAIN_SECONDS, Membership
from schemas.config import RunConfig
from schemas.messages import ObserverBeat

log = structlog.get_logger("pool")

POLL_SECONDS = 0.2
PROBE_SECONDS = 1.0
STEADY_SECONDS = 60.0
"""An actor that lived this long had a server that was good."""
MOST_DOUBLINGS = 5
LEAVE_SECONDS = DRAIN_SECONDS + 5.0


class Directory:
    """The servers that configured names stand for. A name that can't be resolved keeps its last addresses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._found: dict[str, list[str]] = {url: [] for url in urls}

    def __call__(self) -> list[str]:
        """URLs, each with an address in place of the name; those with https as they are, for the certificate's sake."""
        for url in self._found:
            try:
                self._found[url] = [url] if url.startswith("https") else addresses(url)
            except OSError as error:
                log.warning("name not resolved (inference.pool.urls)", url=url, detail=str(error))
        return sorted({server for servers in self._found.values() for server in servers})


def addresses(url: str) -> list[str]:
    """A URL for each IPv4 address of its host; for each IPv6 one only where it has no other: they are the same servers.

    Raises:
        OSError: the name is not known, or nobody knows names at the moment.
    """
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    hosts = [str(to[0]) for family, *_, to in found if family == socket.AF_INET] or [f"[{to[0]}]" for *_, to in found]
    return sorted({f"http://{host}:{parts.port or 80}" for host in hosts})


def listens(url: str) -> bool:
    """Whether somebody takes connections there."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), PROBE_SECONDS):
            return True
    except OSError:
        return False


def name_of(url: str) -> str:
    """Of the actor in front of a server. It ends in no digit, since that would be the actor's ordinal."""
    return f"inference-{re.sub(r'[^A-Za-z0-9.]+', '-', url.partition('://')[2]).strip('-')}-server"


class Pool:
    """See the module.

    Args:
        command: `actors run inference` with the run's configuration, to which name and server are added.
        servers: the URLs of the moment.
    """

    def __init__(
        self, config: RunConfig, name: str, command: Sequence[str], servers: Callable[[], Collection[str]]
    ) -> None:
        assert config.inference.pool is not None
        self._config, self._interval = config, config.inference.pool.sync_interval
        self._command, self._servers = command, servers
        self._membership = Membership(config, ObserverBeat, name)
        self._actors: dict[str, Child] = {}
        self._leaving: list[tuple[Child, float]] = []
        """Actors whose server is gone, and until when they may take."""
        self._draining = False

    def run(self) -> None:
        """Until the run is done, or drained."""
        self._membership.start(phase="running")
        next_look = 0.0
        try:
            while not self._draining:
                state = self._membership.latest()
                if state is not None and state.phase == "done":
                    wait_for(self._actors.values(), LEAVE_SECONDS)  # they have been told, too
                    return
                if time.monotonic() >= next_look:
                    self.look()
                    next_look = time.monotonic() + self._interval
                self.tend()
                time.sleep(POLL_SECONDS)
        finally:
            self._end()
            self._membership.close()

    def drain(self) -> None:
        """Have all actors finish, and end. From a signal handler."""
        self._draining = True

    def look(self) -> None:
        """Find out which servers there are, and give each an actor."""
        there = set(self._servers())
        for url in self._actors.keys() - there:
            child = self._actors.pop(url)
            log.info("server has left", url=url, actor=child.name)
            child.signal(signal.SIGTERM)
            self._leaving.append((child, time.monotonic() + LEAVE_SECONDS))
        for url in there:
            child = self._actors.setdefault(url, self._child(url))
            if not child.running and time.monotonic() >= child.start_at and listens(url):
                self._start(child, url)

    def tend(self) -> None:
        """Bury actors that have ended, and end those that take too long to leave."""
        for url, child in self._actors.items():
            if child.process is not None and (code := child.process.poll()) is not None:
                child.process = None
                child.restarts = 0 if time.monotonic() - child.started > STEADY_SECONDS else child.restarts + 1
                pause = self._interval * 2.0 ** min(child.restarts - 1, MOST_DOUBLINGS) if child.restarts else 0.0
                child.start_at = time.monotonic() + pause
                log.warning(
                    "actor has ended", url=url, how=how_it_ended(code), next_try_seconds=pause, said=child.last_words()
                )
        for child, deadline in self._leaving:
            if child.running and time.monotonic() > deadline:
                child.signal(signal.SIGKILL)
        self._leaving = [(child, deadline) for child, deadline in self._leaving if child.running]

    def _child(self, url: str) -> Child:
        name = name_of(url)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return Child("inference", name, environment, self._config.output / "logs" / f"{name}.log")

    def _start(self, child: Child, url: str) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)
        ours = [f'inference.engine.urls=["{url}"]', "inference.pool=null", "up.inference=1", "telemetry.metrics_port=0"]
        pid = child.start([*self._command, "--name", child.name, "--parent", str(os.getpid()), *ours], ())
        log.info("server has come", url=url, actor=child.name, pid=pid)

    def _end(self) -> None:
        children = [*self._actors.values(), *(child for child, _ in self._leaving)]
        for child in children:
            if child.running:
                child.signal(signal.SIGTERM)
        for child in wait_for(children, LEAVE_SECONDS):
            child.signal(signal.SIGKILL)
