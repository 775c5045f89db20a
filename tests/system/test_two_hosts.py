"""One run on two hosts: two network namespaces with addresses of their own, joined by a cable, and keys on the bus.

The first has packer and trainer, the second rollout, reward and inference, with no server secret; what they share is a
disk, as hosts of a cluster do. All that crosses the cable is recorded.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.config import RunConfig, load_config
from tests.ring.harness import check_promise, steps_recorded, summary_of, wait_until
from tests.system.namespaces import Host, ip
from tests.system.quickstart import MAX_STEPS, quickstart
from tests.system.tools import missing, tool

RECORDER = Path(__file__).with_name("recorder.py")
PORT = 5555
CUT_SECONDS = 8.0
"""More than a lease (3 s): to each host the other one is gone."""
STEPS_AT_HAND = 5
"""Two that are composed, two of groups that have come (level 1), and one that is being trained."""
LONG_PROMPT = 7
"""Bytes: no shorter word is looked for, since among a million encrypted bytes it may stand by chance."""
NAMES_ON_THE_WIRE = (b"token_ids", b"rewards_G", b"boot_id", b"rollout_group", b"example_key")
"""Fields of messages, which their headers spell out."""
PLAINTEXT = """
import sys, zmq
from bus import codec
from schemas.messages import ObserverHeartbeat
context = zmq.Context()
socket = context.socket(zmq.PUSH if sys.argv[1] == "connect" else zmq.PULL)
getattr(socket, sys.argv[1])(sys.argv[2])
if sys.argv[1] == "connect":
    heartbeat = ObserverHeartbeat(run="r", name="n", boot_id="b", sequence=1, phase="running")
    socket.send_multipart([bytes(frame) for frame in codec.encode(heartbeat)])
else:
    socket.RCVTIMEO = 60000
    socket.recv_multipart()
