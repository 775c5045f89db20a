"""Whether the actor's main loop goes round, said to whoever supervises the process: systemd, or a probe over HTTP.

`turn` is called by that loop alone, once each time round; so when it hangs nothing more is said, however well all other
threads do. To systemd, through the socket that it names (sd_notify(3)), go READY=1 with the first turn, WATCHDOG=1
with later ones and STOPPING=1 when the actor leaves. A probe asks beside /metrics:

    GET /healthz?within=60    200: the loop has gone round within 60 s; 503: it has not, or never yet
"""

import os
import socket
import time
from collections.abc import Iterable, MutableMapping
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import structlog

log = structlog.get_logger("liveness")

PATH = "/healthz"
WITHIN_SECONDS = 60.0
"""Where a probe does not say."""
WATCHDOG_SECONDS = 1.0
"""Between two WATCHDOG=1, or a quarter of what systemd asks for: close to when the loop really went round last."""


class Liveness:
    """Of this process. The variables of systemd are taken out of the environment: children do not speak for it."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        asked = bool(microseconds) and pid in ("", str(os.getpid()))
        self._interval = min(WATCHDOG_SECONDS, int(microseconds) / 4e6) if asked else float("inf")
        self._turned_at = self._said_at = float("-inf")
        self._leaving = self._unheard = False

    @property
    def still_seconds(self) -> float:
        """Since the main loop went round last; infinite before the first time."""
        return time.monotonic() - self._turned_at

    def turn(self) -> None:
        """The main loop has gone round. Cheap: it may do so thousands of times a second."""
        now, first = time.monotonic(), self._turned_at == float("-inf")
        self._turned_at = now
        if first or now - self._said_at >= self._interval:
            self._said_at = now
            self._say("READY=1" if first else "WATCHDOG=1")

    def leave(self) -> None:
        """The actor begins to leave. From any thread, and from a signal handler; may be called again."""
        if not self._leaving:
            self._leaving = True
            self._say("STOPPING=1")

    def beside(self, app: WSGIApplication) -> WSGIApplication:
        """The application with PATH added."""

        def serve(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            if request.get("PATH_INFO") != PATH:
                return app(request, start)
            status, words = self._answer(request.get("QUERY_STRING", ""))
            start(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{words}\n".encode()]

        return serve

    def _answer(self, query: str) -> tuple[str, str]:
        try:
            within = float(parse_qs(query).get("within", [WITHIN_SECONDS])[0])
        except ValueError:
            return "400 Bad Request", f"{PATH}?within=SECONDS: not a number"
        still = self.still_seconds
        if still <= within:
            return "200 OK", f"the main loop went round {still:.1f} s ago"
        if still == float("inf"):
            return "503 Service Unavailable", "starting: the main loop has not gone round yet"
        return "503 Service Unavailable", f"the main loop has not gone round for {still:.1f} s, more than {within:g} s"

    def _say(self, state: str) -> None:
        """One datagram. A supervisor that does not listen is no reason to stop working, and is said once."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)
                notify.sendto(state.encode(), address)
        except OSError as error:
            if not self._unheard:
                log.warning("NOTIFY_SOCKET does not listen", state=state, path=self._address, detail=error.strerror)
            self._unheard = True
