"""Cost of a message between two processes without the socket: encoding, decoding, reading every byte.

    python -m benchmarks.codec [--json PATH]

The message is a `RolloutGroup` with 1 or 16 completions of 1 024 tokens each, a prompt of 64 tokens and one segment per
completion. It is decoded from `bytes` with all checks on. `read` copies each array once, so that every byte is read.
Two other ways are measured in the same run:

- `limit`: `numpy.frombuffer` and one memcpy per frame, without checks;
- `lists`: the same fields in a pydantic model with `list[int]` and `list[float]`, sent as msgpack.

The benchmark has one process and one thread. Figures are medians of 15 rounds.
"""

from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict

from benchmarks.machine import finish, microseconds, table
from bus import codec
from schemas.messages import RolloutGroup, single_turn

TOKENS = 1024
GROUP_SIZES = (1, 16)


class ListGroup(BaseModel):
    """RolloutGroup with lists in place of arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    sender: str
    ordinal: int
    attempt: int
    purpose: str
    environment: str
    example_key: str
    prompt: str
    columns: dict[str, Any]
    completions: list[str]
    transcripts: list[str]
    stop_conditions: list[str]
    failures: list[str]
    prompt_ids: list[int]
    prompt_offsets: list[int]
    sample_offsets: list[int]
    sample_completions: list[int]
    sample_prompts: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    segments: list[list[int]]
    segment_temperatures: list[float]
    counts: list[list[int]]
    environment_reward_names: list[str]
    environment_rewards_EG: list[list[float]]
    turn_rewards: list[list[float]]


def make_group(num_completions: int, tokens: int = TOKENS) -> RolloutGroup:
    """Return a group as a rollout actor sends it."""
    rng = np.random.default_rng(0)
    num_tokens = num_completions * tokens
    starts = np.arange(num_completions) * tokens
    return RolloutGroup(
        run="0123456789abcdef",
        sender="rollout-0",
        ordinal=12345,
        attempt=0,
        purpose="train",
        environment="gsm8k",
        example_key="0123456789abcdef",
        prompt="Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
        columns={"answer": "72"},
        completions=["She sold 48 + 24 = 72 clips altogether."] * num_completions,
        stop_conditions=["stop"] * num_completions,
        token_ids=rng.integers(0, 50_000, num_tokens).astype(np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        logprobs=-rng.random(num_tokens).astype(np.float32),
        **single_turn(
            rng.integers(0, 50_000, 64).astype(np.int32),
            np.append(starts, num_tokens),
            np.stack([starts, np.ones_like(starts), np.full_like(starts, 7)], axis=1),
        ),
        segment_temperatures=np.ones(num_completions, np.float32),
    )


def read(group: RolloutGroup) -> None:
    """Read every byte of every array."""
    for name in RolloutGroup.layout.specs:
        group.__dict__[name].tobytes()


def measure_arrays(group: RolloutGroup) -> dict[str, float]:
    """Measure the codec."""
    frames = [bytes(frame) for frame in codec.encode(group)]
    decoded = codec.decode(frames)
    assert isinstance(decoded, RolloutGroup)
    return {
        "encode": microseconds(lambda: codec.encode(group)),
        "decode": microseconds(lambda: codec.decode(frames)),
        "read": microseconds(lambda: read(decoded)),
    }


def measure_limit(group: RolloutGroup) -> dict[str, float]:
    """Measure the same bytes without header and checks."""
    frames = [array.tobytes() for array in group.arrays().values()]
    dtypes = [array.dtype for array in group.arrays().values()]
    views = [np.frombuffer(frame, dtype) for frame, dtype in zip(frames, dtypes, strict=True)]
    return {
        "encode": microseconds(lambda: [view.data for view in views]),
        "decode": microseconds(lambda: [*map(np.frombuffer, frames, dtypes)]),
        "read": microseconds(lambda: [view.tobytes() for view in views]),
    }


def measure_lists(group: RolloutGroup) -> dict[str, float]:
    """Measure the same message with lists."""
    values = {name: getattr(group, name) for name in ListGroup.model_fields}
    listed = ListGroup(**{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()})
    data = msgpack.packb(listed.model_dump())
    return {
        "encode": microseconds(lambda: msgpack.packb(listed.model_dump()), 20),
        "decode": microseconds(lambda: ListGroup.model_validate(msgpack.unpackb(data)), 20),
        "read": 0.0,
    }


def measure() -> dict[str, Any]:
    """Measure all ways with both group sizes."""
    results = []
    for size in GROUP_SIZES:
        group = make_group(size)
        num_bytes = codec.num_bytes(codec.encode(group))
        for way, times in (
            ("codec", measure_arrays(group)),
            ("limit", measure_limit(group)),
            ("lists", measure_lists(group)),
        ):
            total = sum(times.values())
            results.append(
                {"group_size": size, "bytes": num_bytes, "way": way}
                | {f"{part}_us": value for part, value in times.items()}
                | {"total_us": total, "samples_per_second": 1e6 * size / total}
                | {"received_samples_per_second": 1e6 * size / (times["decode"] + times["read"])}
            )
    return {"tokens": TOKENS, "results": results}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per way and group size."""
    head = ["group", "way", "encode us", "decode us", "read us", "total us", "samples/s", "samples/s decode+read"]
    keys = ["encode_us", "decode_us", "read_us", "total_us", "samples_per_second", "received_samples_per_second"]
    return table([head, *([r["group_size"], r["way"], *(r[key] for key in keys)] for r in results["results"])])


if __name__ == "__main__":
    finish(__doc__, measure, show)
