"""Seconds and memory of a process that opens a data set of a million rows, by format.

    python -m benchmarks.data [--json PATH]

A row has a question of 40 words, an answer of 60 words and a level, 620 bytes in all. Each process imports the code,
opens the data set, computes the digest of the files as a packer does, and reads 2 000 rows in random order. The first
process indexes or converts the files; the second finds its work done. Limits for parquet until the data set is open:
3 s of CPU time, and 300 MiB. Pages of mapped files count as memory once they are read; the kernel takes them back when
others need memory.
"""

import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import finish, table

ROWS, BATCH, READ = 1_000_000, 50_000, 2_000
LIMIT_SECONDS, LIMIT_MIB = 3.0, 300.0
FORMATS = {
    "parquet, groups of 1 000": "small.parquet",
    "parquet, groups of 50 000": "middle.parquet",
    "parquet, one group": "large.parquet",
    "arrow": "rows.arrow",
    "jsonl": "rows.jsonl",
    "jsonl.gz": "rows.jsonl.gz",
}
CHILD = """
import json, random, sys, time
started, clock = time.process_time(), time.perf_counter()
from pathlib import Path
from actors.datasets import make_dataset
from actors.datasets.prepared import Prepared
from schemas.config.data import DatasetConfig
imported = time.process_time()
path, num_read = sys.argv[1], int(sys.argv[2])
config = DatasetConfig(path=path, columns={"prompt": "question"})
table = make_dataset(config, "train", 0, prepared=Prepared(Path(path + ".prepared")))
opened = time.process_time()
identity = table.identity()
known, wall = time.process_time(), time.perf_counter() - clock

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

open_mib = peak()
numbers = random.Random(1).choices(range(table.num_examples), k=num_read)
reading = time.perf_counter()
for number in numbers:
    table.example(number)
done = time.perf_counter()
print(json.dumps({"rows": identity["rows"], "import": imported - started, "open": opened - imported,
    "digest": known - opened, "wall": wall, "mib": open_mib, "mib_after": peak(),
    "rows_per_second": num_read / (done - reading)}))
"""


def batches() -> Iterator[list[dict[str, str]]]:
    """Yield the rows, in lists."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    for start in range(0, ROWS, BATCH):
        yield [
            {
                "question": " ".join(rng.choices(words, k=40)),
                "answer": " ".join(rng.choices(words, k=60)),
                "level": f"{n}",
            }
            for n in range(start, start + BATCH)
        ]


def write(folder: Path) -> None:
    """Write the rows in all formats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"question": pa.string(), "answer": pa.string(), "level": pa.string()})
    with (
        pq.ParquetWriter(folder / "small.parquet", schema) as small,
        pq.ParquetWriter(folder / "middle.parquet", schema) as middle,
        pa.OSFile(str(folder / "rows.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as arrow,
        (folder / "rows.jsonl").open("wb") as lines,
    ):
        for rows in batches():
            batch = pa.Table.from_pylist(rows, schema)
            small.write_table(batch, row_group_size=1000)
            middle.write_table(batch, row_group_size=BATCH)
            arrow.write_table(batch, max_chunksize=1000)
            lines.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    pq.write_table(pq.read_table(folder / "middle.parquet"), folder / "large.parquet", row_group_size=ROWS)
    with gzip.open(folder / "rows.jsonl.gz", "wb", compresslevel=1) as packed:
        packed.write((folder / "rows.jsonl").read_bytes())


def measure() -> dict[str, Any]:
    """Open each file twice, in a new process each time."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a process of its own: what it takes to write the rows must not count
        subprocess.run([sys.executable, "-c", f"from benchmarks.data import *; write(Path({name!r}))"], check=True)
        for label, file in FORMATS.items():
            for start in ("first", "second"):
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, str(folder / file), str(READ)], capture_output=True, check=True
                )
                size = (folder / file).stat().st_size >> 20
                found.append(
                    {"format": label, "start": start, "file_mib": size, **json.loads(done.stdout.splitlines()[-1])}
                )
    return {"results": found}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per process."""
    rows = []
    for r in results["results"]:
        total = r["import"] + r["open"] + r["digest"]
        is_met = total <= LIMIT_SECONDS and r["mib"] <= LIMIT_MIB
        verdict = ("met" if is_met else "NOT MET") if r["format"].startswith("parquet") else "-"
        seconds = [f"{value:.2f}" for value in (r["import"], r["open"], r["digest"], total, r["wall"])]
        speed = f"{r['rows_per_second']:.0f}"
        memory = [f"{r['mib']:.0f}", f"{r['mib_after']:.0f}"]
        rows.append([r["format"], str(r["file_mib"]), r["start"], *seconds, *memory, speed, verdict])
    head = [
        "format",
        "MiB",
        "start",
        "import s",
        "open s",
        "digest s",
        "CPU s",
        "wall s",
        "MiB open",
        "MiB after",
        "rows/s",
    ]
    return table([[*head, f"≤ {LIMIT_SECONDS:g} s, {LIMIT_MIB:g} MiB"], *rows])


if __name__ == "__main__":
    finish(__doc__, measure, show)
