"""Step batches and configurations for tests of the learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from actors.algorithms.batches import build_batches
from schemas.config import RunConfig
from schemas.messages import ScoredGroup, StepBatch, drop_fields, single_turn


def run_config(model: Path, dtype: str = "float32", lora: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    """A run on a tiny model."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "device": "cpu", "lora": lora},
            "environments": [{"type": "reverse_text"}],
            "rollout": {"max_tokens": 12},
            "reward": {"functions": [{"path": "characters_in_place"}]},
            "trainer": {"max_steps": 10, "learning_rate": 1e-2, "mismatch": {"stop": None}} | trainer,
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


def step_batch(samples: Sequence[Sampled], step: int = 1, micro_batches: int = 1, minibatches: int = 1) -> StepBatch:
    """All samples in one rank's batch, in equal micro-batches, and these in equal minibatches."""
    bounds = np.linspace(0, micro_batches, minibatches + 1).astype(np.int64)
    micro_batch_offsets = np.linspace(0, len(samples), micro_batches + 1).astype(np.int64)
    edges = micro_batch_offsets[bounds].tolist()
    parts = [samples[start:end] for start, end in pairwise(edges)]
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
        minibatch_offsets=bounds,
        loss_tokens=np.array([sum(len(s.completion) for s in part) for part in parts], np.int64),
        num_completions=np.array([len(part) for part in parts], np.int64),
        **drop_fields([]),
        digests=["digest"] * ordinals.size,
        ordinals=ordinals,
        micro_batch_offsets=micro_batch_offsets,
        sample_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        prompt_lengths=np.array([len(s.prompt) for s in samples], np.int64),
        sample_ordinals=np.array([s.ordinal for s in samples], np.int64),
        completions=np.arange(len(samples)),
        sample_shared=np.array(
            [
                # a group's completions share its prompt within a micro-batch
                len(s.prompt) * (b not in micro_batch_offsets and samples[b - 1].ordinal == s.ordinal)
                for b, s in enumerate(samples)
            ],
            np.int64,
        ),
        sample_shares=np.ones(len(samples), np.float32),
        rewards=np.array([s.advantage for s in samples], np.float64),
        rl_weights=np.ones(len(samples), np.float32),
        ref_kl_weights=np.zeros(len(samples), np.float32),
        ref_kl_tokens=np.zeros(len(parts), np.int64),
        token_ids=np.array([t for s in samples for t in s.prompt + s.completion], np.int32),
        loss_mask=per_token(0, lambda s: 1).astype(np.uint8),
        logprobs=per_token(0, lambda s: np.array(s.logprobs)).astype(np.float32),
        advantages=per_token(0, lambda s: s.advantage).astype(np.float32),
        temperatures=per_token(1, lambda s: s.temperature).astype(np.float32),
        versions=per_token(0, lambda s: step - 1).astype(np.int32),
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


def scored_group(ordinal: int, sizes: Sequence[int] = (3, 8, 5, 6)) -> ScoredGroup:
    """A group of made-up completions of these lengths, as a reward actor sends it."""
    rng = np.random.default_rng(ordinal)
    prompt_ids = np.r_[1, rng.integers(4, 30, 5)].astype(np.int32)
    total, group_size = sum(sizes), len(sizes)
    offsets = np.cumsum([0, *sizes])
    advantages = np.array([1.0 if i % 2 else -1.0 for i in range(group_size)])
    return ScoredGroup(
        run="run",
        sender="rollout-0",
        ordinal=ordinal,
        attempt=0,
        purpose="train",
        environment="words",
        example_key=str(ordinal),
        prompt="ab",
        columns={},
        completions=["text"] * group_size,
        stop_conditions=["stop"] * group_size,
        token_ids=rng.integers(4, 30, total).astype(np.int32),
        loss_mask=np.ones(total, np.uint8),
        logprobs=np.full(total, -3.4, np.float32),
        **single_turn(
            prompt_ids,
            offsets,
            np.array([[start, 1, 0] for start in offsets[:-1].tolist()]),
        ),
        segment_temperatures=np.ones(group_size, np.float32),
        scorer="reward-0",
        reward_names=["made_up"],
        rewards_FG=advantages[None],
        rewards_G=advantages,
        advantages_G=advantages.astype(np.float32),
    )


