"""Micro-batches of a step on their device: the samples of one forward pass, and what is known of their tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.policy.attention import PackedRow, pack_row
from schemas.messages import StepBatch


@dataclass(frozen=True)
class MicroBatch:
    """One packed row, and the T completion tokens of its samples, as `LossInputs` has them."""

    row: PackedRow
    token_ids_T: Tensor
    temperatures_T: Tensor
    inference_logprobs_T: Tensor
    advantages_T: Tensor
    loss_mask_T: Tensor
    versions_T: Tensor
    completion_of_T: Tensor
    num_completions: int
    wanted_K: Tensor
    """Places in T of the tokens in the loss mask, which alone need logprobs."""


def filled(batch: StepBatch, minibatch: int | None = None) -> list[int]:
    """The micro-batches of one minibatch, or of all, that have samples; the others are there for other ranks' sake."""
    first, last = (0, -1) if minibatch is None else (minibatch, minibatch + 1)
    numbers = range(int(batch.minibatch_offsets[first]), int(batch.minibatch_offsets[last]))
    return [m for m in numbers if batch.micro_batch_offsets[m] < batch.micro_batch_offsets[m + 1]]


def micro_batch(batch: StepBatch, number: int, device: torch.device) -> MicroBatch:
    """One of the filled micro-batches."""
    first, last = (int(i) for i in batch.micro_batch_offsets[number : number + 2])
    start, end = (int(i) for i in batch.sample_offsets[[first, last]])
    offsets = batch.sample_offsets[first : last + 1] - start
    prompts = batch.prompt_lengths[first:last]
    in_completion = np.ones(end - start, bool)
    for b, size in enumerate(prompts):
        in_completion[offsets[b] : offsets[b] + size] = False

    def of_completions(name: str) -> Tensor:
        array = getattr(batch, name)[start:end][in_completion]
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    ordinals = batch.sample_ordinals[first:last].tolist()
    return MicroBatch(
        row=pack_row(batch.token_ids[start:end], offsets, prompts, ordinals, device),
        token_ids_T=of_completions("token_ids").long(),
        temperatures_T=of_completions("temperatures"),
        inference_logprobs_T=of_completions("logprobs"),
        advantages_T=of_completions("advantages"),
        loss_mask_T=of_completions("loss_mask").bool(),
        wanted_K=torch.from_numpy(batch.loss_mask[start:end][in_completion].nonzero()[0]).to(device),
        versions_T=of_completions("versions").long(),
        completion_of_T=torch.from_numpy(np.repeat(np.arange(last - first), np.diff(offsets) - prompts)).to(device),
        num_completions=last - first,
    )
