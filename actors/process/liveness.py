"""Liveness of an actor's main loop, shown to a probe over HTTP.

`turn` is called by the main loop alone, once per iteration. So a loop that hangs is noticed, even while all other
threads work. The probe uses the port of /metrics:

    GET /healthz?within=60    200: the loop has iterated within 60 s; 503: not within 60 s, or not at all yet
"""

import time
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PATH = "/healthz"
WITHIN_SECONDS = 60.0
"""Seconds for a probe without `within`."""


class Liveness:
    """Liveness of one main loop."""

    def __init__(self) -> None:
        self.turns = 0
        """Number of iterations so far."""
        self.on_turn: Callable[[], None] = lambda: None
        """Function called in each iteration, in the thread of the loop."""
        self._turned_at = float("-inf")

    @property
    def still_seconds(self) -> float:
        """Seconds since the last iteration of the main loop; infinite before the first time."""
        return time.monotonic() - self._turned_at

    def turn(self) -> None:
        """Record an iteration of the main loop. Cheap enough for thousands of calls a second."""
        self.turns, self._turned_at = self.turns + 1, time.monotonic()
        self.on_turn()

    def wrap(self, app: WSGIApplication) -> WSGIApplication:
        """Return the application with PATH added, answered here."""

        def serve(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            if request.get("PATH_INFO") != PATH:
                return app(request, start)
            # read once: the text below must agree with the status
            status, still = "503 Service Unavailable", self.still_seconds
            try:
                within = float(parse_qs(request.get("QUERY_STRING", "")).get("within", [WITHIN_SECONDS])[0])
            except ValueError:
                status, words = "400 Bad Request", f"{PATH}?within=SECONDS: not a number"
            else:
                if still <= within:
                    status, words = "200 OK", f"the main loop iterated {still:.1f} s ago"
                elif still == float("inf"):
                    words = "starting: the main loop has not iterated yet"
                else:
                    words = f"the main loop has not iterated for {still:.1f} s, more than {within:g} s"
            start(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{words}\n".encode()]

        return serve
