"""The supervised examples that the policy learns beside what it has sampled (CHORD)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.algorithms.chord import mixed, sft_indices, sft_share
from actors.algorithms.packing import pack
from actors.environments.prompts import Tokenizer
from actors.environments.supervised import KEY, read_supervised
from actors.policy.attention import PackedRow, pack_row
from actors.policy.chosen import ChosenLogprobs
from actors.policy.frozen import Autocast
from actors.policy.loading import device_of
from schemas.config import RunConfig
from schemas.config.sft import SftConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch


@dataclass(frozen=True)
class SupervisedRow:
    """One packed row and its T completion tokens."""

    row: PackedRow
    token_ids_T: Tensor


class SupervisedExamples:
    """The examples of a run as token ids, and the policy that learns them.

    Args:
        config: of the run.
        sft: its section.
        policy: that learns them.
        autocast: in which it computes.

    Raises:
        ConfigError: the file is not what it should be, or an example is longer than a micro-batch.
    """

    def __init__(self, config: RunConfig, sft: SftConfig, policy: ChosenLogprobs, autocast: Autocast) -> None:
        self._policy, self._autocast, self._phi = policy, autocast, sft.phi
        self._seed, self._batch_size, self._capacity = config.seed, sft.batch_size, config.packer.sequence_len
        self._device = device_of(config.model)
        tokenizer = Tokenizer(config.model)
        self._samples: list[tuple[NDArray[np.int32], int]] = []
        for number, (prompt, completion) in enumerate(read_supervised(Path(sft.path)), start=1):
            prompt_ids, following = tokenizer.encode(prompt), tokenizer.encode_completion(prompt, completion)
            if not prompt_ids or len(prompt_ids) + len(following) > self._capacity:
                raise ConfigError(
                    f"{KEY}: {sft.path}, example {number} has {len(prompt_ids)} + {len(following)} tokens; the prompt "
                    f"needs at least 1, and packer.sequence_len {self._capacity} must hold both"
                )
            self._samples.append((np.array([*prompt_ids, *following], np.int32), len(prompt_ids)))

    def backward(self, batch: StepBatch, minibatch: int, mu: float) -> dict[str, float]:
        """Gradients of one rank's share of a minibatch, × μ; returns its part of the loss, and metric sums."""
        rows, num_tokens = self.rows(batch, minibatch)
        measured = {"loss": 0.0, "sft_nll": 0.0, "sft_tokens": 0.0}
        for each in rows:
            ones_T = torch.ones(each.token_ids_T.numel(), device=self._device)
            with self._autocast():
                logprobs_T, _ = self._policy.of(each.row, each.token_ids_T, ones_T)
            supervised = sft_share(logprobs_T, ones_T, num_tokens, with_phi=self._phi)
            loss = mixed(torch.zeros_like(supervised), supervised, mu)
            loss.backward()  # type: ignore[no-untyped-call]
            measured["loss"] += float(loss.detach())
            measured["sft_nll"] -= float(logprobs_T.detach().double().sum())
            measured["sft_tokens"] += logprobs_T.numel()
        return measured

    def rows(self, batch: StepBatch, minibatch: int) -> tuple[list[SupervisedRow], int]:
        """One rank's rows of what a minibatch learns, and the completion tokens that all ranks have.

        A step's examples are dealt out to its minibatches, and each iteration learns them again.
        """
        indices = sft_indices(len(self._samples), self._batch_size, self._seed, batch.step)
        samples = [self._samples[i] for i in indices[minibatch :: batch.num_minibatches]]
        dealt = pack([ids.size for ids, _ in samples], self._capacity, batch.num_ranks)[batch.rank]
        rows = [self._row([samples[i] for i in micro_batch]) for micro_batch in dealt if micro_batch]
        return rows, sum(ids.size - prompt_length for ids, prompt_length in samples)

    def _row(self, samples: list[tuple[NDArray[np.int32], int]]) -> SupervisedRow:
        offsets = np.cumsum([0, *(ids.size for ids, _ in samples)])
        prompt_lengths = np.array([length for _, length in samples])
        token_ids = np.concatenate([ids for ids, _ in samples])
        chosen = np.concatenate([ids[length:] for ids, length in samples]).astype(np.int64)
        row = pack_row(token_ids, offsets, prompt_lengths, range(len(samples)), self._device)
        return SupervisedRow(row, torch.from_numpy(chosen).to(self._device))
