"""`actors run inference-pool`: keeps an inference actor for each server found under the configured names.

    inference.pool.urls ──resolve──▶ addresses ──listening?──▶ processes `actors run inference`

Looks every `inference.pool.sync_interval`. A new server gets an actor, which takes work once the current weights are
loaded. If a server's address is gone, the actor finishes all work and exits. If a server has died, the actor exits by
itself, and is started again at later looks. None of this fails the run. Waits on the directive for the end of the run.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import structlog

from actors.ops.up.child import Child, how_it_ended, wait_for
from actors.process.membership import DRAIN_SECONDS, Membership
from actors.process.output_dir import take
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import ObserverHeartbeat

log = structlog.get_logger("pool")

POLL_SECONDS = 0.2
"""Longest pause of the loop."""
PROBE_SECONDS = 1.0
"""Time limit for a connection to a server."""
STEADY_SECONDS = 60.0
"""Life time after which an actor counts as healthy: its next failure starts with the shortest pause again."""
MOST_DOUBLINGS = 5
"""Limit of the doublings of the pause between restarts."""
LEAVE_SECONDS = DRAIN_SECONDS + 5.0
"""Time for an actor to exit after SIGTERM, before SIGKILL."""


class Directory:
    """Directory of the servers behind configured URLs. A name that can't be resolved keeps its last addresses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._found: dict[str, list[str]] = {url: [] for url in urls}

    @classmethod
    def of(cls, config: RunConfig) -> "Directory":
        """Return the directory of `inference.pool`.

        Raises:
            ConfigError: `inference.pool` is not set.
        """
        if config.inference.pool is None:
            raise ConfigError("inference.pool: is not set; `actors run inference` runs one actor")
        return cls(config.inference.pool.urls)

    def __call__(self) -> list[str]:
        """Return the servers' URLs, with addresses in place of names; https URLs keep names, for the certificate."""
        for url in self._found:
            try:
                self._found[url] = [url] if url.startswith("https") else addresses(url)
            except OSError as error:
                log.warning("name not resolved (inference.pool.urls)", url=url, detail=str(error))
        return sorted({server for servers in self._found.values() for server in servers})


def addresses(url: str) -> list[str]:
    """Return a URL for each IPv4 address of the URL's host; for IPv6 addresses only if there are no others.

    A server with both kinds of addresses would otherwise count twice.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    hosts = [str(to[0]) for family, *_, to in found if family == socket.AF_INET] or [f"[{to[0]}]" for *_, to in found]
    return sorted({f"http://{host}:{parts.port or 80}" for host in hosts})


def listens(url: str) -> bool:
    """Return whether a server accepts connections at this URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), PROBE_SECONDS):
            return True
    except OSError:
        return False


def name_of(url: str) -> str:
    """Return the name of a server's actor. It must not end in a digit, which would be taken for the actor's ordinal."""
    return f"inference-{re.sub(r'[^A-Za-z0-9.]+', '-', url.partition('://')[2]).strip('-')}-server"


class ServerPool:
    """Pool of inference actors, one per server.

    Args:
        config: configuration of the run.
        name: name of this process in the run.
        command: arguments `run inference` of `actors` with the run's configuration; name and server are appended.
        servers: function that returns the current URLs.
    """

    def __init__(
        self, config: RunConfig, name: str, command: Sequence[str], servers: Callable[[], Collection[str]]
    ) -> None:
        assert config.inference.pool is not None
        # the logs of the pool's actors are written there, perhaps on a machine where no other process marks the folder
        take(config)
        self._config, self._interval = config, config.inference.pool.sync_interval
        self._command, self._servers = command, servers
        self._membership = Membership(config, ObserverHeartbeat, name)
        self._actors: dict[str, Child] = {}
        """Actors by the server's URL."""
        self._leaving: list[tuple[Child, float]] = []
        """Actors whose server is gone, each with the time of its SIGKILL."""
        self._draining = False

    @property
    def children(self) -> list[Child]:
        """Actors of all servers, and actors that have not exited yet although their server is gone."""
        return [*self._actors.values(), *(child for child, _ in self._leaving)]

    def run(self) -> None:
        """Run until the run is done, or this process has drained."""
        self._membership.start(phase="running")
        next_look = 0.0
        try:
            while not self._draining:
                directive = self._membership.latest()
                if directive is not None and directive.phase == "done":
                    # the directive has reached the actors too, so all of them exit without a signal
                    wait_for(self._actors.values(), LEAVE_SECONDS)
                    return
                if time.monotonic() >= next_look:
                    self.look()
                    next_look = time.monotonic() + self._interval
                self.tend()
                time.sleep(POLL_SECONDS)
        finally:
            for child in self.children:
                if child.running:
                    child.signal(signal.SIGTERM)
            for child in wait_for(self.children, LEAVE_SECONDS):
                child.signal(signal.SIGKILL)
            self._membership.close()

    def drain(self) -> None:
        """Let all actors finish, and exit. For signal handlers."""
        self._draining = True

    def look(self) -> None:
        """Look up the servers; start an actor for each new one, and stop actors whose server is gone."""
        there = set(self._servers())
        for url in self._actors.keys() - there:
            child = self._actors.pop(url)
            log.info("server has left", url=url, actor=child.name)
            child.signal(signal.SIGTERM)
            self._leaving.append((child, time.monotonic() + LEAVE_SECONDS))
        for url in there:
            name = name_of(url)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            new = Child("inference", name, environment, self._config.output / "logs" / f"{name}.log")
            child = self._actors.setdefault(url, new)
            # not started for a server that does not listen yet: the actor would only fail
            if not child.running and time.monotonic() >= child.start_at and listens(url):
                child.log.parent.mkdir(parents=True, exist_ok=True)
                # a port of its own for each actor: many actors can't share the configured one
                ours = [f'inference.engine.urls=["{url}"]', "inference.pool=null", "up.inference=1"]
                ours += ["telemetry.metrics_port=0"]
                pid = child.start([*self._command, "--name", child.name, "--parent", str(os.getpid()), *ours], ())
                log.info("server has come", url=url, actor=child.name, pid=pid)

    def tend(self) -> None:
        """Handle actors that have exited, and kill actors that take too long to exit."""
        for url, child in self._actors.items():
            if child.process is not None and (code := child.process.poll()) is not None:
                child.process = None
                child.restarts = 0 if time.monotonic() - child.started > STEADY_SECONDS else child.restarts + 1
                # the first failure after a healthy life may be the server's end, which the next look tells
                pause = self._interval * 2.0 ** min(child.restarts - 1, MOST_DOUBLINGS) if child.restarts else 0.0
                child.start_at = time.monotonic() + pause
                log.warning(
                    "actor has ended", url=url, how=how_it_ended(code), next_try_seconds=pause, said=child.last_words()
                )
        for child, deadline in self._leaving:
            if child.running and time.monotonic() > deadline:
                child.signal(signal.SIGKILL)
        self._leaving = [(child, deadline) for child, deadline in self._leaving if child.running]
