"""The wires between the hosts of a test: `switch.py DEVICE...`, as root, until its standard input ends.

Each DEVICE is a new TUN device, which the caller moves into a namespace. A packet read from one is written to the one
with its destination's address, after the delay of the condition, or never. tc's netem does the same in the kernel,
where the kernel has it (CONFIG_NET_SCH_NETEM); many kernels of containers and small machines do not.

A line on standard input is a JSON array of what counts from now on: the values of `Condition`, and the address of each
device. Each line is answered by a line.
"""

import contextlib
import fcntl
import heapq
import ipaddress
import json
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass, field

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 1 << 16
READS_IN_A_ROW = 64
QUEUE_SECONDS = 0.5
"""Length of the queue before a narrow wire; what finds it full is lost."""
NICE = -10
"""The wires must not wait for the actors, which share this machine's cores with them."""


@dataclass
class Condition:
    """All wires alike, in each direction: as `netem delay SECONDS loss LOSS reorder REORDER rate BYTES`."""

    delay: float = 0.0
    """Seconds from one host to another."""
    loss: float = 0.0
    """Share of the packets that is lost."""
    reorder: float = 0.0
    """Share of the packets that is not delayed, and so overtakes others."""
    rate: float = 0.0
    """Bytes per second; 0: no limit."""


@dataclass
class Switch:
    """Devices by descriptor, their addresses, and the packets on their way."""

    devices: list[int]
    condition: Condition = field(default_factory=Condition)
    at: dict[bytes, int] = field(default_factory=dict)
    """Device of each address."""
    busy_until: dict[int, float] = field(default_factory=dict)
    """When the last byte of what is queued for a device has left."""
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """Heap of (due, number, device, packet)."""
    count: int = 0

    def become(self, condition: Condition, addresses: list[str]) -> None:
        """Set what counts from now on; the addresses are those of the devices, in order."""
        self.condition = condition
        self.at = {
            ipaddress.ip_address(one).packed: device for one, device in zip(addresses, self.devices, strict=True)
        }

    def take(self, packet: bytes, now: float) -> None:
        """A packet has come from a host; to an address that no host has it is lost."""
        device = self.at.get(destination_of(packet))
        due = None if device is None else self.due(device, len(packet), now)
        if device is not None and due is not None:
            self.count += 1
            heapq.heappush(self.waiting, (due, self.count, device, packet))

    def due(self, device: int, num_bytes: int, now: float) -> float | None:
        """When a packet arrives; None: it is lost."""
        if random.random() < self.condition.loss:
            return None
        leaves = now
        if self.condition.rate:
            start = max(now, self.busy_until.get(device, 0.0))
            if start - now > QUEUE_SECONDS:
                return None
            leaves = self.busy_until[device] = start + num_bytes / self.condition.rate
        return leaves if random.random() < self.condition.reorder else leaves + self.condition.delay

    def deliver(self, now: float) -> float | None:
        """Write what is due; seconds until the next packet is."""
        while self.waiting and self.waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(self.waiting)
            with contextlib.suppress(OSError):  # the device is down, or its queue is full: lost, as on any wire
                os.write(device, packet)
        return max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None


def destination_of(packet: bytes) -> bytes:
    """Address in the header of an IPv4 or IPv6 packet."""
    return packet[24:40] if packet[0] >> 4 == 6 else packet[16:20]


def opened(device: str) -> int:
    """A new TUN device of this name."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def main(names: list[str]) -> None:
    """Carry packets until standard input ends."""
    os.nice(NICE)
    switch = Switch([opened(name) for name in names])
    selector = selectors.DefaultSelector()
    for device in switch.devices:
        selector.register(device, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    print("ready", flush=True)
    seconds: float | None = None
    while True:
        for key, _ in selector.select(seconds):
            if key.fd == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                condition, addresses = json.loads(line)
                switch.become(Condition(**condition), addresses)
                print("ready", flush=True)
                continue
            with contextlib.suppress(OSError):  # read to the end, or down
                for _ in range(READS_IN_A_ROW):
                    switch.take(os.read(key.fd, PACKET_BYTES), time.monotonic())
        seconds = switch.deliver(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
