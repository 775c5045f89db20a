"""Throughput of the bus, compared with raw pyzmq, and cost of the packer's control channel with 1 000 peers.

    python -m benchmarks.bus [--json PATH]

*Data.* An `Outbox` in this process sends `RolloutGroup`s to an `Inbox` in another process, over tcp loopback and over
ipc. The raw ways use a PUSH and a PULL socket of pyzmq with the same options and send frames of the same bytes
(`send_multipart`, `recv_multipart`, with and without copying); they encode and check nothing. Rounds of all ways
alternate. Rates are medians over rounds; the share compares with the better raw way of the same round. Both processes
run at the same time, and share the cores with ZeroMQ's threads.

*Control.* A `ControlServer` runs in this process. Another process has 1 000 DEALER sockets; each socket stands for a
rollout actor that holds 50 groups. Each peer sends a heartbeat once, and gets its directive as the answer. Then all
directives change and are sent without a heartbeat. `us` is CPU time of all threads of this process, per heartbeat with
its answer and per changed directive.
"""

import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.codec import make_group
from benchmarks.machine import finish, table
from bus import codec
from bus.control import ControlServer, identity_of
from bus.data import Inbox, Outbox
from bus.topology import Addresses, prepare
from schemas import limits
from schemas.config import RunConfig, check_tree
from schemas.messages import (
    Directive,
    EnginePeer,
    PolicyVersion,
    RewardPeer,
    RolloutDirective,
    RolloutHeartbeat,
    fingerprint,
)

SIZES = {"4 KiB": (360, 6000), "1 MiB": (116_400, 200)}
"""Tokens of the completion, and messages per round, by size of a message."""
ROUNDS = 9
RAW_WAYS = {"raw": True, "raw no copy": False}
NUM_PEERS, NUM_HELD = 1000, 50


def config(transport: str) -> RunConfig:
    """Return the configuration of a run; only its bus matters."""
    return check_tree(
        {
            "output_dir": f"bench-{os.getpid()}",  # only names the sockets
            "model": {"path": "none"},
            "environments": [{"type": "arithmetic"}],
            "reward": {"functions": [{"path": "exact_match"}]},
            "trainer": {"max_steps": 1},
            "bus": {"control": "ipc" if transport == "ipc" else "tcp://127.0.0.1:1"},
        }
    )


# --- data ------------------------------------------------------------------------------------------------------------