def branched_group(ordinal: int, branches: int = 4, trunk: int = 8, trajectories: int = 2) -> ScoredGroup:
    """A group of trajectories: a trunk, tokens of a tool in its middle, and branches that leave it all along.

    The second trajectory was cut off and does not train; each third sample has an advantage of its own, as by turns.
    """
    rng = np.random.default_rng(ordinal)
    opening = [1, *rng.integers(4, 30, 5).tolist()]
    prompts, tokens, owners, origins = [], [], [], []
    for g in range(trajectories):
        stem = rng.integers(4, 30, trunk).tolist()
        prompts.append(opening)
        tokens.append(stem)
        origins.append([int(trunk // 3 <= t < trunk // 2) for t in range(trunk)])
        for place in np.linspace(1, trunk, branches).astype(int).tolist():
            # of other lengths, and with tokens in front that an agent has put there
            prompts.append([*opening, *stem[:place], *rng.integers(4, 30, 2).tolist()])
            tokens.append(rng.integers(4, 30, int(rng.integers(1, 5))).tolist())
            origins.append([0] * len(tokens[-1]))
        owners += [g] * (1 + branches)
    offsets, origin_N = np.cumsum([0, *map(len, tokens)]), np.concatenate(origins)
    # equal prompts are kept once
    numbers = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    starts = sorted({*offsets[:-1].tolist(), *(np.flatnonzero(np.diff(origin_N)) + 1).tolist()})
    sampled_N = (origin_N == 0).astype(np.uint8)
    owner_N = np.repeat(owners, np.diff(offsets))
    advantages = np.array([1.0 if g % 2 else -0.5 for g in range(trajectories)], np.float32)
    sample_N = np.repeat(np.arange(len(tokens)), np.diff(offsets))
    segments = [[start, 1, 0, 0, 0] if origin_N[start] == 0 else [start, -1, -1, 1, 0] for start in starts]
    return ScoredGroup(
        run="run",
        sender="rollout-0",
        ordinal=ordinal,
        attempt=0,
        purpose="train",
        environment="tree",
        example_key=str(ordinal),
        prompt="ab",
        columns={},
        completions=["text"] * trajectories,
        stop_conditions=["length" if g == 1 else "stop" for g in range(trajectories)],
        prompt_ids=np.array([token for prompt in numbers for token in prompt], np.int32),
        prompt_offsets=np.cumsum([0, *map(len, numbers)]),
        sample_offsets=offsets,
        sample_completions=np.array(owners),
        sample_prompts=np.array([numbers[tuple(prompt)] for prompt in prompts]),
        token_ids=np.array([token for ids in tokens for token in ids], np.int32),
        loss_mask=sampled_N * (owner_N != 1).astype(np.uint8),
        logprobs=np.where(sampled_N > 0, -3.4, 0.0).astype(np.float32),
        segments=np.array(segments),
        segment_temperatures=np.ones(len(segments), np.float32),
        counts=np.tile(np.array([1 + branches, 0, 0]), (trajectories, 1)),
        environment_rewards_EG=np.zeros((0, trajectories)),
        scorer="reward-0",
        reward_names=["made_up"],
        rewards_FG=advantages[None].astype(np.float64),
        rewards_G=advantages.astype(np.float64),
        advantages_G=advantages,
        token_advantages=np.where(sample_N % 3 == 2, np.float32(0.25), advantages[owner_N]),
    )


def batches_of(
    groups: Sequence[ScoredGroup],
    num_ranks: int = 1,
    num_minibatches: int = 1,
    step: int = 1,
    sequence_len: int = 40,
    **keys: Any,
) -> list[StepBatch]:
    """What the packer makes of these groups."""
    header: dict[str, Any] = {"run": "run", "term": 1, "incarnation": 1, "step": step} | drop_fields([]) | keys
    return build_batches(groups, num_ranks, sequence_len, num_minibatches, digests=["d"] * len(groups), **header)
