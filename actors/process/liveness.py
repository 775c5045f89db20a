"""Liveness of the actor's main loop, reported to a supervisor: systemd, or a probe over HTTP.

`turn` is called by the main loop alone, once per iteration. So a loop that hangs is reported, even while all other
threads work. systemd (sd_notify(3)) gets READY=1 after the first iteration, WATCHDOG=1 after later ones and
STOPPING=1 when the actor leaves. A probe uses the port of /metrics:

    GET /healthz?within=60    200: the loop has iterated within 60 s; 503: not within 60 s, or not at all yet
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
"""Seconds for a probe without `within`."""
WATCHDOG_SECONDS = 1.0
"""Longest time between two WATCHDOG=1; a quarter of the time set in systemd, if shorter.

Sent this often, so that systemd's time starts close to the loop's last iteration.
"""


class Liveness:
    """Liveness of this process. Removes systemd's variables from the environment, so that no child reports instead."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        asked = bool(microseconds) and pid in ("", str(os.getpid()))  # another pid: meant for our parent
        self._interval = min(WATCHDOG_SECONDS, int(microseconds) / 4e6) if asked else float("inf")
        self._turned_at = self._said_at = float("-inf")
        self._leaving = self._unheard = False

    @property
    def still_seconds(self) -> float:
        """Seconds since the last iteration of the main loop; infinite before the first time."""
        return time.monotonic() - self._turned_at

    def turn(self) -> None:
        """Record an iteration of the main loop. Cheap enough for thousands of calls a second."""
        now, first = time.monotonic(), self._turned_at == float("-inf")
        self._turned_at = now
        if first or now - self._said_at >= self._interval:
            self._said_at = now
            self._say("READY=1" if first else "WATCHDOG=1")

    def leave(self) -> None:
        """Tell systemd that the actor leaves. Thread-safe; also for signal handlers; may be called again."""
        if not self._leaving:
            self._leaving = True
            self._say("STOPPING=1")

    def beside(self, app: WSGIApplication) -> WSGIApplication:
        """Return the application with PATH added, answered here."""

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
            return "200 OK", f"the main loop iterated {still:.1f} s ago"
        if still == float("inf"):
            return "503 Service Unavailable", "starting: the main loop has not iterated yet"
        return "503 Service Unavailable", f"the main loop has not iterated for {still:.1f} s, more than {within:g} s"

    def _say(self, state: str) -> None:
        """Send systemd a datagram. If nothing listens, log a warning once and go on working."""
        if not self._address:
            return
        # a leading @ means an abstract socket, whose address starts with a null byte
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)  # a full queue of systemd must not stop the main loop
                notify.sendto(state.encode(), address)
        except OSError as error:
            if not self._unheard:
                log.warning("NOTIFY_SOCKET does not listen", state=state, path=self._address, detail=error.strerror)
            self._unheard = True
