"""Bytes that a run's groups take on their way: in messages, in the packer's memory, in the ledger, on the network.

All are at full length: each completion has `rollout.max_tokens` tokens, prompt and completion together fill
`packer.sequence_len`, and each version that a step may lag behind has sampled a part of it. Completions are counted as
one sample each, as without branches of a conversation. Not counted is what neither the configuration nor the rows tell:
columns of the data, and conversations with an environment.
"""

from dataclasses import dataclass

from schemas.config import RunConfig
from schemas.limits import BATCH_BYTES, DATA_FRAME_BYTES, MESSAGE_BYTES, TOKEN_BYTES

TEXT_BYTES = 4.0
"""Bytes of text per token: of English and of code with vocabularies of 32 000 tokens and more."""
GROUP_TOKEN_BYTES = 9
"""Bytes of a completion's token in a group: id, logprob, mask."""
GROUP_TOKEN_ADVANTAGE_BYTES = 4
"""Bytes of a token in a group whose advantages differ within a completion."""
COMPLETION_BYTES = 125
"""Bytes of a completion besides its tokens and text: offsets, segment, reward, advantage, stop condition."""
SEGMENT_BYTES = 44
"""Bytes of each further part of a completion, sampled by another version of the policy."""
FUNCTION_BYTES, REWARD_BYTES = 20, 8
"""Bytes of each further reward function in a group, and of its value for a completion."""
MESSAGE_HEADER_BYTES = 800
"""Bytes of a message besides all of these."""
BATCH_TOKEN_BYTES = 21
"""Bytes of a token in a batch: id, mask, logprob, advantage, temperature, version."""
BATCH_SAMPLE_BYTES = 60
"""Bytes of a sample in a batch besides its tokens: offset, length of the prompt, weights, share."""
BATCHES_KEPT = 2
"""Steps whose batches the packer has in memory."""


@dataclass(frozen=True)
class Size:
    """An amount of bytes."""

    name: str
    num_bytes: float
    keys: str
    """Keys that change it."""
    limit: int | None = None
    """Bytes that it may not exceed; None: no limit."""

    def __str__(self) -> str:
        """Return a line of the table."""
        over = f"  MORE THAN THE LIMIT of {_readable(self.limit)}" if self.limit and self.num_bytes > self.limit else ""
        return f"{self.name:<34}{_readable(self.num_bytes):>12}   {self.keys}{over}"


def group_bytes(
    completions: int,
    prompt_tokens: int,
    tokens: int,
    text_bytes: float = TEXT_BYTES,
    token_advantages: bool = False,
    functions: int = 1,
    versions: int = 1,
) -> float:
    """Return the bytes of a scored group.

    Args:
        completions: completions of the group.
        prompt_tokens: tokens of the prompt, which the group has once.
        tokens: tokens of each completion.
        text_bytes: bytes of text per token.
        token_advantages: True if each token has an advantage of its own.
        functions: reward functions.
        versions: versions of the policy that sample a completion, one after the other.
    """
    per_token = GROUP_TOKEN_BYTES + GROUP_TOKEN_ADVANTAGE_BYTES * token_advantages + text_bytes
    prompt = prompt_tokens * (TOKEN_BYTES + text_bytes)
    rewards = max(0, functions - 1) * (FUNCTION_BYTES + completions * REWARD_BYTES)
    each = COMPLETION_BYTES + (min(versions, tokens) - 1) * SEGMENT_BYTES + tokens * per_token
    return MESSAGE_HEADER_BYTES + prompt + rewards + completions * each


def batch_bytes(samples: int, tokens: int) -> float:
    """Return the bytes of a rank's batch.

    Args:
        samples: completions of the rank.
        tokens: tokens of each, with its prompt.
    """
    return MESSAGE_HEADER_BYTES + samples * (BATCH_SAMPLE_BYTES + tokens * BATCH_TOKEN_BYTES)


def steps_in_ledger(config: RunConfig) -> int:
    """Return the largest number of steps whose groups the ledger has: since the oldest checkpoint to resume from."""
    checkpoint = config.trainer.checkpoint
    since = max(checkpoint.num_resumable * checkpoint.interval, config.ledger.keep_steps)
    # the step before the next checkpoint is the newest one that is trained; further ones are on their way
    return since + config.packer.max_async_level


def sizes(config: RunConfig, image_bytes: float = 0.0) -> list[Size]:
    """Return all amounts of a run, the smallest unit first.

    Args:
        config: configuration of the run.
        image_bytes: bytes of the images of a group, which the group has once.
    """
    rollout, packer, ranks = config.rollout, config.packer, config.trainer.row_groups
    tokens = min(rollout.max_tokens, packer.sequence_len)
    by_token = config.reward.advantage.type in ("gae", "process")
    group = group_bytes(
        rollout.group_size,
        packer.sequence_len - tokens,
        tokens,
        token_advantages=by_token,
        functions=len(config.reward.functions),
        versions=packer.max_async_level + 1,
    )
    group += image_bytes
    samples = -(-packer.groups_per_step * rollout.group_size // ranks)
    # a group whose completions go to several ranks has its images in the batch of each
    batch = batch_bytes(samples, packer.sequence_len) + min(packer.groups_per_step, samples) * image_bytes
    step = packer.groups_per_step * group
    held = step * (packer.max_async_level + 1)
    of_group = "rollout.group_size, rollout.max_tokens"
    of_batch = "packer.groups_per_step, packer.sequence_len"
    of_ledger = "trainer.checkpoint.interval, trainer.checkpoint.keep_last, ledger.keep_steps"
    in_memory = min(held, packer.memory_bytes)
    return [
        Size("group", group, of_group, MESSAGE_BYTES),
        Size("largest array of a group", rollout.group_size * tokens * TOKEN_BYTES, of_group, DATA_FRAME_BYTES),
        Size("groups of a step", step, "packer.groups_per_step"),
        Size("batch of a rank", batch, of_batch, BATCH_BYTES),
        Size("groups in the packer's memory", in_memory, "packer.memory_bytes, packer.max_async_level"),
        Size("batches in the packer's memory", BATCHES_KEPT * ranks * batch, "packer.groups_per_step"),
        Size("ledger on disk", steps_in_ledger(config) * step, of_ledger),
        Size("network, per step", 2 * step + ranks * batch, "packer.groups_per_step"),
    ]


def table(config: RunConfig, image_bytes: float = 0.0) -> str:
    """Return all amounts as a table for people; the arguments are those of `sizes`."""
    images = f", with {_readable(image_bytes)} of images in a group" if image_bytes else ""
    title = (
        f"at full length, each completion with rollout.max_tokens tokens{images}; without columns and conversations:"
    )
    return "\n".join([title, *map(str, sizes(config, image_bytes))])


def _readable(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.4g} TiB"
