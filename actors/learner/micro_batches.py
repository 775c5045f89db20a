"""Micro-batches of a step on the device: samples of a forward pass, with data per token."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.learner.batch_images import BatchImages
from actors.models.attention import PackedRow, pack_row
from schemas.messages import StepBatch


@dataclass(frozen=True)
class MicroBatch:
    """Packed row, and data of the samples' T completion tokens for `LossInputs`."""

    row: PackedRow
    token_ids_T: Tensor
    """Completion tokens, (T,)."""
    temperatures_T: Tensor | None
    """Sampling temperature of each token, (T,); None: all are 1."""
    inference_logprobs_T: Tensor
    """Logprobs from the engine, (T,)."""
    advantages_T: Tensor
    loss_mask_T: Tensor
    """True for tokens to train on, (T,)."""
    versions_T: Tensor
    """Version of each token's sampling policy, (T,)."""
    completion_of_T: Tensor
    """Index of each token's sample within the row, (T,)."""
    rl_weights_T: Tensor
    ref_kl_weights_T: Tensor
    """Weights of the environments for each token, (T,); 0 outside the loss mask."""
    num_completions: int
    """Number of samples of the row."""
    shares_B: Tensor | None
    """Share of each sample in its completion, (B,); None: 1, each sample is a whole completion."""
    wanted_K: Tensor
    """Indices in T of the tokens in the loss mask. Only these tokens need logprobs."""


def non_empty(batch: StepBatch, minibatch: int | None = None) -> list[int]:
    """Return the numbers of the micro-batches with samples, of a minibatch or of all.

    Empty micro-batches exist so that all ranks have equally many.
    """
    first, last = (0, -1) if minibatch is None else (minibatch, minibatch + 1)
    numbers = range(int(batch.minibatch_offsets[first]), int(batch.minibatch_offsets[last]))
    return [m for m in numbers if batch.micro_batch_offsets[m] < batch.micro_batch_offsets[m + 1]]


def micro_batch(
    batch: StepBatch,
    number: int,
    device: torch.device,
    capacity: int | None = None,
    images: BatchImages | None = None,
) -> MicroBatch:
    """Return a micro-batch with samples as tensors on the device.

    Args:
        batch: batch of the rank.
        number: number of the micro-batch.
        device: device of the tensors.
        capacity: `packer.sequence_len`; if the samples have more tokens in sum, attention keeps no copies of shared
            tokens. None if they are known to have no more.
        images: features of images; None if the batch has none.
    """
    assert images is not None or not batch.images
    first, last = (int(i) for i in batch.micro_batch_offsets[number : number + 2])
    start, end = (int(i) for i in batch.sample_offsets[[first, last]])
    offsets = batch.sample_offsets[first : last + 1] - start  # within the micro-batch
    prompts = batch.prompt_lengths[first:last]
    in_completion = np.ones(end - start, bool)
    for b, size in enumerate(prompts):
        in_completion[offsets[b] : offsets[b] + size] = False

    # per token, from arrays over all N tokens of the batch
    def of_completions(name: str) -> Tensor:
        array = getattr(batch, name)[start:end][in_completion]
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    # per token, from arrays over samples; 0 outside the loss mask, since a token with a weight counts in its component
    def of_samples(name: str) -> Tensor:
        array = np.repeat(getattr(batch, name)[first:last], np.diff(offsets) - prompts)
        return torch.from_numpy(array * (batch.loss_mask[start:end][in_completion] > 0)).to(device)

    # compared on the CPU: a comparison on a GPU would wait for the GPU
    is_tempered = bool((batch.temperatures[start:end][in_completion] != 1).any())
    shares_B = batch.sample_shares[first:last]
    has_branches = np.unique(batch.completions[first:last]).size < last - first
    has_many_copies = has_branches or (capacity is not None and end - start > capacity)
    shared = batch.sample_shared[first:last].tolist()
    seen = images.of(batch, first, last) if images is not None else []
    return MicroBatch(
        row=pack_row(
            batch.token_ids[start:end],
            offsets,
            prompts,
            shared,
            device,
            has_many_copies,
            seen,
            batch.experts_of(first, last),
        ),
        token_ids_T=of_completions("token_ids").long(),
        temperatures_T=of_completions("temperatures") if is_tempered else None,
        inference_logprobs_T=of_completions("logprobs"),
        advantages_T=of_completions("advantages"),
        loss_mask_T=of_completions("loss_mask").bool(),
        # found on the CPU: nonzero on a GPU would wait for the GPU
        wanted_K=torch.from_numpy(batch.loss_mask[start:end][in_completion].nonzero()[0]).to(device),
        versions_T=of_completions("versions").long(),
        completion_of_T=torch.from_numpy(np.repeat(np.arange(last - first), np.diff(offsets) - prompts)).to(device),
        rl_weights_T=of_samples("rl_weights"),
        ref_kl_weights_T=of_samples("ref_kl_weights"),
        num_completions=last - first,
        # None where it changes nothing, so that nothing is computed
        shares_B=None if (shares_B == 1).all() else torch.from_numpy(shares_B.copy()).to(device),
    )


def dummy_micro_batch(device: torch.device, num_samples: int = 1, sample_len: int = 2) -> MicroBatch:
    """Return a made-up micro-batch, for a rank that computes only because other ranks do, or to warm a device up.

    Its completion tokens are in no loss mask. A sample is a prompt of one token and a completion of all others; the
    smallest row has two tokens.
    """
    offsets = np.arange(num_samples + 1) * sample_len
    row = pack_row(np.zeros(offsets[-1], np.int32), offsets, np.ones(num_samples, np.int64), [0] * num_samples, device)
    num_tokens = num_samples * (sample_len - 1)
    nothing_T = torch.zeros(num_tokens, device=device)
    index_T = torch.zeros(num_tokens, dtype=torch.long, device=device)
    return MicroBatch(
        row=row,
        token_ids_T=index_T,
        temperatures_T=None,
        inference_logprobs_T=nothing_T,
        advantages_T=nothing_T,
        loss_mask_T=nothing_T.bool(),
        wanted_K=torch.arange(
            num_tokens, device=device
        ),  # computed all the same: the forward pass is what other ranks wait for
        versions_T=index_T,
        completion_of_T=torch.arange(num_samples, device=device).repeat_interleave(sample_len - 1),
        rl_weights_T=nothing_T,
        ref_kl_weights_T=nothing_T,
        num_completions=num_samples,
        shares_B=None,
    )
