"""Cost of `inference.engine.deterministic`: completions per second of two engines that differ only in this key.

Requests for 16 completions each arrive together, as from the quickstart's rollout; the model is the quickstart's before
training. Both engines run in this process and take turns, so that other load on the machine affects both. Figures are
medians of 15 rounds; the ratio is the median of the rounds' ratios. A single request has no batch to share.

    python -m benchmarks.deterministic [--json PATH]
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from actors.datasets.generated import ReverseText
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import SampleRequest
from benchmarks.machine import finish, table
from schemas.config.data import ReverseTextConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig

MODEL = Path(__file__).parent.parent / "examples" / "quickstart" / "model.py"
COMPLETIONS, MAX_TOKENS, ROUNDS, WARMUP = 16, 12, 15, 3


def make_engine(model: Path, deterministic: bool) -> EmbeddedEngine:
    """Return the quickstart's engine, with or without the key."""
    config = EmbeddedEngineConfig(max_sequences=256, max_sequence_len=64, deterministic=deterministic)
    return EmbeddedEngine(ModelConfig(path=str(model), dtype="float32", device="cpu"), config, "interrupt")


def seconds(engine: EmbeddedEngine, requests: list[SampleRequest]) -> float:
    """Return the seconds from the first request's submission to the last request's completions."""
    start = time.perf_counter()
    for future in [engine.submit(request) for request in requests]:
        future.result(60.0)
    return time.perf_counter() - start


def compare(shared: EmbeddedEngine, alone: EmbeddedEngine, requests: list[SampleRequest]) -> dict[str, Any]:
    """Compare both engines in turn, round by round."""
    rounds = [(seconds(shared, requests), seconds(alone, requests)) for _ in range(WARMUP + ROUNDS)][WARMUP:]
    completions = COMPLETIONS * len(requests)
    return {
        "requests": len(requests),
        "completions": completions,
        "default_per_second": completions / statistics.median(a for a, _ in rounds),
        "deterministic_per_second": completions / statistics.median(b for _, b in rounds),
        "ratio": statistics.median(a / b for a, b in rounds),
    }


def measure() -> dict[str, Any]:
    """Measure with one request and with eight."""
    environment = ReverseText(ReverseTextConfig(), "train", 0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, MODEL, model], check=True, capture_output=True)
        engines = [make_engine(model, deterministic) for deterministic in (False, True)]
        prompts = [engines[0].tokenize(str(environment.example(i).prompt)) for i in range(8)]
        requests = [SampleRequest(p, COMPLETIONS, MAX_TOKENS, 1000 * i) for i, p in enumerate(prompts)]
        results = [compare(engines[0], engines[1], requests[:count]) for count in (1, 8)]
        for engine in engines:
            engine.close()
    return {"torch_threads": torch.get_num_threads(), "results": results}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per number of requests."""
    head = ["requests", "completions", "default /s", "deterministic /s", "ratio"]
    return table([head, *(list(row.values()) for row in results["results"])])


if __name__ == "__main__":
    finish(__doc__, measure, show)
