"""Parts shared by all benchmarks: description of the machine, table of results, JSON file.

Run a benchmark from the repository's root as `python -m benchmarks.NAME`. `python benchmarks/bus.py` would fail,
because the file would hide the package `bus`.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("numpy", "pydantic", "msgpack", "pyzmq", "torch", "transformers", "peft")
COMMIT = "BENCHMARK_COMMIT"
"""Environment variable with the commit, for a copy of the repository without .git."""
PEAK = {
    r"H100 80GB HBM3": 989e12,
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H200": 989e12,
    r"H200 NVL": 835e12,
    r"GH200 \d+GB.*": 990e12,
    r"A100-SXM4-\d+GB": 312e12,
    r"A100-PCIE-40GB|A100 80GB PCIe": 312e12,
    r"L40S": 362e12,
}
"""Dense bfloat16 operations per second by product, from the vendor's data sheets (half of a figure with sparsity).

Keys are patterns of the whole product name, without NVIDIA: cards of one chip differ by a quarter, and a slice of a
card (MIG) has a suffix and no value here.
"""


def machine() -> dict[str, Any]:
    """Return a description of this machine, its GPUs and its software."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit(),
        **{package: package_version(package) for package in PACKAGES},
        **accelerator(),
    }


def accelerator() -> dict[str, Any]:
    """Return the GPUs, their driver, and the libraries of torch for them; without a GPU an empty list of GPUs."""
    from actors.process.devices import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return {"gpus": gpus}  # None: GPUs that NVML can't count
    import pynvml
    import torch  # imported here: most benchmarks need no torch

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    return {
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory} for gpu in gpus],
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
    }


def peak_flops(product: str) -> float | None:
    """Return the dense bfloat16 operations per second of a GPU by its product name; None if the table lacks it."""
    name = product.removeprefix("NVIDIA ")
    return next((value for pattern, value in PEAK.items() if re.fullmatch(pattern, name)), None)


def package_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` after changes; else the value of BENCHMARK_COMMIT, or None."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return os.environ.get(COMMIT)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned columns; the first row is the head.

    Numbers are right-aligned, with at least three digits.
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if isinstance(value, str) else cell.rjust(width)
            for cell, value, width in zip(line, row, widths, strict=True)
        ).rstrip()
        for line, row in zip(cells, rows, strict=True)
    )


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.1f}"
    return str(cell)


def microseconds(work: Callable[[], object], calls: int = 2000, rounds: int = 15) -> float:
    """Return the CPU time of one call: the median over rounds, with the garbage collector on."""
    for _ in range(calls // 10):
        work()
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            work()
        seconds.append((time.thread_time() - start) / calls)
    return 1e6 * statistics.median(seconds)


def publish(results: dict[str, Any], rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Print rows of equal keys as a table, and write results and machine to a file if a path is given."""
    print(table([list(rows[0]), *(list(row.values()) for row in rows)]))
    write(results, path)


def write(results: dict[str, Any], path: Path | None) -> None:
    """Write results and machine to a file if a path is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder under outputs/. /tmp may be in memory, where no disk would be measured."""
    Path("outputs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="outputs") as folder:
        yield Path(folder)


def finish(
    description: str | None, measure: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], str]
) -> None:
    """Run a benchmark: measure, print, and with `--json PATH` write results and machine to the file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results and the machine there")
    path = parser.parse_args().json
    results = measure()
    print(show(results))
    write(results, path)
