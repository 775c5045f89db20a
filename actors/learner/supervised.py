"""Supervised examples, learned by the policy in addition to sampled completions (CHORD)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.algorithms.chord import mixed, sft_indices, sft_share
from actors.algorithms.packing import pack
from actors.learner.reference_models import Autocast
from actors.learner.supervised_samples import tokenized
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

    Raises:
        ConfigError: the file is invalid, or an example is longer than a micro-batch.
    """

    def __init__(self, config: RunConfig, sft: SftConfig, policy: TokenLogprobs, autocast: Autocast) -> None:
        self._policy, self._autocast, self._phi = policy, autocast, sft.phi
        self._seed, self._batch_size, self._capacity = config.seed, sft.batch_size, config.packer.sequence_len
        self._device = device_of(config.model)
        self._samples = tokenized(config, sft)

    def backward(self, batch: StepBatch, minibatch: int, mu: float) -> dict[str, float]:
        """Compute gradients of one rank's share of a minibatch, × μ; return loss and sums of metrics."""
        rows, num_tokens = self.rows(batch, minibatch)
        measured, found = {"loss": 0.0, "sft_nll": 0.0, "sft_tokens": 0.0}, []
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

    def rows(self, batch: StepBatch, minibatch: int) -> tuple[list[SupervisedRow], int]:
        """Return one rank's rows of a minibatch's examples, and the number of completion tokens on all ranks.

        A step's examples are divided among the minibatches, and each iteration uses the same examples.
        """
        indices = sft_indices(len(self._samples), self._batch_size, self._seed, batch.step)
        samples = [self._samples[i] for i in indices[minibatch :: batch.num_minibatches]]
        # every rank computes the whole division, and takes its own part
        dealt = pack([ids.size for ids, _ in samples], self._capacity, batch.num_ranks)[batch.rank]
        rows = []
        for own in ([samples[i] for i in micro_batch] for micro_batch in dealt if micro_batch):
            offsets = np.cumsum([0, *(ids.size for ids, _ in own)])
            prompt_lengths = np.array([length for _, length in own])
            token_ids = np.concatenate([ids for ids, _ in own])
            chosen = np.concatenate([ids[length:] for ids, length in own]).astype(np.int64)
            # examples share nothing
            row = pack_row(token_ids, offsets, prompt_lengths, [0] * len(own), self._device)
            rows.append(SupervisedRow(row, torch.from_numpy(chosen).to(self._device)))
        return rows, sum(ids.size - prompt_length for ids, prompt_length in samples)
