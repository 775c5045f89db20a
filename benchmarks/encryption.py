"""Throughput of the encrypted bus, compared with a CURVE pair of pyzmq, and cost of refused connections.

    python -m benchmarks.encryption [--json PATH]

*Data.* An `Outbox` in this process sends `RolloutGroup`s to an `Inbox` in another process over tcp loopback, with keys.
The raw ways use a PUSH and a PULL socket of pyzmq with the same options and keys and send frames of the same bytes,
with and without copying; they encode and check nothing. `typed` is a raw pair that encodes and decodes messages.
`plain` is the bus without keys, in another pair of processes.
Rounds of all ways alternate. Rates are medians over rounds; the share compares with the better raw way of the same
round.

*Refused connections.* An `Inbox` in this process gets groups of 4 KiB at a fixed rate from an admitted sender, the
friend, in a second process. A third process, the stranger, opens connections at a fixed rate: in plaintext, with keys
of another run, with a key that is not listed. `ms` is CPU time of all threads of this process per attempt, less the CPU
time that the friend alone takes in a period of the same length. Memory is the RSS of this process after a warm-up and
after the last attempt. The friend's rate is measured at arrival.
"""

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from actors.process.descriptors import raise_limits
from benchmarks.bus import RAW_WAYS, SIZES, config
from benchmarks.codec import make_group
from benchmarks.machine import finish, table
from bus import codec, keys
from bus.data import Inbox, Outbox
from bus.encryption import keys_for, secure_client, split_key
from bus.topology import Addresses, prepare
from schemas import limits
from schemas.config import RunConfig

ROUNDS = 7
FRIENDS_PER_SECOND, STRANGERS_PER_SECOND = 200, 500
NUM_STRANGERS, NUM_WARM = 3334, 300
"""Number of attempts of each kind."""
STRANGER_SECONDS = 0.3
"""Lifetime of a stranger's socket, longer than a handshake."""
KINDS = ("plaintext", "wrong_server_key", "unlisted_key")
FULL_SECONDS = {"4 KiB": 2e-4, "1 MiB": 1e-3}
"""Pause before a full outbox is tried again, short against the time in which its queue empties."""
OWN_PAIR = zmq.curve_keypair()
RAW_CONTEXT: zmq.Context[zmq.Socket[bytes]] = zmq.Context()


def encrypted(folder: str) -> RunConfig:
    """Return the configuration of a run on tcp with keys."""
    run = config("tcp")
    return run.model_copy(update={"bus": run.bus.model_copy(update={"keys": folder})})


# --- data ------------------------------------------------------------------------------------------------------------


def raw_socket(kind: int, run: RunConfig) -> "zmq.Socket[bytes]":
    """Return a bare socket with the options of the bus, in a context without the bus's list of keys."""
    socket: zmq.Socket[bytes] = RAW_CONTEXT.socket(kind)
    prepare(socket, run.bus.high_water_mark, None, limits.DATA_FRAME_BYTES)
    return socket


def receive(pipe: Connection, folder: str) -> None:
    """Bind all sockets, then time each round from its first message to its last. Runs in a child process."""
    run = encrypted(folder)
    inbox = Inbox("groups", Addresses(run), run.bus, "bench", "1")
    plain = Inbox("groups", Addresses(config("tcp")), config("tcp").bus, "bench", "2")
    raw = raw_socket(zmq.PULL, run)
    raw.setsockopt(zmq.CURVE_SERVER, 1)
    raw.setsockopt(zmq.CURVE_SECRETKEY, keys.load(Path(folder)).server_secrets[0])
    raw.bind("tcp://127.0.0.1:*")
    pipe.send((inbox.address, plain.address, raw.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")))
    takes: dict[str, Callable[[], object]] = {
        "bus": lambda: inbox.receive(60.0),
        "plain": lambda: plain.receive(60.0),
        **{way: lambda copy=copy: raw.recv_multipart(copy=copy) for way, copy in RAW_WAYS.items()},
        "typed": lambda: codec.decode(raw.recv_multipart(copy=False)[1:]),
    }
    while (task := pipe.recv()) is not None:
        way, count = task
        take = takes[way]
        take()
        start = time.perf_counter()
        for _ in range(count - 1):
            take()
        pipe.send((count - 1) / (time.perf_counter() - start))


def measure_data(folder: str) -> list[dict[str, Any]]:
    """Measure messages per second of all ways and sizes."""
    context, run = multiprocessing.get_context("spawn"), encrypted(folder)
    pipe, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, folder))
    child.start()
    address, plain_address, raw_address = pipe.recv()
    boxes = {
        "bus": Outbox("groups", address, run.bus, "rollout-0"),
        "plain": Outbox("groups", plain_address, config("tcp").bus, "rollout-0"),
    }
    raw, ring = raw_socket(zmq.PUSH, run), keys_for(address, run.bus)
    assert ring
    secure_client(raw, ring, ring.current().server_publics, 0)
    raw.connect(raw_address)
    results = [measure_size(size, pipe, boxes, raw) for size in SIZES]
    pipe.send(None)
    child.join()
    closables: list[Any] = [*boxes.values(), raw]
    for closable in closables:
        closable.close()
    return results


