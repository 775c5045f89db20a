"""Hosts for a test: network namespaces, each with an address, names of its own, and a wire to a switch of the test.

Made and removed by the test, as root. The switch (switch.py) delays, loses and reorders packets, and limits their rate.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.system.switch import Condition
from tests.system.tools import missing, tool

SWITCH = Path(__file__).with_name("switch.py")
NAMES = Path("/etc/netns")
"""A folder per namespace with files that its processes see in /etc."""
TUN = Path("/dev/net/tun")
QUEUED_PACKETS = 10_000
"""Packets that wait for the switch before the kernel loses one."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass
class Host:
    """A network namespace with one device, and its processes."""

    name: str
    address: str
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Its end of the wire; the kernel allows 15 characters."""
        return f"{self.name}e"

    def spawn(self, label: str, log: Path, *command: object) -> "subprocess.Popen[bytes]":
        """A Python program on this host, which ends with the test."""
        words = ["ip", "netns", "exec", self.name, sys.executable, *map(str, command)]
        with log.open("ab") as stream:
            self.processes[label] = subprocess.Popen(words, stdout=stream, stderr=stream, env=os.environ | ONE_THREAD)
        return self.processes[label]

    def know(self, lines: Sequence[str]) -> None:
        """Set what this host's /etc/hosts says, also to processes that run already."""
        # in place: processes of the namespace see the file that was there at their start, not the name of a file
        (NAMES / self.name / "hosts").write_text("".join(f"{line}\n" for line in ["127.0.0.1 localhost", *lines]))

    def ip(self, *words: str) -> None:
        """`ip` inside of this host."""
        ip("-n", self.name, *words)

    def move(self, address: str) -> None:
        """Replace the host's address."""
        # in this order: the kernel removes a subnet's second address with the first
        self.ip("addr", "del", f"{self.address}/{prefix(self.address)}", "dev", self.device)
        self.ip("addr", "add", f"{address}/{prefix(address)}", "dev", self.device, *flags(address))
        self.address = address

    def control_congestion(self, algorithm: str) -> None:
        """Set the algorithm of TCP for connections made from now on; skip the test where the kernel has it not."""
        words = ["ip", "netns", "exec", self.name, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={algorithm}"]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            missing(f"no congestion control {algorithm} here: modprobe tcp_{algorithm}")

    def end(self) -> None:
        """Kill what still runs here."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10.0)

    def make(self) -> None:
        """Make the namespace, with loopback alone."""
        made = subprocess.run(["ip", "netns", "add", self.name], capture_output=True, text=True, check=False)
        if made.returncode:
            missing(f"no network namespaces here: {made.stderr.strip()}; allow CAP_SYS_ADMIN and CAP_NET_ADMIN")
        (NAMES / self.name).mkdir(parents=True)
        self.know([])
        self.ip("link", "set", "lo", "up")

    def remove(self) -> None:
        """End the processes, and remove the namespace."""
        self.end()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)
        (NAMES / self.name / "hosts").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (NAMES / self.name).rmdir()


@dataclass
class Network:
    """Hosts at a switch."""

    hosts: list[Host]
    switch: "subprocess.Popen[str]"
    condition: Condition = field(default_factory=Condition)

    def become(self, **condition: float) -> None:
        """Set the condition of all wires, see `Condition`."""
        self.condition = Condition(**condition)
        self.tell()

    def move(self, host: Host, address: str) -> None:
        """Give a host another address; the old one is gone, and whoever sends to it hears nothing."""
        host.move(address)
        self.tell()

    def tell(self) -> None:
        """Tell the switch the condition and the addresses."""
        assert self.switch.stdin is not None
        line = json.dumps([asdict(self.condition), [host.address for host in self.hosts]])
        self.switch.stdin.write(f"{line}\n")
        self.switch.stdin.flush()
        self.answered()

    def answered(self) -> None:
        """The switch has done as it was told."""
        assert self.switch.stdout is not None
        if self.switch.stdout.readline() != "ready\n":
            missing(f"no TUN devices here: {self.switch.communicate()[1]}")


@contextlib.contextmanager
def network(*addresses: str) -> Iterator[Network]:
    """Make a host per address for a block, all in one subnet."""
    check_allowed()
    tag = f"n{os.getpid() % 10**7}"
    made = [Host(f"{tag}{'abcdef'[place]}", address) for place, address in enumerate(addresses)]
    pipe = subprocess.PIPE
    words = [sys.executable, SWITCH, *(host.device for host in made)]
    switch = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        network = Network(made, switch)
        network.answered()
        for host in made:
            host.make()
            ip("link", "set", host.device, "netns", host.name)
            host.ip("link", "set", host.device, "txqueuelen", str(QUEUED_PACKETS), "up")
            host.ip("addr", "add", f"{host.address}/{prefix(host.address)}", "dev", host.device, *flags(host.address))
        network.tell()
        yield network
    finally:
        for host in made:
            host.remove()
        switch.communicate(timeout=10.0)


@contextlib.contextmanager
def behind(gateway: Host, inside: str, outside_ports: Sequence[int] = ()) -> Iterator[Host]:
    """Make a host behind the NAT of another for a block.

    Args:
        gateway: keeps its address, under which all that the new host sends appears.
        inside: address of the new host, in a subnet of its own; the gateway has the one before.
        outside_ports: ports of the gateway that lead to those of the new host.
    """
    tool("nft", "apt-get install nftables")
    host = Host(f"{gateway.name}i", inside)
    network, _, last = inside.rpartition(".")
    first = f"{network}.{int(last) - 1}"
    try:
        host.make()
        other = ("peer", "name", host.device, "netns", host.name)
        gateway.ip("link", "add", "inside", "type", "veth", *other)
        for one, device, address in ((gateway, "inside", first), (host, host.device, inside)):
            one.ip("addr", "add", f"{address}/24", "dev", device)
            one.ip("link", "set", device, "up")
        host.ip("route", "add", "default", "via", first)
        rules = [
            "table ip nat {",
            "chain out { type nat hook postrouting priority 100;",
            f"oifname {gateway.device} masquerade",
            "}",
            "chain in { type nat hook prerouting priority -100;",
            *(f"iifname {gateway.device} tcp dport {port} dnat to {inside}" for port in outside_ports),
            "}",
            "}",
        ]
        run = ["ip", "netns", "exec", gateway.name]
        subprocess.run([*run, "nft", "-f", "-"], input="\n".join(rules), text=True, check=True)
        subprocess.run([*run, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"], check=True)
        yield host
    finally:
        host.remove()


def check_allowed() -> None:
    """Skip a test, in words, where no hosts can be made."""
    tool("ip", "apt-get install iproute2")
    if os.geteuid() != 0:
        missing("network namespaces need root: run the tests as root")
    if not TUN.exists():
        missing(f"no {TUN}: allow the device of the kernel's module tun")


def ip(*words: str) -> None:
    """`ip` on this machine."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def prefix(address: str) -> int:
    """Length of a subnet's prefix."""
    return 64 if ":" in address else 24


def flags(address: str) -> list[str]:
    """An IPv6 address can be used at once only if the kernel does not look for its double first."""
    return ["nodad"] if ":" in address else []