def receive(pipe: Connection, transport: str) -> None:
    """Bind both sockets, then time each round from its first message to its last. Runs in a child process."""
    run = config(transport)
    inbox = Inbox("groups", Addresses(run), run.bus, "bench", "1")
    raw = zmq.Context.instance().socket(zmq.PULL)
    prepare(raw, run.bus.high_water_mark, None, limits.MESSAGE_BYTES)
    raw.bind("tcp://127.0.0.1:*" if transport == "tcp" else f"{inbox.address}.raw")
    pipe.send((inbox.address, raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")))
    takes: dict[str, Callable[[], object]] = {"bus": lambda: inbox.receive(60.0)}
    takes |= {way: lambda copy=copy: raw.recv_multipart(copy=copy) for way, copy in RAW_WAYS.items()}
    while (task := pipe.recv()) is not None:
        way, count = task
        take = takes[way]
        take()
        start = time.perf_counter()
        for _ in range(count - 1):
            take()
        pipe.send((count - 1) / (time.perf_counter() - start))


def measure_data(transport: str) -> list[dict[str, Any]]:
    """Measure messages per second of all ways and sizes over one transport."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, transport))
    child.start()
    address, raw_address = pipe.recv()
    bus = config(transport).bus
    outbox = Outbox("groups", address, bus, "rollout-0")
    raw = zmq.Context.instance().socket(zmq.PUSH)
    prepare(raw, bus.high_water_mark, None, limits.MESSAGE_BYTES)
    raw.connect(raw_address)
    results = [measure_size(transport, size, pipe, outbox, raw) for size in SIZES]
    pipe.send(None)
    child.join()
    outbox.close()
    raw.close()
    return results


def measure_size(
    transport: str, size: str, pipe: Connection, outbox: Outbox, raw: "zmq.Socket[bytes]"
) -> dict[str, Any]:
    """Measure all ways in turn, in several rounds."""
    tokens, count = SIZES[size]
    group = make_group(1, tokens)
    frames = [b"rollout-0", *codec.encode(group)]

    def send_typed() -> None:
        while not outbox.try_send(group):
            time.sleep(2e-4)

    sends: dict[str, Callable[[], object]] = {"bus": send_typed}
    sends |= {way: lambda copy=copy: raw.send_multipart(frames, copy=copy) for way, copy in RAW_WAYS.items()}
    rates: dict[str, list[float]] = {way: [] for way in sends}
    for _ in range(ROUNDS):
        for way, send in sends.items():
            pipe.send((way, count))
            for _ in range(count):
                send()
            rates[way].append(pipe.recv())
    medians = {way: statistics.median(values) for way, values in rates.items()}
    num_bytes = codec.num_bytes(frames)
    best_raw = [max(pair) for pair in zip(*(rates[way] for way in RAW_WAYS), strict=True)]
    return {
        "transport": transport,
        "size": size,
        "message_bytes": num_bytes,
        "num_frames": len(frames),
        "messages_per_second": medians,
        "bytes_per_second": {way: rate * num_bytes for way, rate in medians.items()},
        "share_of_raw": statistics.median(mine / raw for mine, raw in zip(rates["bus"], best_raw, strict=True)),
    }


# --- control ---------------------------------------------------------------------------------------------------------


def be_peers(pipe: Connection, address: str) -> None:
    """Send a heartbeat per peer when told to, in waves that fit the packer's queue; count directives.

    Runs in a child process.
    """
    allow_many_sockets()
    peers = []
    for number in range(NUM_PEERS):
        peer = zmq.Context.instance().socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, identity(number))
        peer.connect(address)
        peers.append(peer)
    holds = np.stack([np.arange(NUM_HELD), np.zeros(NUM_HELD, np.int64)], axis=1)
    sequence = 0
    while pipe.recv():
        sequence += 1
        heartbeats = [codec.encode(heartbeat(number, sequence, holds)) for number in range(NUM_PEERS)]
        start = time.perf_counter()
        for peer, frames in zip(peers, heartbeats, strict=True):
            peer.send_multipart(frames)
        for peer in peers:
            peer.recv_multipart()
        pipe.send(time.perf_counter() - start)
        pipe.recv()  # the directives have changed
        for peer in peers:
            peer.recv_multipart()
        pipe.send(None)


def identity(number: int) -> bytes:
    """Return the identity of a peer."""
    return identity_of(f"rollout-{number}", f"{number:016x}")


def heartbeat(number: int, sequence: int, holds: np.ndarray[Any, np.dtype[np.int64]]) -> RolloutHeartbeat:
    """Return the heartbeat of a rollout actor."""
    return RolloutHeartbeat(
        run="0123456789abcdef",
        name=f"rollout-{number}",
        boot_id=f"{number:016x}",
        sequence=sequence,
        phase="running",
        fingerprint=fingerprint(),
        free_slots=0,
        failures=[],
        holds=holds + NUM_HELD * number * np.array([1, 0]),
    )


def directive(step: int) -> RolloutDirective:
    """Return the directive for a rollout actor: 8 engines, 4 reward actors, 5 releases."""
    policy = PolicyVersion(lineage=1, version=step)
    return RolloutDirective(
        run="0123456789abcdef",
        term=1,
        phase="running",
        step=step,
        max_steps=1000,
        tickets=[],
        engines=[
            EnginePeer(name=f"inference-{i}", boot_id=f"{i:016x}", url=f"http://10.0.0.{i}:8000", policy=policy, load=3)
            for i in range(8)
        ],
        rewards=[
            RewardPeer(name=f"reward-{i}", boot_id=f"{i:016x}", address=f"tcp://10.0.1.{i}:7000", load=3)
            for i in range(4)
        ],
        live_engines=[f"{i:016x}" for i in range(8)],
        live_rewards=[f"{i:016x}" for i in range(4)],
        scoring=np.zeros((0, 2), np.int64),
        release=np.stack([np.arange(5), np.zeros(5, np.int64)], axis=1),
    )


def measure_control() -> dict[str, Any]:
    """Measure the CPU time of the packer's side."""
    allow_many_sockets()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        return measure_control_at(f"ipc://{folder}/control")


def measure_control_at(address: str) -> dict[str, Any]:
    """Measure the CPU time of the packer's side at an address."""
    server = ControlServer(address, lambda identity, heartbeat: None)
    directives: dict[bytes, Directive | None] = {identity(number): directive(0) for number in range(NUM_PEERS)}
    server.publish(directives)
    server.start()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=be_peers, args=(theirs, address))
    child.start()
    answered, pushed, waves = [], [], []
    for step in range(1, ROUNDS + 1):
        directives = {identity(number): directive(step) for number in range(NUM_PEERS)}
        start = time.process_time()
        pipe.send(True)
        waves.append(pipe.recv())
        middle = time.process_time()
        pipe.send(None)
        server.publish(directives)
        pipe.recv()
        answered.append((middle - start) / NUM_PEERS)
        pushed.append((time.process_time() - middle) / NUM_PEERS)
    pipe.send(False)
    child.join()
    server.close()
    return {
        "peers": NUM_PEERS,
        "held": NUM_HELD,
        "heartbeat_and_directive_us": 1e6 * statistics.median(answered),
        "changed_directive_us": 1e6 * statistics.median(pushed),
        "wave_seconds": statistics.median(waves),
    }


def allow_many_sockets() -> None:
    """Raise the limits of open files and of ZeroMQ sockets for 1 000 peers."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 2 * NUM_PEERS)


# --- report ----------------------------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Measure data plane and control plane."""
    data = [result for transport in ("tcp", "ipc") for result in measure_data(transport)]
    return {"data": data, "control": measure_control()}


def show(results: dict[str, Any]) -> str:
    """Return a table of each plane."""
    rows: list[list[object]] = [["transport", "size", "frames", "bus msg/s", *(f"{w} msg/s" for w in RAW_WAYS), "MB/s"]]
    rows[0].append("bus / best raw")
    for r in results["data"]:
        rates = r["messages_per_second"]
        megabytes = r["bytes_per_second"]["bus"] / 1e6
        rows.append([r["transport"], r["size"], r["num_frames"], *rates.values(), megabytes, r["share_of_raw"]])
    control = results["control"]
    line = (
        f"control, {control['peers']} peers with {control['held']} groups each: "
        f"{control['heartbeat_and_directive_us']:.0f} us CPU per heartbeat with its directive, "
        f"{control['changed_directive_us']:.0f} us per changed directive; all in {control['wave_seconds']:.2f} s"
    )
    return f"{table(rows)}\n\n{line}"


if __name__ == "__main__":
    finish(__doc__, measure, show)
