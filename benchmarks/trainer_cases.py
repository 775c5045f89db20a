"""Random models and batches for benchmarks of the trainer, and worker processes that compute one step per request.

Steps of two workers take turns, so that other load on the machine affects both. Memory is the largest resident set of
the process, less its resident set after all imports.
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
import numpy.typing as npt

from actors.algorithms.batches import build_batches
from schemas.config import RunConfig
from schemas.messages import ScoredGroup, StepBatch, drop_fields, single_turn

Lengths = Sequence[tuple[int, Sequence[int]]]
"""Tokens of each group: of its prompt, and of its completions."""


@dataclass(frozen=True)
class Shape:
    """Shape of a Qwen3 model with random weights and tied embeddings."""

    vocab_size: int = 32_000
    hidden_size: int = 384
    intermediate_size: int = 1_024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64

    @property
    def parameters(self) -> int:
        """Number of parameters in matrices; the embeddings are the output layer too, and count once."""
        heads = self.num_attention_heads + self.num_key_value_heads
        layer = 2 * heads * self.head_dim * self.hidden_size + 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    def flops(self, lengths: Lengths, lora: bool) -> float:
        """Return the floating-point operations of a training step, without recomputation.

        (6·N, with LoRA 4·N) · tokens of the rows + 6 · layers · heads · head size · Σ length² over the samples: a
        frozen weight has no gradient of its own, hence 4, and causal attention has 2 products over half of length² in
        the forward pass and 4 in the backward pass.
        """
        tokens = sum(prompt + sum(sizes) for prompt, sizes in lengths)
        squares = sum((prompt + size) ** 2 for prompt, sizes in lengths for size in sizes)
        width = self.num_attention_heads * self.head_dim
        return (4 if lora else 6) * self.parameters * tokens + 6 * self.num_hidden_layers * width * squares


QWEN3 = Shape(151_936, 1_024, 3_072, 28, 16, 8, 128)
"""Qwen3-0.6B."""


def row_tokens(lengths: Lengths) -> int:
    """Return the tokens that are computed if each group lies in a single row.

    A shared prompt is computed once, and the last token of a completion predicts nothing.
    """
    return sum(prompt + sum(size - 1 for size in sizes) for prompt, sizes in lengths)


def sample_tokens(lengths: Lengths) -> int:
    """Return the tokens of all samples, each with its whole prompt."""
    return sum(prompt + size for prompt, sizes in lengths for size in sizes)


def write_model(
    folder: Path, shape: Shape, *, dtype: str = "float32", device: str = "cpu", logit_std: float | None = None
) -> None:
    """Write a model directory, with the same weights each time.

    Args:
        folder: the directory.
        shape: shape of the model.
        dtype: precision of the files.
        device: device on which the random weights are made; other devices make other weights.
        logit_std: standard deviation of the logits. None leaves them nearly uniform: every logprob is then about
            −log(vocabulary), and errors of low precision hardly show.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    # wide weights: a hidden state is then made by the layers, and is not just the embedding of its own token
    wide = {} if logit_std is None else {"initializer_range": shape.hidden_size**-0.5}
    config = Qwen3Config(**asdict(shape), **ends, **wide, max_position_embeddings=32_768, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
        if logit_std is not None:
            with torch.no_grad():
                found = model(torch.randint(3, shape.vocab_size, (1, 256))).logits.std()
                model.model.norm.weight.mul_(logit_std / found)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def config_of(folder: Path, sequence_len: int, model: dict[str, Any], **trainer: Any) -> RunConfig:
    """Return the configuration of a run with the model, on the CPU, in float32."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32", "device": "cpu"} | model,
            "environments": [{"type": "reverse_text"}],
            "rollout": {"max_tokens": min(512, sequence_len // 2)},
            "reward": {"functions": [{"path": "characters_in_place"}]},
            "packer": {"sequence_len": sequence_len},
            "trainer": {"max_steps": 1000} | trainer,
        }
    )


def mixed_lengths(num_groups: int, group_size: int, longest: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Return (prompt, completions) in tokens: prompts up to a quarter of the longest sample, lognormal completions."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_groups):
        prompt = int(rng.integers(longest // 16, longest // 4))
        sizes = np.exp(rng.normal(np.log(longest / 4), 0.8, group_size)).astype(int).clip(8, longest - prompt)
        found.append((prompt, sizes.tolist()))
    return found


def step_batch(
    lengths: Lengths, vocab_size: int, sequence_len: int, step: int, rank: int = 0, num_ranks: int = 1
) -> StepBatch:
    """Return one rank's batch of groups with these lengths, with random tokens, logprobs and advantages."""
    groups = [random_group(ordinal, prompt, sizes, vocab_size) for ordinal, (prompt, sizes) in enumerate(lengths)]
    return batch_of(groups, sequence_len, step, rank, num_ranks)


def batch_of(
    groups: Sequence[ScoredGroup], sequence_len: int, step: int, rank: int = 0, num_ranks: int = 1
) -> StepBatch:
    """Return one rank's batch of these groups, packed as by the packer."""
    header: dict[str, Any] = {"run": "run", "term": 1, "incarnation": 1, "step": step} | drop_fields([])
    return build_batches(groups, num_ranks, sequence_len, 1, digests=["d"] * len(groups), **header)[rank]


def random_group(ordinal: int, prompt: int, sizes: Sequence[int], vocab_size: int) -> ScoredGroup:
    """Return a group with random tokens, and the logprobs of a uniform distribution."""
    rng = np.random.default_rng(ordinal)
    rewards = rng.random(len(sizes))
    prompt_ids = rng.integers(3, vocab_size, prompt)
    tokens = np.split(rng.integers(3, vocab_size, sum(sizes)), np.cumsum(sizes)[:-1])
    return scored_group(ordinal, prompt_ids, tokens, [np.full(size, -np.log(vocab_size)) for size in sizes], rewards)


def scored_group(
    ordinal: int,
    prompt_ids: npt.ArrayLike,
    completions: Sequence[npt.ArrayLike],
    logprobs: Sequence[npt.ArrayLike],
    rewards: npt.NDArray[np.float64],
) -> ScoredGroup:
    """Return a group of given completions, sampled by version 0.

    Args:
        ordinal: number of the group.
        prompt_ids: tokens of the prompt.
        completions: tokens of each completion.
        logprobs: the engine's logprobs of the same tokens.
        rewards: reward of each completion.
    """
    group_size = len(completions)
    offsets = np.cumsum([0, *map(np.size, completions)])
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
        stop_conditions=["stop"] * group_size,
        token_ids=np.concatenate(completions).astype(np.int32),
        loss_mask=np.ones(offsets[-1], np.uint8),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        **single_turn(
            np.asarray(prompt_ids, np.int32), offsets, np.array([[start, 1, 0] for start in offsets[:-1].tolist()])
        ),
        segment_temperatures=np.ones(group_size, np.float32),
        scorer="reward-0",
        reward_names=["none"],
        rewards_FG=rewards[None],
        rewards_G=rewards,
        advantages_G=(rewards - rewards.mean()).astype(np.float32),
    )


