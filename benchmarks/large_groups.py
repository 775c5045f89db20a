"""Scored groups of any size through the packer's inbox, digest and ledger, per second.

    python -m benchmarks.large_groups [--seconds 15] [--json PATH]

A child process sends copies of a group over tcp. This process takes them in with the packer's own threads, which read,
digest and write large ones to files, and commits them, a commit for all that have come, as the packer does. Payloads
are deleted once more than 128 groups are stored. The limit of each size is measured in the same run: the same bytes
written to a file next to the ledger, flushed for each group as a large payload is.

`groups/s`   groups committed per second
`MB/s`       their bytes
`limit`      bytes per second of the plain file, over those of the ledger
`commit ms`  commit of a group, of wall time; the packer's rounds stand still meanwhile
"""

import argparse
import multiprocessing
import os
import queue
import time
from pathlib import Path
from typing import Any

from actors.ledger import Changes, Store
from actors.ledger.payload_files import MIN_BYTES
from actors.packer.inflow import GroupArrived
from actors.packer.intake import Intake
from benchmarks.bus import config
from benchmarks.codec import make_group
from benchmarks.machine import publish, scratch
from bus import codec
from bus.data import Inbox, Outbox
from bus.topology import Addresses

SIZES = {"16 x 256": (16, 256), "16 x 2048": (16, 2048), "64 x 4096": (64, 4096), "64 x 32768": (64, 32_768)}
KEPT = 128
"""Groups in the ledger before the oldest are deleted, as trained ones are."""
TEXT = "She sold 48 / 2 = 24 clips in May. "
"""Text of nine tokens; completions are as long as their tokens ask for."""


def send(address: str, completions: int, tokens: int) -> None:
    """Send a group again and again, each time with another ordinal. Runs in a child process until it is killed."""
    outbox = Outbox("scored", address, config("tcp").bus, "reward-0")
    group = make_group(completions, tokens)
    group = group.model_copy(update={"completions": [TEXT * (tokens // 9)] * completions})
    for ordinal in range(1 << 30):
        numbered = group.model_copy(update={"ordinal": ordinal})
        while not outbox.try_send(numbered):
            time.sleep(0.001)


def measure(size: str, seconds: float) -> dict[str, Any]:
    """Measure a size."""
    completions, tokens = SIZES[size]
    with scratch() as folder:
        run = config("tcp")
        inbox = Inbox("scored", Addresses(run), run.bus, "packer-0", "boot")
        arrived: queue.Queue[GroupArrived] = queue.Queue(4)
        store = Store(folder / "ledger.sqlite")
        intake = Intake(inbox, make_group(1, 1).run, store.files, arrived.put)
        intake.start()
        sender = multiprocessing.get_context("spawn").Process(
            target=send, args=(inbox.address, completions, tokens), daemon=True
        )
        sender.start()
        stored: list[int] = []
        num_groups, num_bytes, committing, started = 0, 0, 0.0, 0.0
        while not started or time.perf_counter() - started < seconds:
            taken = [arrived.get(timeout=60.0)]
            while not arrived.empty():
                taken.append(arrived.get())
            settled = {one.message.ordinal: (one.digest, one.frames) for one in taken}  # type: ignore[attr-defined]
            places = {one.message.ordinal: one.place for one in taken if one.place}  # type: ignore[attr-defined]
            gone, stored = stored[:-KEPT], stored[-KEPT:]
            begun = time.perf_counter()
            store.commit(Changes(gone_groups=gone), settled, places)
            stored += settled
            if not started:  # the first groups are not counted
                started = time.perf_counter()
                continue
            committing += time.perf_counter() - begun
            num_groups += len(settled)
            num_bytes += sum(codec.num_bytes(frames) for _, frames in settled.values())
        took = time.perf_counter() - started
        sender.kill()
        intake.close()
        inbox.close()
        store.close()
        plain = plain_rate(folder / "plain", num_bytes, num_bytes // num_groups)
    return {
        "size": size,
        "MB": num_bytes / num_groups / 1e6,
        "groups/s": num_groups / took,
        "MB/s": num_bytes / took / 1e6,
        "limit": plain / (num_bytes / took),
        "commit ms": 1000 * committing / num_groups,
    }


def plain_rate(path: Path, num_bytes: int, piece: int) -> float:
    """Return the bytes per second of a plain file of as many bytes, written in pieces of a group."""
    data = os.urandom(piece)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // piece):
            file.write(data)
            if piece >= MIN_BYTES:
                os.fdatasync(file.fileno())
    return num_bytes / (time.perf_counter() - started)


def main() -> None:
    """Measure all sizes, print a table, and write results with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(size, arguments.seconds) for size in arguments.sizes.split(",")]
    publish({"large_groups": rows}, rows, arguments.json)


if __name__ == "__main__":
    main()