socket.close(linger=60000)
context.term()
"""
"""A message of the bus without encryption: what the recorder must see."""


@dataclass
class Cable:
    """The two hosts and what crosses between them."""

    first: Host
    second: Host
    keys: dict[str, Path]
    """Folder of keys by name of the host."""
    folder: Path

    def actor(self, host: Host, name: str, config: Path) -> None:
        """`actors run` on a host, with what is the host's own given as overrides."""
        own = [f"bus.host={host.address}", f"inference.host={host.address}", f"bus.keys={self.keys[host.name]}"]
        command = ("-m", "actors", "run", name.partition("-")[0], "--config", config, "--name", name, *own)
        host.spawn(name, config.with_name(f"{name}.log"), *command)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing crosses for the length of a block."""
        self.first.ip("link", "set", self.first.device, "down")
        try:
            yield
        finally:
            self.first.ip("link", "set", self.first.device, "up")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Path]:
        """The file with all frames that cross during a block, whole once it has ended."""
        path, log = self.folder / "frames", self.folder / "recorder.log"
        recorder = self.first.spawn("recorder", log, RECORDER, self.first.device, path)
        wait_until(path.exists, "the recorder listens")
        try:
            yield path
        finally:
            recorder.send_signal(signal.SIGTERM)
            assert recorder.wait(60.0) == 0, log.read_text()


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    """Two hosts for one test; the second gets the keys that it needs and no others."""
    tool("ip", "apt-get install iproute2")
    if os.geteuid() != 0:
        missing("network namespaces need root: run the tests as root")
    keys, subnet = tmp_path / "keys", f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    subprocess.run([sys.executable, "-m", "actors", "keys", "new", keys], check=True, capture_output=True)
    copy = tmp_path / "keys-of-the-second"
    copy.mkdir(mode=0o700)
    for name in ("server.public", "client.public", "client.secret"):
        (copy / name).write_bytes((keys / name).read_bytes())
        (copy / name).chmod((keys / name).stat().st_mode & 0o777)
    tag = f"h{os.getpid() % 10**7}"
    first, second = Host(f"{tag}a", f"{subnet}.1"), Host(f"{tag}b", f"{subnet}.2")
    made = Cable(first, second, {first.name: keys, second.name: copy}, tmp_path)
    try:
        lay(made)
        yield made
    finally:
        for host in (first, second):
            host.remove()


def lay(cable: Cable) -> None:
    """Make both hosts, and join them."""
    hosts = (cable.first, cable.second)
    for host in hosts:
        host.make()
    first, second = hosts
    other = ("peer", "name", second.device, "netns", second.name)
    ip("link", "add", first.device, "netns", first.name, "type", "veth", *other)
    for host in hosts:
        host.ip("addr", "add", f"{host.address}/24", "dev", host.device)
        host.ip("link", "set", host.device, "up")


def start(cable: Cable) -> RunConfig:
    """Each actor as on a machine of its own; the configuration as the first host has it."""
    path = quickstart(cable.folder, bus={"control": f"tcp://{cable.first.address}:{PORT}", "resend_after": 5.0})
    for name in ("packer-0", "trainer-0"):
        cable.actor(cable.first, name, path)
    for name in ("inference-0", "reward-0", "rollout-0"):
        cable.actor(cable.second, name, path)
    return load_config(path, [f"bus.keys={cable.keys[cable.first.name]}", f"bus.host={cable.first.address}"])


def finish(cable: Cable) -> None:
    """Wait until every actor has ended by itself, with 0."""
    deadline = time.monotonic() + 180.0
    actors = {**cable.first.processes, **cable.second.processes}
    actors.pop("recorder", None)
    for name, process in actors.items():
        code = process.wait(max(1.0, deadline - time.monotonic()))
        assert code == 0, f"{name}: {(cable.folder / f'{name}.log').read_text()[-3000:]}"


def check(config: RunConfig, frames: bytes) -> None:
    """The quickstart's guarantees, and nothing of the run in the clear."""
    said, summary = check_promise(config), summary_of(config)
    assert said.trained == list(range(MAX_STEPS * config.packer.groups_per_step))
    assert said.dropped == {}
    assert summary["ledger"]["trained_twice"] == 0
    assert summary["eval_after"]["reverse_text"]["num_prompts"] == 20
    samples = [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]
    prompts = {sample["prompt"].encode() for sample in samples if len(sample["prompt"]) >= LONG_PROMPT}
    assert len(prompts) > 50
    assert len(frames) > 100 * len(samples), "the groups have crossed"
    assert b"CURVE" in frames
    assert [word for word in (*prompts, *NAMES_ON_THE_WIRE) if word in frames] == []


@pytest.mark.system
@pytest.mark.timeout(300)
def test_two_hosts_train_the_quickstart_with_keys_and_nothing_crosses_in_the_clear(cable: Cable) -> None:
    """24 steps of 8 groups; the recorder sees the field names of a message that is sent without keys, and none else."""
    with cable.recorded() as path:
        address = f"tcp://{cable.first.address}:{PORT + 1}"
        reader = cable.first.spawn("reader", cable.folder / "plain.log", "-c", PLAINTEXT, "bind", address)
        cable.second.spawn("writer", cable.folder / "plain.log", "-c", PLAINTEXT, "connect", address)
        assert reader.wait(90.0) == 0, (cable.folder / "plain.log").read_text()
    assert b"boot_id" in path.read_bytes()
    path.unlink()
    with cable.recorded() as path:
        config = start(cable)
        finish(cable)
    check(config, path.read_bytes())


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_cut_between_two_hosts_costs_time_and_nothing_else(cable: Cable) -> None:
    """After step 4 the cable is cut for 8 s, longer than a lease; the run then ends as if it had not been."""
    with cable.recorded() as path:
        config = start(cable)
        wait_until(lambda: steps_recorded(config) >= 4, "step 4", 120.0)
        with cable.cut():
            cut_at = steps_recorded(config)
            time.sleep(CUT_SECONDS)
            stood_at = steps_recorded(config)
        assert stood_at <= cut_at + STEPS_AT_HAND < MAX_STEPS, "the trainer had only what had crossed before"
        finish(cable)
    check(config, path.read_bytes())