def status_bytes(name: str) -> int:
    """Return VmRSS, or VmHWM (the largest value so far), of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Clock:
    """Wall and CPU seconds of a step. CPU seconds tell more on a shared machine."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return the seconds since the clock was made."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def answer(**values: Any) -> None:
    """Answer a request to this worker."""
    print(json.dumps(values), flush=True)


class Worker:
    """Process that computes a step for each line on its stdin, and answers with a line of JSON."""

    def __init__(self, command: Sequence[object], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def step(self, request: str = "step") -> dict[str, Any]:
        """Send a request, by default for a step, and return the figures of the answer.

        Raises:
            RuntimeError: the worker has ended; stderr has its error.
        """
        self.begin(request)
        return self.measured()

    def begin(self, request: str = "step") -> None:
        """Send a request, a line of text."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()

    def measured(self) -> dict[str, Any]:
        """Return the figures of the requested step.

        Raises:
            RuntimeError: the worker has ended; stderr has its error.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print too
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the worker {self._process.args!r} has ended with code {self._process.wait()}")

    def kill(self) -> None:
        """Kill the worker, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the input of the worker and wait for its end."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def worker(command: Sequence[object], environment: dict[str, str] | None = None) -> Iterator[Worker]:
    """Yield a worker; close it at the end of the block."""
    made = Worker(command, environment)
    try:
        yield made
    finally:
        made.close()
