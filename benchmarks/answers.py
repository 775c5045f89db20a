"""Answers of an engine to a rollout actor, in msgpack and in the JSON of the completions API.

    python -m benchmarks.answers [--rounds 5] [--json PATH]

The same completions are written by the code of the server and read by the code of the client; forms are interleaved.

`MB`          size of the answer
`write ms`    CPU time of the inference actor
`read ms`     CPU time of the rollout actor
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from actors.engines.http import binary
from actors.engines.http.answers import TextAnswer
from actors.engines.http.requests import CompletionRequest
from actors.engines.protocol import Completion
from actors.trajectories.parsing import Parsed
from benchmarks.machine import publish

SIZES = {"16 x 256": (16, 256), "64 x 4096": (64, 4096), "64 x 32768": (64, 32_768)}
VOCAB_SIZE = 150_000


def completions_of(number: int, length: int) -> list[Completion]:
    """Return completions with random tokens and logprobs in float32, as engines have them."""
    random = np.random.default_rng(0)
    return [
        Completion(
            random.integers(VOCAB_SIZE, size=length).tolist(),
            (-random.exponential(size=length)).astype(np.float32).tolist(),
            [(0, 1, 1)],
            "length",
        )
        for _ in range(number)
    ]


def in_json(completions: list[Completion]) -> bytes:
    """Return the answer of the completions API that has token ids and logprobs."""
    asked = CompletionRequest(
        model="m", prompt=[1], n=len(completions), logprobs=0, return_token_ids=True, max_tokens=1 << 20
    )
    answer = TextAnswer(asked, [[1]], "boot", text_of, lambda token: f" {token}", lambda *_: Parsed(""))
    return json.dumps(answer.whole(completions)).encode()


def text_of(token_ids: Any) -> str:
    """Return a text of four characters a token."""
    return " abc" * len(token_ids)


def in_msgpack(completions: list[Completion]) -> bytes:
    """Return the answer to a rollout actor."""
    return binary.encode("boot", completions, [text_of(completion.token_ids) for completion in completions])


FORMS: dict[str, tuple[Callable[[list[Completion]], bytes], Callable[[bytes], Any]]] = {
    "json": (in_json, json.loads),
    "msgpack": (in_msgpack, binary.decode),
}


def measure(size: str, rounds: int) -> list[dict[str, Any]]:
    """Measure a size in both forms; medians over the rounds."""
    completions = completions_of(*SIZES[size])
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    num_bytes: dict[str, int] = {}
    for _ in range(rounds):
        for form, (write, read) in FORMS.items():
            started = time.process_time()
            body = write(completions)
            written = time.process_time()
            read(body)
            times[form].append((written - started, time.process_time() - written))
            num_bytes[form] = len(body)
    return [
        {
            "size": size,
            "form": form,
            "MB": num_bytes[form] / 1e6,
            "write ms": 1000 * statistics.median(write for write, _ in times[form]),
            "read ms": 1000 * statistics.median(read for _, read in times[form]),
        }
        for form in FORMS
    ]


def main() -> None:
    """Measure all sizes, print a table, and write results with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for size in SIZES for row in measure(size, arguments.rounds)]
    publish({"answers": rows}, rows, arguments.json)


if __name__ == "__main__":
    main()
