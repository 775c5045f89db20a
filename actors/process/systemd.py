"""Notifications of an actor's main loop to systemd (sd_notify(3)).

systemd gets READY=1 after the first iteration, WATCHDOG=1 after later ones and STOPPING=1 when the actor leaves. So
systemd notices a main loop that hangs, even while all other threads work.
"""

import os
import socket
import time
from collections.abc import MutableMapping

import structlog

log = structlog.get_logger("liveness")

WATCHDOG_SECONDS = 1.0
"""Longest time between two WATCHDOG=1; a quarter of the time set in systemd, if shorter.

Sent this often, so that systemd's time starts close to the loop's last iteration.
"""


class Systemd:
    """Notifier of this process. Removes systemd's variables from the environment, so that no child notifies instead."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        # with the pid of another process the variables are meant for our parent, and were only inherited
        asked = bool(microseconds) and pid in ("", str(os.getpid()))
        # 4e6: microseconds to seconds, and a quarter of the time
        self._interval = min(WATCHDOG_SECONDS, int(microseconds) / 4e6) if asked else float("inf")
        self._ready = self._leaving = self._unheard = False
        self._said_at = float("-inf")

    def turn(self) -> None:
        """Notify of an iteration of the main loop. Cheap enough for thousands of calls a second."""
        now, first = time.monotonic(), not self._ready
        if first or now - self._said_at >= self._interval:
            self._ready, self._said_at = True, now
            self._say("READY=1" if first else "WATCHDOG=1")

    def leave(self) -> None:
        """Notify that the actor leaves. Thread-safe; also for signal handlers; may be called again."""
        if not self._leaving:
            self._leaving = True
            self._say("STOPPING=1")

    def _say(self, state: str) -> None:
        """Send systemd a datagram. If nothing listens, log a warning once and go on working."""
        if not self._address:
            return
        # a leading @ means an abstract socket, whose address starts with a null byte
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                # without waiting: a full queue of systemd must not stop the main loop
                notify.setblocking(False)
                notify.sendto(state.encode(), address)
        except OSError as error:
            if not self._unheard:
                log.warning("NOTIFY_SOCKET does not listen", state=state, path=self._address, detail=error.strerror)
            self._unheard = True
