"""A whole run over IPv6, and one whose packer is known by a name."""

import json
import socket
import threading

import pytest
from structlog.testing import capture_logs

from bus import hosts
from bus.control import ControlClient
from bus.data import Inbox, Outbox
from bus.topology import Addresses
from schemas.config.services import BusConfig
from schemas.messages import ObserverHeartbeat
from tests.bus.test_data import _group as a_group
from tests.ports import free_port
from tests.ring.harness import PATIENCE_SECONDS, check_promise, processes, ring, ring_config, wait_until

pytestmark = pytest.mark.slow

OPEN = BusConfig(allow_plaintext=True)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize("channel", ["filesystem", "rendezvous"])
def test_a_run_on_ipv6_loopback_reaches_its_end(tmp_path, channel):
    """Control, data, completions, weights and metrics, as processes; the addresses of metrics have their brackets."""
    config = ring_config(
        tmp_path,
        trainer={"max_steps": 4, "checkpoint": {"interval": 2}},
        bus={"control": f"tcp://[::1]:{free_port()}", "host": "::1"},
        inference={"host": "::1"},
        telemetry={"metrics_host": "::1"},
        weights={"channel": channel, "directory": str(tmp_path / "weights")},
    )
    with processes(config, tmp_path) as run:
        up = run.up()
        targets = config.output / "metrics_targets.json"
        wait_until(lambda: targets.exists() and "[::1]:" in targets.read_text(), "targets")
        assert all(entry["targets"][0].startswith("[::1]:") for entry in json.loads(targets.read_text()))
        assert up.wait(PATIENCE_SECONDS) == 0, run.text("up")
    check_promise(config)


def test_a_run_follows_the_packers_name_to_another_address(tmp_path, monkeypatch):
    """The name is looked up outside of libzmq, again while the packer is silent, and the run goes on there (P0)."""
    port, there = free_port(), ["127.0.0.1"]
    real = socket.getaddrinfo

    def lookup(host, *arguments, **options):
        return real(there[0] if host == "packer.test" else host, *arguments, **options)

    monkeypatch.setattr(hosts.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.1)
    bus = {"host": "127.0.0.1", "allow_plaintext": True}
    named = ring_config(tmp_path, trainer={"max_steps": 12}, bus={**bus, "control": f"tcp://packer.test:{port}"})
    here = ring_config(tmp_path, trainer={"max_steps": 12}, bus={**bus, "control": f"tcp://127.0.0.1:{port}"})
    moved = ring_config(tmp_path, trainer={"max_steps": 12}, bus={**bus, "control": f"tcp://127.0.0.2:{port}"})
    with ring(named) as run, ring(here) as first, ring(moved) as second:
        first.start("packer-0")
        run.start("trainer-0", "inference-0", "reward-0", "rollout-0")
        first.crash("packer-0", step=3)
        there[0] = "127.0.0.2"
        second.start("packer-0")
        second.wait(PATIENCE_SECONDS)
        run.wait(PATIENCE_SECONDS)
    check_promise(named)


def test_a_name_with_two_addresses_is_tried_in_turn_and_only_news_are_told(monkeypatch):
    """While the packer is away each address is tried again and again; a line comes when a new address does."""
    real, there, looked = socket.getaddrinfo, ["127.0.0.1", "127.0.0.2"], []

    def lookup(host, *arguments, **options):
        if host != "packer.test":
            return real(host, *arguments, **options)
        looked.append(host)
        return [found for one in there for found in real(one, *arguments, **options)]

    monkeypatch.setattr(hosts.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.05)
    address = f"tcp://packer.test:{free_port()}"
    client = ControlClient(address, ObserverHeartbeat, "screen", "b0", lambda directive: None, interval=0.1, bus=OPEN)
    client.report(phase="running")
    with capture_logs() as logs:
        client.start()
        wait_until(lambda: len(looked) > 8, "eight looks")
        assert not [line for line in logs if line["event"] == "packer's name leads elsewhere"]
        there.append("127.0.0.3")
        wait_until(lambda: [line for line in logs if "127.0.0.3" in line.get("endpoint", "")], "the new address")
        seen = len(looked)
        wait_until(lambda: len(looked) > seen + 6, "six more looks")
    client.close()
    assert len([line for line in logs if line["event"] == "packer's name leads elsewhere"]) == 1


def test_a_name_server_that_hangs_holds_up_neither_data_nor_the_end_of_an_actor(tmp_path, monkeypatch):
    """In libzmq the lookup would stop the process's only I/O thread; here it stops a thread that nobody waits for."""
    hanging = threading.Event()
    real = socket.getaddrinfo

    def lookup(host, *arguments, **options):
        if host == "packer.test":
            hanging.wait(PATIENCE_SECONDS)
        return real(host, *arguments, **options)

    monkeypatch.setattr(hosts.socket, "getaddrinfo", lookup)
    config = ring_config(tmp_path, "tcp")
    client = ControlClient(
        f"tcp://packer.test:{free_port()}", ObserverHeartbeat, "screen", "b0", lambda directive: None, bus=OPEN
    )
    client.report(phase="running")
    client.start()
    inbox = Inbox("groups", Addresses(config), config.bus, "reward-0", "b0")
    outbox = Outbox("groups", inbox.address, config.bus, "rollout-0")
    wait_until(lambda: outbox.try_send(a_group(1)), "a connection")
    assert inbox.receive(PATIENCE_SECONDS).ordinal == 1
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(60.0)
    assert not closing.is_alive()
    hanging.set()
    outbox.close()
    inbox.close()