def measure_size(size: str, pipe: Connection, boxes: dict[str, Outbox], raw: "zmq.Socket[bytes]") -> dict[str, Any]:
    """Measure all ways in turn, in several rounds."""
    tokens, count = SIZES[size]
    group = make_group(1, tokens)
    frames = [b"rollout-0", *codec.encode(group)]

    def send_typed(outbox: Outbox) -> None:
        while not outbox.try_send(group):
            time.sleep(FULL_SECONDS[size])

    sends: dict[str, Callable[[], object]] = {
        **{way: lambda outbox=outbox: send_typed(outbox) for way, outbox in boxes.items()},
        **{way: lambda copy=copy: raw.send_multipart(frames, copy=copy) for way, copy in RAW_WAYS.items()},
        "typed": lambda: raw.send_multipart([b"rollout-0", *codec.encode(group)], copy=False),
    }
    rates: dict[str, list[float]] = {way: [] for way in sends}
    for _ in range(ROUNDS):
        for way, send in sends.items():
            pipe.send((way, count))
            for _ in range(count):
                send()
            rates[way].append(pipe.recv())
    medians = {way: statistics.median(values) for way, values in rates.items()}
    best_raw = [max(pair) for pair in zip(*(rates[way] for way in RAW_WAYS), strict=True)]
    return {
        "size": size,
        "message_bytes": codec.num_bytes(frames),
        "messages_per_second": medians,
        "bus_bytes_per_second": medians["bus"] * codec.num_bytes(frames),
        "share_of_raw": share(rates["bus"], best_raw),
        "share_of_typed": share(rates["bus"], rates["typed"]),
    }


def share(mine: list[float], others: list[float]) -> float:
    """Return the median over rounds of the ratio of two rates."""
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


# --- strangers -------------------------------------------------------------------------------------------------------


def be_friend(address: str, folder: str) -> None:
    """Send groups at a fixed rate until killed. Runs in a child process."""
    outbox = Outbox("groups", address, encrypted(folder).bus, "rollout-0")
    group, due = make_group(1, SIZES["4 KiB"][0]), time.perf_counter()
    while True:
        outbox.try_send(group)
        due += 1 / FRIENDS_PER_SECOND
        time.sleep(max(0.0, due - time.perf_counter()))


def be_strangers(pipe: Connection, address: str, folder: str) -> None:
    """Open `count` connections of a kind at a fixed rate when told to; report the time taken.

    Runs in a child process.
    """
    raise_limits(encrypted(folder))
    endpoint, (server,) = split_key(address, keys_for(address, encrypted(folder).bus))
    while (task := pipe.recv()) is not None:
        kind, count = task
        alive: deque[tuple[float, zmq.Socket[bytes]]] = deque()
        start = time.perf_counter()
        for number in range(count):
            alive.append((time.perf_counter() + STRANGER_SECONDS, stranger(kind, endpoint, server)))
            while alive[0][0] < time.perf_counter():
                alive.popleft()[1].close(0)
            time.sleep(max(0.0, start + (number + 1) / STRANGERS_PER_SECOND - time.perf_counter()))
        pipe.send(time.perf_counter() - start)
        time.sleep(STRANGER_SECONDS)
        for _, socket in alive:
            socket.close(0)


