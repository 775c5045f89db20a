"""Supervised examples, learned by the policy in addition to sampled completions (CHORD)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.algorithms.chord import mixed, sft_indices, sft_share
from actors.algorithms.packing import pack
from actors.learner.batch_images import BatchImages
from actors.learner.reference_models import Autocast
from actors.learner.supervised_samples import SupervisedSamples
from actors.models.attention import PackedRow, pack_row
from actors.models.loading import device_of
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig
from schemas.config.sft import SftConfig
from schemas.messages import StepBatch


@dataclass(frozen=True)
class SupervisedRow:
    """Packed row of examples, and the T completion tokens."""

    row: PackedRow
    token_ids_T: Tensor


class SupervisedExamples:
    """Supervised examples of a run as token ids, with backward passes of the policy.

    Args:
        config: configuration of the run.
        sft: section `trainer.sft` of the configuration.
        policy: the learning policy.
        autocast: context in which the policy computes.
        images: features of images, by the policy's tower.

    Raises:
        ConfigError: the file is invalid, the model takes no images and an example has some, or an example is longer
            than a micro-batch.
    """

    def __init__(
        self, config: RunConfig, sft: SftConfig, policy: TokenLogprobs, autocast: Autocast, images: BatchImages
    ) -> None:
        self._policy, self._autocast, self._phi, self._images = policy, autocast, sft.phi, images
        self._seed, self._batch_size, self._capacity = config.seed, sft.batch_size, config.packer.sequence_len
        self._device = device_of(config.model)
        self._samples = SupervisedSamples(config, sft)

    def backward(self, batch: StepBatch, minibatch: int, mu: float) -> dict[str, float]:
        """Compute gradients of one rank's share of a minibatch, × μ; return loss and sums of metrics."""
        rows, num_tokens = self.rows(batch, minibatch)
        measured, found = {"loss": 0.0, "sft_nll": 0.0, "sft_tokens": 0.0}, []
        # one after the other: features of images that have a gradient are kept until its backward pass
        for each in rows:
            ones_T = torch.ones(each.token_ids_T.numel(), device=self._device)  # weight 1: not sampled
            with self._autocast():
                logprobs_T, _ = self._policy.of(each.row, each.token_ids_T, None)
            supervised = sft_share(logprobs_T, ones_T, num_tokens, with_phi=self._phi)
            # the policy's part of the mixture was differentiated with its own micro-batches
            loss = mixed(torch.zeros_like(supervised), supervised, mu)
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(torch.stack([loss.detach().double(), logprobs_T.detach().double().sum()]))
            measured["sft_tokens"] += logprobs_T.numel()
        # read once, behind the last backward pass, since reading waits for the device
        for loss_of_row, logprobs_of_row in torch.stack(found).tolist() if found else ():
            measured["loss"] += loss_of_row
            measured["sft_nll"] -= logprobs_of_row
        return measured

    def rows(self, batch: StepBatch, minibatch: int) -> tuple[Iterator[SupervisedRow], int]:
        """Return one rank's rows of a minibatch's examples, and the number of completion tokens on all ranks.

        A step's examples are divided among the minibatches, and each iteration uses the same examples. A row is made
        when it is taken.

        Raises:
            RunFailedError: by the iterator; an image is not what it was when the trainer started.
        """
        indices = sft_indices(len(self._samples), self._batch_size, self._seed, batch.step)
        own_indices = indices[minibatch :: batch.num_minibatches]
        # every rank computes the whole division, and takes its own part
        dealt = pack([self._samples[i].token_ids.size for i in own_indices], self._capacity, batch.num_ranks)
        packed = ([own_indices[n] for n in micro_batch] for micro_batch in dealt[batch.rank] if micro_batch)
        num_tokens = sum(self._samples[i].num_completion_tokens for i in own_indices)
        return (self._row(of_row, batch.step) for of_row in packed), num_tokens

    def _row(self, indices: Sequence[int], step: int) -> SupervisedRow:
        samples = [self._samples[i] for i in indices]
        offsets = np.cumsum([0, *(each.token_ids.size for each in samples)])
        prompt_lengths = np.array([each.prompt_length for each in samples])
        token_ids = np.concatenate([each.token_ids for each in samples])
        chosen = np.concatenate([each.token_ids[each.prompt_length :] for each in samples]).astype(np.int64)
        shown = [(self._samples[i].image_places, self._samples.images(i)) for i in indices]
        seen = self._images.of_examples(shown, step)
        # examples share nothing
        row = pack_row(token_ids, offsets, prompt_lengths, [0] * len(indices), self._device, images=seen)
        return SupervisedRow(row, torch.from_numpy(chosen).to(self._device))
