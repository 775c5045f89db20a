"""Cost of the control plane: a real packer on real sockets with keys, among thousands of peers.

    python -m benchmarks.control [--sizes 1000x64x32] [--seconds 20] [--json PATH]

This process is the packer (`PackerActor` with its ledger on a disk), and sets the limits of descriptors that the
product sets itself. Three further processes are the peers: rollout actors on bare DEALER sockets, one heartbeat a
second each, spread over the second; engines and reward actors likewise, with loads that change in each heartbeat. The
run is at rest: no rollout asks for tickets.

`us/beat`        CPU time of all threads of the packer's process per heartbeat, answer and rounds included
`bytes`          bytes of all frames of a rollout's answer; `heartbeat`: those of its heartbeat
`version ms`     CPU time of the packer's process that one new version of one engine costs, until every rollout has it
`sent ms`        time from the round that publishes this version until its directive to every rollout is sent
`p99 ms`         time from the sending of the engine's heartbeat until a rollout has read it: 99 of 100 rollouts; the
                 process that is all rollouts reads a few thousand messages for it, on the same cores
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from actors.assembly import make_packer
from actors.process.descriptors import raise_limits
from actors.telemetry.metrics import Metrics
from benchmarks.machine import publish, scratch
from bus import codec, keys
from bus.control import identity_of
from bus.encryption import keys_for, secure_client
from bus.topology import CONTROL_HWM, prepare
from schemas import limits
from schemas.config import RunConfig, check_tree
from schemas.messages import (
    Heartbeat,
    InferenceHeartbeat,
    PolicyVersion,
    RewardHeartbeat,
    RolloutHeartbeat,
    fingerprint,
)
from tests.ports import free_port

BEAT_SECONDS = 1.0
VERSIONS = 9
"""New versions whose cost is measured; each is told by another engine."""
JOIN_SECONDS, VERSION_SECONDS, LOOK_SECONDS = 120.0, 2.0, 0.005


def config(folder: Path, rollouts: int, engines: int, rewards: int) -> RunConfig:
    """Return the configuration of a run without a model, with keys."""
    keys.make(folder / "keys")
    return check_tree(
        {
            "output_dir": str(folder / "out"),
            "model": {"path": "none"},
            "environments": [{"type": "reverse_text"}],
            "reward": {"functions": [{"path": "exact_match"}]},
            "packer": {"groups_per_step": 64},
            "trainer": {"max_steps": 1000},
            "inference": {"engine": {"type": "fake"}},
            "eval": {"num_prompts": 0},
            "bus": {"control": f"tcp://127.0.0.1:{free_port()}", "keys": str(folder / "keys")},
            "up": {"rollout": rollouts, "inference": engines, "reward": rewards},
        }
    )


class Peers:
    """Peers of a kind in one process, each a DEALER socket; `make` returns the heartbeat of a peer."""

    def __init__(self, run: RunConfig, kind: str, number: int) -> None:
        raise_limits(run)
        self.kind = kind
        self.names = [f"{kind}-{i}" for i in range(number)]
        self.boots = [os.urandom(8).hex() for _ in self.names]
        self.term, self.run_id, self.table = 0, "", ""
        self.sequence = 0
        self.policies = [PolicyVersion(lineage=1, version=1)] * number
        self.bytes, self.answers, self.sent_bytes = 0, 0, 0
        self.heard_at: dict[int, dict[int, float]] = {}
        """Times at which each peer has read of a version first, by version."""
        self.answered: set[int] = set()
        ring = keys_for(run.bus.control, run.bus)
        self.sockets = []
        self.poller = zmq.Poller()
        self.number_of = {}
        for i, (name, boot) in enumerate(zip(self.names, self.boots, strict=True)):
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            prepare(socket, CONTROL_HWM, None, limits.CONTROL_FRAME_BYTES)
            socket.setsockopt(zmq.IDENTITY, identity_of(name, boot))
            if ring is not None:
                secure_client(socket, ring, ring.current().server_publics, 0)
            socket.connect(run.bus.control)
            self.sockets.append(socket)
            self.poller.register(socket, zmq.POLLIN)
            self.number_of[socket] = i

    @property
    def num_joined(self) -> int:
        """Number of peers that have had an answer."""
        return len(self.answered)

    def heartbeat(self, i: int) -> Heartbeat:
        """Return the next heartbeat of a peer."""
        self.sequence += 1
        common: dict[str, Any] = {
            "run": self.run_id,
            "term": self.term,
            "name": self.names[i],
            "boot_id": self.boots[i],
            "sequence": self.sequence,
            "phase": "running",
            "fingerprint": None if self.run_id else fingerprint(),
        }
        none = np.zeros((0, 2), np.int64)
        if self.kind == "rollout":
            return RolloutHeartbeat(**common, neighbours=self.table, free_slots=0, failures=[], holds=none)
        load = self.sequence % 97
        if self.kind == "reward":
            return RewardHeartbeat(**common, address=f"tcp://10.0.1.{i}:7000", load=load, failures=[], holds=none)
        return InferenceHeartbeat(
            **common,
            url=f"http://10.0.0.{i}:8000",
            engine_state="clean",
            policy=self.policies[i],
            load=load,
            generated_tokens=self.sequence,
            holds_two_versions=False,
            update_seconds={},
        )

    def send(self, i: int) -> None:
        """Send the heartbeat of a peer."""
        frames = codec.encode(self.heartbeat(i))
        self.sent_bytes += codec.num_bytes(frames)
        self.sockets[i].send_multipart(frames)

    def read(self, seconds: float) -> None:
        """Read what comes within some time."""
        for socket, _ in self.poller.poll(round(1000 * seconds)):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                kind, _, header = msgpack.unpackb(frames[0])
                self.run_id = header["run"]
                if kind == "neighbours":
                    self.table = header["table"]
                    continue
                self.term, self.answers = header["term"], self.answers + 1
                self.bytes += codec.num_bytes(frames)
                number, now = self.number_of[socket], time.monotonic()
                self.answered.add(number)
                for policy in header.get("policies", []):
                    self.heard_at.setdefault(policy["version"], {}).setdefault(number, now)

    def beat(self, pipe: Connection) -> None:
        """Send a heartbeat of each peer every second, spread over the second, and obey the orders of the pipe."""
        number, due = 0, time.monotonic()
        while True:
            now = time.monotonic()
            while due <= now:
                self.send(number)
                number, due = (number + 1) % len(self.names), due + BEAT_SECONDS / len(self.names)
            self.read(max(0.0, due - time.monotonic()))
            if pipe.poll(0):
                order, argument = pipe.recv()
                if order == "stop":
                    return
                if order == "version":
                    engine, version = argument
                    self.policies[engine] = PolicyVersion(lineage=1, version=version)
                    pipe.send(time.monotonic())
                    self.send(engine)
                elif order == "heard":
                    pipe.send(sorted(self.heard_at.pop(argument, {}).values()))
                else:
                    pipe.send((self.sequence, self.answers, self.bytes, self.sent_bytes, self.num_joined))


def be_peers(pipe: Connection, run: RunConfig, kind: str, number: int) -> None:
    """Be all peers of a kind. Runs in a child process."""
    Peers(run, kind, number).beat(pipe)


class Packer:
    """The packer in this process, and the three processes of its peers."""

    def __init__(self, folder: Path, numbers: dict[str, int]) -> None:
        run = config(folder.resolve(), numbers["rollout"], numbers["inference"], numbers["reward"])
        raise_limits(run)
        self.numbers = numbers
        self.actor = make_packer(run, "packer-0", Metrics("packer"))
        self.server = self.actor._control
        self.published_at = 0.0
        publish = self.server.publish

        def noted(directives: dict[bytes, Any], **options: Any) -> None:
            # a new version is told to all rollouts; other rounds concern a few peers
            if 2 * len(directives) > numbers["rollout"]:
                self.published_at = time.monotonic()
            publish(directives, **options)

        self.server.publish = noted  # type: ignore[method-assign, assignment]
        self.thread = threading.Thread(target=self.actor.run, daemon=True)
        self.thread.start()
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        for kind, number in numbers.items():
            self.pipes[kind], theirs = context.Pipe()
            context.Process(target=be_peers, args=(theirs, run, kind, number), daemon=True).start()

    def counts(self) -> dict[str, tuple[int, ...]]:
        """Return heartbeats, answers, bytes of answers, bytes of heartbeats and peers with an answer, by kind."""
        for pipe in self.pipes.values():
            pipe.send(("counts", None))
        return {kind: pipe.recv() for kind, pipe in self.pipes.items()}

    def join(self) -> None:
        """Wait until each peer has had an answer."""
        deadline = time.monotonic() + JOIN_SECONDS
        while any(found[4] < self.numbers[kind] for kind, found in self.counts().items()):
            assert time.monotonic() < deadline, f"not all peers are answered after {JOIN_SECONDS:g} s"
            time.sleep(1.0)
        time.sleep(2.0)

    def rest(self, seconds: float, *, looking: bool = False) -> tuple[float, dict[str, list[int]]]:
        """Return CPU seconds of this process over some time at rest, and the counts of that time.

        Args:
            seconds: the time.
            looking: whether this process also does what it does to measure a version, which is then subtracted.
        """
        before, started = self.counts(), time.process_time()
        (self.look if looking else time.sleep)(seconds)
        busy, after = time.process_time() - started, self.counts()
        return busy, {kind: [b - a for a, b in zip(before[kind], after[kind], strict=True)] for kind in before}

    def look(self, seconds: float) -> float:
        """Watch the server for some time; return the time at which the last directive was sent."""
        sent_at, until = 0.0, time.monotonic() + seconds
        was_sending = False
        while time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            sending = 2 * self.server.num_unsent > self.numbers["rollout"] or (
                was_sending and self.server.num_unsent > 0
            )
            if was_sending and not sending:
                sent_at = time.monotonic()
            was_sending = sending
        return sent_at

    def version(self, number: int, seconds: float) -> tuple[float, float, list[float]]:
        """Let an engine serve a new version.

        Returns:
            CPU seconds; seconds from the round that publishes it until all is sent; seconds until each rollout has read
            it.
        """
        started, self.published_at = time.process_time(), 0.0
        self.pipes["inference"].send(("version", (number % self.numbers["inference"], number)))
        told = self.pipes["inference"].recv()
        sent_at = self.look(seconds)
        assert min(sent_at, self.published_at) > 0, (
            f"version {number} was not told to all rollouts within {seconds:g} s"
        )
        busy = time.process_time() - started
        self.pipes["rollout"].send(("heard", number))
        return busy, sent_at - self.published_at, [at - told for at in self.pipes["rollout"].recv()]

    def close(self) -> None:
        """End all processes."""
        for pipe in self.pipes.values():
            pipe.send(("stop", None))
        self.actor.drain()
        self.thread.join(30.0)


def measure(size: str, seconds: float) -> dict[str, Any]:
    """Measure one size, `ROLLOUTSxENGINESxREWARDS`."""
    numbers = dict(zip(("rollout", "inference", "reward"), map(int, size.split("x")), strict=True))
    with scratch() as folder:
        packer = Packer(folder, numbers)
        packer.join()
        busy, found = packer.rest(seconds)
        costs, sent, late = [], [], []
        for version in range(2, 2 + VERSIONS):
            # one window with a new version and one without, next to each other: neighbours on the machine come and go
            resting, _ = packer.rest(VERSION_SECONDS, looking=True)
            told, seconds_to_send, times = packer.version(version, VERSION_SECONDS)
            assert len(times) == numbers["rollout"], f"only {len(times)} rollouts have heard of version {version}"
            costs.append(1000 * (told - resting))
            sent.append(1000 * seconds_to_send)
            late.append(1000 * times[int(0.99 * (len(times) - 1))])
        packer.close()
    beats, answers, num_bytes, sent_bytes, _ = found["rollout"]
    all_beats = sum(one[0] for one in found.values())
    return {
        "size": size,
        "beats/s": all_beats / seconds,
        "us/beat": 1e6 * busy / all_beats,
        "bytes": num_bytes / answers,
        "answers/beat": answers / beats,
        "heartbeat": sent_bytes / beats,
        "version ms": statistics.median(costs),
        "sent ms": statistics.median(sent),
        "worst sent ms": max(sent),
        "p99 ms": statistics.median(late),
        "worst p99 ms": max(late),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def main() -> None:
    """Measure all sizes, print a table, and write results with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000x64x32,3000x256x64")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(size, arguments.seconds) for size in arguments.sizes.split(",")]
    publish({"control": rows}, rows, arguments.json)


if __name__ == "__main__":
    main()