def stranger(kind: str, endpoint: str, server: bytes) -> "zmq.Socket[bytes]":
    """Open one connection, without a retry."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if kind != "plaintext":
        socket.curve_publickey, socket.curve_secretkey = OWN_PAIR
        socket.setsockopt(zmq.CURVE_SERVERKEY, server if kind == "unlisted_key" else OWN_PAIR[0])
    socket.connect(endpoint)
    return socket


def measure_strangers(folder: str) -> dict[str, Any]:
    """Measure every kind in turn, during the friend's traffic."""
    context, run = multiprocessing.get_context("spawn"), encrypted(folder)
    inbox = Inbox("groups", Addresses(run), run.bus, "bench", "1")
    pipe, theirs = context.Pipe()
    friend = context.Process(target=be_friend, args=(inbox.address, folder), daemon=True)
    strangers = context.Process(target=be_strangers, args=(theirs, inbox.address, folder), daemon=True)
    friend.start()
    strangers.start()
    threading.Thread(target=read_for_ever, args=(inbox,), daemon=True).start()
    while not inbox.counts.num_messages:
        time.sleep(0.01)
    for kind in KINDS:
        attempt(inbox, pipe, kind, NUM_WARM)
    rss_before = rss_bytes()
    quiet_cpu, quiet_rate = quiet(inbox, NUM_STRANGERS / STRANGERS_PER_SECOND)
    by_kind = {kind: attempt(inbox, pipe, kind, NUM_STRANGERS, quiet_cpu) for kind in KINDS}
    rss_after = rss_bytes()
    pipe.send(None)
    friend.kill()
    return {
        "attempts": NUM_STRANGERS * len(KINDS),
        "friend_per_second_alone": quiet_rate,
        "by_kind": by_kind,
        "rss_before_bytes": rss_before,
        "rss_after_bytes": rss_after,
    }


def read_for_ever(inbox: Inbox) -> None:
    while True:
        inbox.receive(1.0)


def quiet(inbox: Inbox, seconds: float) -> tuple[float, float]:
    """Return CPU seconds per second and messages per second without strangers."""
    cpu, messages, start = time.process_time(), inbox.counts.num_messages, time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - start
    return (time.process_time() - cpu) / passed, (inbox.counts.num_messages - messages) / passed


def attempt(inbox: Inbox, pipe: Connection, kind: str, count: int, quiet_cpu: float = 0.0) -> dict[str, float]:
    """Return the cost of a number of attempts in this process."""
    refused = inbox.counts.refused.total()
    cpu, messages, start = time.process_time(), inbox.counts.num_messages, time.perf_counter()
    pipe.send((kind, count))
    seconds = pipe.recv()
    while inbox.counts.refused.total() < refused + count and time.perf_counter() < start + seconds + 5.0:
        time.sleep(0.01)
    passed = time.perf_counter() - start
    return {
        "attempts_per_second": count / seconds,
        "refused": inbox.counts.refused.total() - refused,
        "cpu_ms": 1e3 * (time.process_time() - cpu - quiet_cpu * passed) / count,
        "friend_per_second": (inbox.counts.num_messages - messages) / passed,
    }


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- report ----------------------------------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Measure throughput and refused connections."""
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = Path(parent) / "keys"
        keys.make(folder)
        return {"data": measure_data(str(folder)), "strangers": measure_strangers(str(folder))}


def show(results: dict[str, Any]) -> str:
    """Return two tables and a line about memory."""
    rows: list[list[object]] = [["size", "bus msg/s", "plain msg/s", *(f"{way} msg/s" for way in RAW_WAYS)]]
    rows[0] += ["typed msg/s", "MB/s", "bus / best raw", "bus / typed"]
    for r in results["data"]:
        megabytes = r["bus_bytes_per_second"] / 1e6
        rows.append([r["size"], *r["messages_per_second"].values(), megabytes, r["share_of_raw"], r["share_of_typed"]])
    found = results["strangers"]
    kinds: list[list[object]] = [["stranger", "attempts/s", "refused", "ms of CPU each", "friend's msg/s"]]
    kinds += [[kind, *values.values()] for kind, values in found["by_kind"].items()]
    line = (
        f"{found['attempts']} attempts: RSS {found['rss_before_bytes'] / 2**20:.1f} MiB before, "
        f"{found['rss_after_bytes'] / 2**20:.1f} after; the friend alone: {found['friend_per_second_alone']:.0f} msg/s"
    )
    return f"{table(rows)}\n\n{table(kinds)}\n\n{line}"


if __name__ == "__main__":
    finish(__doc__, measure, show)
