"""Random models and batches for benchmarks of the trainer, and a worker process that is asked for one step at a time.

Steps of two workers take turns, so that a busy moment of the machine meets both. Memory is the largest resident set
of the process, less what it had once everything was imported.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.algorithms.batches import build_batches
from schemas.config import RunConfig
from schemas.messages import ScoredGroup, StepBatch, drop_fields

Lengths = Sequence[tuple[int, Sequence[int]]]
"""Tokens by group: of its prompt, of its completions."""


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model with random weights, heads of 64; embeddings are tied."""

    vocab_size: int = 32_000
    hidden_size: int = 384
    intermediate_size: int = 1_024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2


def write_model(folder: Path, shape: Shape) -> None:
    """A model directory; the same weights each time."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen3Config(**asdict(shape), **ends, head_dim=64, max_position_embeddings=32_768, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def config_of(folder: Path, sequence_len: int, model: dict[str, Any], **trainer: Any) -> RunConfig:
    """A run on it, on the CPU, in float32."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32", "device": "cpu"} | model,
            "environments": [{"type": "reverse_text"}],
            "reward": {"functions": [{"path": "characters_in_place"}]},
            "packer": {"sequence_len": sequence_len},
            "trainer": {"max_steps": 1000} | trainer,
        }
    )


def mixed_lengths(num_groups: int, group_size: int, longest: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """(prompt, completions) in tokens: prompts up to a quarter of the longest sample, lognormal completions."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_groups):
        prompt = int(rng.integers(longest // 16, longest // 4))
        sizes = np.exp(rng.normal(np.log(longest / 4), 0.8, group_size)).astype(int).clip(8, longest - prompt)
        found.append((prompt, sizes.tolist()))
    return found


def step_batch(
    lengths: Sequence[tuple[int, Sequence[int]]],
    vocab_size: int,
    sequence_len: int,
    step: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> StepBatch:
    """One rank's batch of groups of these lengths, with made-up tokens, logprobs and advantages."""
    groups = [_group(ordinal, prompt, sizes, vocab_size) for ordinal, (prompt, sizes) in enumerate(lengths)]
    header: dict[str, Any] = {"run": "run", "term": 1, "incarnation": 1, "step": step} | drop_fields([])
    return build_batches(groups, num_ranks, sequence_len, 1, digests=["d"] * len(groups), **header)[rank]


def _group(ordinal: int, prompt: int, sizes: Sequence[int], vocab_size: int) -> ScoredGroup:
    rng = np.random.default_rng(ordinal)
    total, group_size = sum(sizes), len(sizes)
    offsets = np.cumsum([0, *sizes])
    rewards = rng.random(group_size)
    return ScoredGroup(
        run="run",
        sender="rollout-0",
        ordinal=ordinal,
        attempt=0,
        purpose="train",
        environment="none",
        example_key=str(ordinal),
        prompt="",
        columns={},
        completions=[""] * group_size,
        finish_reasons=["stop"] * group_size,
        prompt_ids=rng.integers(3, vocab_size, prompt).astype(np.int32),
        completion_offsets=offsets,
        token_ids=rng.integers(3, vocab_size, total).astype(np.int32),
        loss_mask=np.ones(total, np.uint8),
        logprobs=np.full(total, -np.log(vocab_size), np.float32),
        segments=np.array([[start, 1, 0] for start in offsets[:-1].tolist()]),
        segment_temperatures=np.ones(group_size, np.float32),
        scorer="reward-0",
        reward_names=["none"],
        rewards_FG=rewards[None],
        rewards_G=rewards,
        advantages_G=(rewards - rewards.mean()).astype(np.float32),
    )


def status_bytes(name: str) -> int:
    """VmRSS or VmHWM (the largest so far) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Clock:
    """Wall and CPU seconds of a step; the second tells more where the machine is shared."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Since it was made."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def answer(**values: float) -> None:
    """Of a worker, to whoever has asked."""
    print(json.dumps(values), flush=True)


class Worker:
    """A process that does a step for each line it is given, and answers each with a line of JSON."""

    def __init__(self, command: Sequence[object], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def step(self) -> dict[str, float]:
        """What it measured in one step.

        Raises:
            RuntimeError: it has ended; its own error is on stderr.
        """
        self.begin()
        return self.measured()

    def begin(self) -> None:
        """Ask for a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()

    def measured(self) -> dict[str, float]:
        """What it measured in the step that was asked for.

        Raises:
            RuntimeError: it has ended; its own error is on stderr.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print too
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the worker {self._process.args} has ended with code {self._process.wait()}")

    def close(self) -> None:
        """Let it end: it reads until the end of its input, or waits for another one that has failed."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def worker(command: Sequence[object], environment: dict[str, str] | None = None) -> Iterator[Worker]:
    """One that ends with the block."""
    made = Worker(command, environment)
    try:
        yield made
    finally:
        made.close()
