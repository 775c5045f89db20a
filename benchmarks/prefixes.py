"""Training steps of trajectories with branches, with prefixes computed once and with copies, in turns.

    python -m benchmarks.prefixes [--json PATH]

A step has 2 trajectories of a group. A trajectory has a trunk, a sample with a prompt of 64 tokens and 448 sampled
ones, and 1, 4 or 16 branches: samples of 32 tokens that leave the trunk at even distances behind its middle. `shared`
is the step as the packer builds it, in rows of 2048 tokens; `copies` is the same samples, packed one by one with only
prompts that are equal in common, as before branches shared prefixes. The model is a random Qwen3 of 2.1 million
parameters in float32, the attention padded, with one thread. `tokens` is the ratio of tokens in rows, `seconds` the
ratio of the time of forward and backward passes: the median of 3 pairs, in turns, after one to warm up. Ratios are
copies ÷ shared.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.algorithms.batches import build_batches
from actors.learner.micro_batches import micro_batch, non_empty
from actors.models.attention import PADDED
from actors.models.token_logprobs import TokenLogprobs
from benchmarks.machine import finish, table
from schemas.messages import ScoredGroup, StepBatch, drop_fields

TRAJECTORIES, PROMPT, TRUNK, BRANCH, CAPACITY, PAIRS = 2, 64, 448, 32, 2048, 3
BRANCHES = (1, 4, 16)
VOCABULARY = 1_000


def group(ordinal: int, branches: int, trajectories: int) -> ScoredGroup:
    """Return a group of these trajectories; the tokens of a trajectory are drawn from a seed."""
    rng = np.random.default_rng(ordinal)
    opening = rng.integers(0, VOCABULARY, PROMPT)
    prompts, tokens, owners, numbers = [opening], [], [], []
    for g in range(trajectories):
        trunk = rng.integers(0, VOCABULARY, TRUNK)
        tokens.append(trunk)
        owners.append(g)
        numbers.append(0)
        for place in np.linspace(TRUNK // 2, TRUNK - 1, branches).astype(int).tolist():
            numbers.append(len(prompts))
            prompts.append(np.concatenate([opening, trunk[:place]]))
            tokens.append(rng.integers(0, VOCABULARY, BRANCH))
            owners.append(g)
    offsets = np.cumsum([0, *map(len, tokens)])
    size = int(offsets[-1])
    return ScoredGroup(
        run="run", sender="rollout-0", ordinal=ordinal, attempt=0, purpose="train", environment="tree",
        example_key="key", prompt="?", columns={}, completions=["!"] * trajectories,
        stop_conditions=["stop"] * trajectories,
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        sample_offsets=offsets, sample_completions=np.array(owners), sample_prompts=np.array(numbers),
        token_ids=np.concatenate(tokens).astype(np.int32), loss_mask=np.ones(size, np.uint8),
        logprobs=np.full(size, -6.9, np.float32),
        segments=np.array([[start, 1, 0, 0, 0] for start in offsets[:-1].tolist()]),
        segment_temperatures=np.ones(len(tokens), np.float32),
        counts=np.tile(np.array([1 + branches, 0, 0]), (trajectories, 1)),
        environment_rewards_EG=np.zeros((0, trajectories)),
        scorer="reward-0", reward_names=["r"], rewards_FG=np.ones((1, trajectories)),
        rewards_G=np.ones(trajectories), advantages_G=np.ones(trajectories, np.float32),
    )  # fmt: skip


def apart(whole: ScoredGroup) -> ScoredGroup:
    """Return the group with a completion of its own for each sample, so that none is packed with its trajectory."""
    size = whole.sample_prompts.size
    return whole.model_copy(
        update={
            "sample_completions": np.arange(size),
            "counts": np.tile(np.array([1, 0, 0]), (size, 1)),
            "rewards_G": np.ones(size),
            "advantages_G": np.ones(size, np.float32),
        }
    )


def batch_of(one: ScoredGroup) -> StepBatch:
    """Return the batch of a single rank."""
    header: dict[str, Any] = {"run": "run", "term": 1, "incarnation": 1, "step": 1, "digests": ["d"]}
    (batch,) = build_batches([one], 1, CAPACITY, **header, **drop_fields([]))
    return batch


def with_copies(batch: StepBatch) -> StepBatch:
    """Return the batch with neighbours sharing a prompt only where it is the whole prompt of both."""
    shared = batch.sample_shared.copy()
    lengths = batch.prompt_lengths
    # an equal prompt: as long as the one before, and shared whole
    shared[1:][(shared[1:] != lengths[1:]) | (lengths[1:] != lengths[:-1])] = 0
    return batch.model_copy(update={"sample_shared": shared})


def seconds(model: TokenLogprobs, batch: StepBatch) -> tuple[float, int]:
    """Return the time of forward and backward passes of a step, and the tokens of its rows."""
    tokens, started = 0, time.perf_counter()
    for number in non_empty(batch):
        micro = micro_batch(batch, number, torch.device("cpu"))
        tokens += len(micro.row.token_ids_R)
        logprobs_T, _ = model.of(micro.row, micro.token_ids_T, micro.temperatures_T)
        logprobs_T.sum().backward()
    return time.perf_counter() - started, tokens


def measure() -> dict[str, Any]:
    """Return a row for each number of branches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, attn_implementation=PADDED,
    )  # fmt: skip
    model = TokenLogprobs(Qwen3ForCausalLM(config))
    rows = []
    for branches in BRANCHES:
        whole = group(0, branches, TRAJECTORIES)
        shared, copies = batch_of(whole), with_copies(batch_of(apart(whole)))
        pairs = [(seconds(model, shared), seconds(model, copies)) for _ in range(1 + PAIRS)][1:]
        (_, held), (_, copied) = pairs[0]
        ratios = [slow / fast for (fast, _), (slow, _) in pairs]
        rows.append(
            {
                "branches": branches,
                "shared_tokens": held,
                "copies_tokens": copied,
                "tokens": round(copied / held, 2),
                "seconds": round(statistics.median(ratios), 2),
                "shared_s": round(statistics.median(fast for (fast, _), _ in pairs), 2),
                "copies_s": round(statistics.median(slow for _, (slow, _) in pairs), 2),
            }
        )
    return {"rows": rows}


def text(results: dict[str, Any]) -> str:
    """Return the rows as a table."""
    rows = results["rows"]
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    finish(__doc__, measure, text)
