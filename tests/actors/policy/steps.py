"""Step batches and configurations for tests of the learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schemas.config import RunConfig
from schemas.messages import StepBatch


def run_config(model: Path, dtype: str = "float32", lora: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    """A run on a tiny model."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "device": "cpu", "lora": lora},
            "environments": [{"type": "reverse_text"}],
            "rollout": {"max_tokens": 12},
            "reward": {"functions": [{"path": "characters_in_place"}]},
            "trainer": {"max_steps": 10, "learning_rate": 1e-2} | trainer,
            "inference": {"engine": {"type": "embedded", "max_sequences": 16, "max_sequence_len": 64}},
        }
    )


@dataclass
class Sampled:
    """One completion to train on."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: float
    ordinal: int = 0
    temperature: float = 1.0


def step_batch(samples: Sequence[Sampled], step: int = 1, micro_batches: int = 1) -> StepBatch:
    """All samples in one rank's batch, in equal micro-batches."""
    lengths = [len(s.prompt) + len(s.completion) for s in samples]

    def per_token(prompt: float, of: Any) -> Any:
        return np.concatenate(
            [np.r_[np.full(len(s.prompt), prompt), of(s) * np.ones(len(s.completion))] for s in samples]
        )

    ordinals = np.unique([s.ordinal for s in samples]).astype(np.int64)
    return StepBatch(
        run="run",
        term=1,
        incarnation=1,
        rank=0,
        num_ranks=1,
        step=step,
        loss_tokens=sum(len(s.completion) for s in samples),
        num_completions=len(samples),
        dropped=[],
        digests=["digest"] * ordinals.size,
        ordinals=ordinals,
        micro_batch_offsets=np.linspace(0, len(samples), micro_batches + 1).astype(np.int64),
        sample_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        prompt_lengths=np.array([len(s.prompt) for s in samples], np.int64),
        sample_ordinals=np.array([s.ordinal for s in samples], np.int64),
        sample_versions=np.zeros(len(samples), np.int64),
        token_ids=np.array([t for s in samples for t in s.prompt + s.completion], np.int32),
        loss_mask=per_token(0, lambda s: 1).astype(np.uint8),
        logprobs=per_token(0, lambda s: np.array(s.logprobs)).astype(np.float32),
        advantages=per_token(0, lambda s: s.advantage).astype(np.float32),
        temperatures=per_token(1, lambda s: s.temperature).astype(np.float32),
    )


def random_samples(seed: int = 0) -> list[Sampled]:
    """Two groups of four completions with made-up logprobs near those of a uniform distribution."""
    rng = np.random.default_rng(seed)
    found = []
    for ordinal in range(2):
        prompt = [1, *rng.integers(4, 30, 5).tolist()]
        for i in range(4):
            completion = rng.integers(4, 30, int(rng.integers(3, 9))).tolist()
            advantage = 1.0 if i % 2 else -1.0
            found.append(Sampled(prompt, completion, [-3.4] * len(completion), advantage, ordinal))
    return found
