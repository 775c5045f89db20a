"""Tokens/s and memory of a training step by rows, vocabulary, checkpointing and ranks, with the estimated memory.

    python -m benchmarks.trainer_scaling [--json PATH]

Each case is one process, or one process per rank. It trains three steps of two rows per rank; four samples without a
common prompt fill a row. The first step is a warm-up. On a CPU the ranks share its cores. `estimate` is the result of
`actors check --memory` for one rank, `measured` the largest resident set of a rank above the imports (on a GPU: the
largest memory allocated by torch). MALLOC_MMAP_THRESHOLD_ makes glibc give each tensor pages of its own; otherwise the
heap fragments, with LoRA to twice the memory in use. `Shape.flops` has the formula of the MFU, of a GPU in PEAK.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import finish, peak_flops, table
from benchmarks.trainer_cases import (
    Clock,
    Shape,
    Worker,
    answer,
    config_of,
    row_tokens,
    status_bytes,
    step_batch,
    worker,
    write_model,
)
from schemas.config import RunConfig

STEPS = 3
Sharding = Literal["none", "fsdp"]
MIDDLE = Shape(32_000, 640, 1_792, 10, 10, 2)
"""65 M parameters."""


@dataclass(frozen=True)
class Case:
    """Measured case: one process, or one per rank."""

    name: str
    shape: Shape
    sequence_len: int = 2_048
    checkpointing: bool = False
    lora: bool = False
    num_ranks: int = 1
    sharding: Sharding = "none"
    together: int = 1
    """Ranks that compute each row together (`trainer.context_parallel`)."""


def cases() -> Iterator[Case]:
    """Return cases that differ in one setting each, then the cases of the estimate's shape."""
    base = Case("22 M", Shape())
    yield base
    yield replace(base, sequence_len=1_024)
    yield replace(base, sequence_len=4_096)
    yield replace(base, sequence_len=4_096, checkpointing=True)
    yield replace(base, lora=True)
    for vocab_size in (8_000, 128_000):
        yield replace(base, shape=replace(base.shape, vocab_size=vocab_size))
    for lora in (False, True):
        yield replace(base, name="65 M", shape=MIDDLE, lora=lora)
    yield replace(base, name="65 M", shape=MIDDLE, checkpointing=True)
    for sharding in _shardings_here():
        yield replace(base, name="65 M", shape=MIDDLE, num_ranks=2, sharding=sharding)
    yield replace(base, sequence_len=8_192)
    yield replace(base, sequence_len=8_192, num_ranks=2, together=2)


def _shardings_here() -> tuple[Sharding, ...]:
    """Return the shardings to measure. On a GPU machine each shard needs a GPU."""
    import torch

    return ("none",) if torch.cuda.device_count() == 1 else ("none", "fsdp")


def measure() -> dict[str, Any]:
    """Measure all cases, one after the other."""
    return {"rows": [_measured(case) for case in cases()]}


def _measured(case: Case) -> dict[str, Any]:
    from actors.models.memory import estimate

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        write_model(folder / "model", case.shape)
        estimated = estimate(_config(case, folder)).trainer
        threads = str(max(1, (os.cpu_count() or 1) // case.num_ranks))
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-m", "benchmarks.trainer_scaling", "--case", folder, "--rank"]
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(worker([*command, rank], environment)) for rank in range(case.num_ranks)]
            return _row(case, estimated, [_step(ranks) for _ in range(STEPS)])


def _step(ranks: Sequence[Worker]) -> dict[str, float]:
    """Return a step of all ranks: the slowest rank's seconds, the largest peak, and sums of the rest."""
    for rank in ranks:
        rank.begin()
    measured = [rank.measured() for rank in ranks]
    combined = {key: sum(one[key] for one in measured) for key in measured[0]}
    return combined | {key: max(one[key] for one in measured) for key in ("seconds", "peak_bytes")}


def _config(case: Case, folder: Path) -> RunConfig:
    import torch

    model = {"lora": {} if case.lora else None, "gradient_checkpointing": case.checkpointing}
    device = {"device": "cuda", "dtype": "bfloat16"} if torch.cuda.is_available() else {"device": "cpu"}
    ranks = {"num_ranks": case.num_ranks, "sharding": case.sharding, "context_parallel": case.together}
    return config_of(folder / "model", case.sequence_len, model | device, **ranks)


def _row(case: Case, estimated: int, steps: list[dict[str, float]]) -> dict[str, Any]:
    last = steps[-1]
    seconds, cpu_seconds = (statistics.median(step[key] for step in steps[1:]) for key in ("seconds", "cpu_seconds"))
    return {
        "model": case.name + (" LoRA" if case.lora else ""),
        "row": case.sequence_len,
        "vocabulary": case.shape.vocab_size,
        "checkpointing": "yes" if case.checkpointing else "no",
        "ranks": f"{case.num_ranks}"
        + (f", {case.sharding}" if case.sharding != "none" else "")
        + (f", {case.together} a row" if case.together > 1 else ""),
        "tokens/s of rows": last["row_tokens"] / seconds,
        "of samples": last["tokens"] / seconds,
        "tokens/CPU s": last["tokens"] / cpu_seconds,
        "estimate MiB": estimated / 2**20,
        "measured MiB": last["peak_bytes"] / 2**20,
        "estimate/measured": estimated / last["peak_bytes"],
        "MFU": last["flops"] / seconds / last["peak_flops"] if last["peak_flops"] else "unknown",
    }


def run_case(folder: Path, rank: int) -> None:
    """Compute a step for each line on stdin."""
    import peft  # noqa: F401 - it counts as imported
    import torch

    from actors.assembly import make_learner
    from actors.learner.ranks import SINGLE_RANK, GlooRanks, Ranks

    given = json.loads((folder / "case.json").read_text())
    case = Case(**given | {"shape": Shape(**given["shape"])})
    on_gpu, imported = torch.cuda.is_available(), status_bytes("VmRSS")
    config = _config(case, folder)
    ranks: Ranks = SINGLE_RANK
    learner = make_learner(config, rank=rank)
    if case.num_ranks > 1:
        ranks = GlooRanks(rank, case.num_ranks, folder / "ranks", "127.0.0.1", lambda: None, 600.0)
        learner.join(ranks, lambda: None)
    groups = case.num_ranks // case.together
    lengths = [(case.sequence_len // 16, [3 * case.sequence_len // 16])] * (8 * groups)
    for step, _ in enumerate(sys.stdin, start=1):
        own = config.trainer.row_group_of(rank)
        batch = step_batch(lengths, case.shape.vocab_size, case.sequence_len, step, own, groups)
        clock = Clock()
        learner.step(batch, ranks)
        if on_gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if on_gpu else status_bytes("VmHWM") - imported
        answer(
            **clock.read(),
            tokens=batch.token_ids.size / case.together,
            row_tokens=row_tokens(lengths) / case.num_ranks,
            peak_bytes=peak,
            flops=case.shape.flops(lengths, case.lora) / case.num_ranks,
            peak_flops=(peak_flops(torch.cuda.get_device_name()) if on_gpu else None) or 0.0,
        )


def show(results: dict[str, Any]) -> str:
    """Return the table."""
    rows = results["rows"]
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    if "--case" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--case", type=Path, required=True)
        parser.add_argument("--rank", type=int, required=True)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        arguments = parser.parse_args()
        run_case(arguments.case, arguments.rank)
        os._exit(0)  # to tear collectives down in order is no part of the product: an actor leaves
    else:
        finish(__doc__, measure, show)
