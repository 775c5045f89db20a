"""Throughput of the bus's data plane, compared with raw pyzmq.

    python -m benchmarks.bus [--json PATH]

An `Outbox` in this process sends `RolloutGroup`s to an `Inbox` in another process, over tcp loopback and over
ipc. The raw ways use a PUSH and a PULL socket of pyzmq with the same options and send frames of the same bytes
(`send_multipart`, `recv_multipart`, with and without copying); they encode and check nothing. Rounds of all ways
alternate. Rates are medians over rounds; the share compares with the better raw way of the same round. Both processes
run at the same time, and share the cores with ZeroMQ's threads.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zmq

from benchmarks.codec import make_group
from benchmarks.machine import finish, table
from bus import codec
from bus.data import Inbox, Outbox
from bus.topology import Addresses, prepare
from schemas import limits
from schemas.config import RunConfig, check_tree

SIZES = {"4 KiB": (360, 6000), "1 MiB": (116_400, 200)}
"""Tokens of the completion, and messages per round, by size of a message."""
ROUNDS = 9
RAW_WAYS = {"raw": True, "raw no copy": False}


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


# --- report ----------------------------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Measure both transports."""
    return {"data": [result for transport in ("tcp", "ipc") for result in measure_data(transport)]}


def show(results: dict[str, Any]) -> str:
    """Return a table."""
    rows: list[list[object]] = [["transport", "size", "frames", "bus msg/s", *(f"{w} msg/s" for w in RAW_WAYS), "MB/s"]]
    rows[0].append("bus / best raw")
    for r in results["data"]:
        rates = r["messages_per_second"]
        megabytes = r["bytes_per_second"]["bus"] / 1e6
        rows.append([r["transport"], r["size"], r["num_frames"], *rates.values(), megabytes, r["share_of_raw"]])
    return table(rows)


if __name__ == "__main__":
    finish(__doc__, measure, show)
