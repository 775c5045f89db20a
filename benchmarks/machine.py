"""What every benchmark shares: the machine it ran on, the table it prints, the JSON it writes.

Benchmarks run from the repository's root as `python -m benchmarks.NAME`: run by path, `bus.py` would hide the package.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "pydantic", "msgpack", "pyzmq")


def machine() -> dict[str, Any]:
    """Describe where this runs."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    } | {package: version(package) for package in PACKAGES}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Align columns; the first row is the head. Numbers go to the right, with three significant digits or more."""
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
    """CPU time of one call: the median over rounds, the garbage collector running as it does in a process."""
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
    """Print rows of equal keys as a table, and write results and machine to a file when one is named."""
    print(table([list(rows[0]), *(list(row.values()) for row in rows)]))
    write(results, path)


def write(results: dict[str, Any], path: Path | None) -> None:
    """Write results and machine to a file, when one is named."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder under outputs/, where runs are: /tmp may be memory, and then no disk would be measured."""
    Path("outputs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="outputs") as folder:
        yield Path(folder)


def finish(
    description: str | None, measure: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], str]
) -> None:
    """Be the main function of a benchmark: measure, print, and with `--json PATH` write results and machine there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results and the machine there")
    path = parser.parse_args().json
    results = measure()
    print(show(results))
    write(results, path)
