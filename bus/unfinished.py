"""The watch for endless messages: a single thread per process sweeps all bound tcp sockets.

libzmq delivers a message when the last frame has come, and keeps all other frames in memory until then; no
high-water mark counts them. So the watch looks at the size of the process every 50 ms. After growth by some mebibytes,
and every few seconds, each `Gate` counts the bytes of its connections (`TCP_INFO`) and shuts the connections beyond its
bounds. Without Linux's `TCP_INFO` and `/proc` nothing is watched. Sockets of `ipc` are in a folder closed to other
users. Decision 0023 has the reasons and figures.
"""

import contextlib
import ctypes
import itertools
import math
import os
import queue
import struct
import sys
import threading
import time
from pathlib import Path

import zmq

from bus import threads
from bus.connection import LOOK_MILLISECONDS
from bus.gate import EVENTS, Gate
from bus.growth import PAGE, Growth
from bus.sockets import MAX_IN_A_ROW, waiting

LOOK_AGAIN_MILLISECONDS = 5
"""Milliseconds between two looks while any connection is beyond a bound."""
SWEEP_SECONDS, SWEEP_SECONDS_PER_CONNECTION = 2.0, 0.004
"""Least seconds between two sweeps of a process without growth, and per connection: a look at one takes 30 µs."""
GROWTH_BYTES = 8 << 20
"""Growth of the process in bytes to start a sweep at once: a connection on this machine brings 1 GB/s."""
WAITING_EVENTS = 20_000
"""Events held by a monitor before libzmq's network thread waits for the watch: bounds memory."""

_POSSIBLE = sys.platform == "linux"
_NUMBERS = itertools.count()


class _Watch:
    """The thread that sweeps. It reads the monitors of sockets without keys too; the authenticator reads all others."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Gate, zmq.Socket[bytes] | None]] = queue.SimpleQueue()
        self._monitors: dict[zmq.Socket[bytes], Gate] = {}
        self._poller = zmq.Poller()
        self.gates: list[Gate] = []
        self._growth = Growth()
        self._num_shut, self._trim_at = 0, math.inf
        threads.start("control-unfinished", self._loop)

    def add(self, gate: Gate, receiver: "zmq.Socket[bytes] | None") -> None:
        """Watch a gate from now on, and read its monitor, if any. Thread-safe."""
        self._new.put((gate, receiver))

    def _loop(self) -> None:
        swept_at, resident_then = 0.0, 0
        # opened once and read with pread: a process may have no descriptors left when it matters
        with Path("/proc/self/statm").open("rb", buffering=0) as statm:
            while True:
                threads.mark("unfinished")
                while not self._new.empty():
                    gate, receiver = self._new.get()
                    self.gates.append(gate)
                    if receiver is not None:
                        self._monitors[receiver] = gate
                        self._poller.register(receiver, zmq.POLLIN)
                suspects = any(gate.suspects for gate in self.gates)
                self._wait(LOOK_AGAIN_MILLISECONDS if suspects else LOOK_MILLISECONDS)
                resident = int(os.pread(statm.fileno(), 100, 0).split()[1]) * PAGE
                pause = max(SWEEP_SECONDS, SWEEP_SECONDS_PER_CONNECTION * sum(gate.num_open for gate in self.gates))
                if suspects or resident - resident_then > GROWTH_BYTES or time.monotonic() - swept_at > pause:
                    self._sweep(resident)
                    swept_at, resident_then = time.monotonic(), resident
                    self._give_back()
                # memory given back lowers the mark: otherwise growth up to the old mark would go unseen
                resident_then = min(resident_then, resident)

    def _wait(self, milliseconds: int) -> None:
        """Wait for events of the monitors, and read them."""
        if not self._monitors:  # a poll without sockets returns at once: the thread would keep a core busy
            time.sleep(milliseconds / 1000)
            return
        for ready, _ in self._poller.poll(milliseconds):
            self._hear(ready)

    def _sweep(self, resident: int) -> None:
        """Look at all connections, and shut connections with an endless message."""
        self.gates = [gate for gate in self.gates if not gate.closed]
        arrived = sum(gate.look() for gate in self.gates)
        self._growth.note(resident, arrived, sum(gate.unfinished for gate in self.gates))
        by_largest = sorted(self.gates, key=lambda gate: gate.largest, reverse=True)
        for place, gate in enumerate(by_largest):
            # growth is known for the whole process alone: the gate with the largest unfinished message answers for it
            growing = self._growth.too_much and place == 0
            if freed := gate.shut_those_beyond(growing=growing):
                self._growth.forget(freed)

    def _give_back(self) -> None:
        """Return the memory of ended messages to the system, where libzmq's allocator can (glibc's malloc_trim)."""
        num_shut = sum(gate.counts.dropped["unfinished"] for gate in self.gates)
        if num_shut != self._num_shut:
            # later, not now: libzmq frees the frames in its own thread, once it has noticed the end of the connection
            self._num_shut, self._trim_at = num_shut, time.monotonic() + SWEEP_SECONDS / 2
        elif time.monotonic() > self._trim_at:
            self._trim_at = math.inf
            with contextlib.suppress(AttributeError):  # another libc has no malloc_trim
                ctypes.CDLL(None).malloc_trim(0)

    def _hear(self, receiver: "zmq.Socket[bytes]") -> None:
        for frames in waiting(receiver, MAX_IN_A_ROW):
            event, value = struct.unpack("=HI", frames[0].bytes)  # frame 1 is the endpoint
            if event == zmq.EVENT_MONITOR_STOPPED:  # the watched socket was closed
                self._poller.unregister(receiver)
                receiver.close(0)
                self._monitors.pop(receiver).closed = True
                return
            self._monitors[receiver].hear(event, value)


_the_watch: list[_Watch] = []
_starting = threading.Lock()


def guard(socket: "zmq.Socket[bytes]", gate: Gate, address: str, *, keys: bool) -> None:
    """Watch a socket that is about to bind. Does nothing for addresses other than tcp, and on other systems than Linux.

    Args:
        socket: the socket of the gate, not bound yet: events of connections before the call would be missed.
        gate: its bounds and counters.
        address: address to be bound.
        keys: True if the socket uses CURVE. `bus.encryption` then reads the monitor and tells the gate.
    """
    if not (_POSSIBLE and address.startswith("tcp://")):
        return
    receiver: zmq.Socket[bytes] | None = None
    # a socket has a single monitor, and with keys the authenticator has it
    if not keys:
        receiver = zmq.Context.instance().socket(zmq.PAIR)
        receiver.setsockopt(zmq.RCVHWM, WAITING_EVENTS)
        monitor = f"inproc://connections-{next(_NUMBERS)}"
        socket.monitor(monitor, EVENTS | int(zmq.EVENT_MONITOR_STOPPED))
        receiver.connect(monitor)
    with _starting:
        if not _the_watch:
            _the_watch.append(_Watch())
        _the_watch[0].add(gate, receiver)


def num_watched() -> int:
    """Return the number of this process's watched sockets."""
    return len(_the_watch[0].gates) if _the_watch else 0


def port_of(address: str) -> int:
    """Return the port of a tcp address; 0 for any other address."""
    return int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
