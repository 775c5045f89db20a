"""Rows of tokens with several samples. No sample sees another; samples with the same prompt share a copy of the prompt.

Completions of a single turn have the prompt of their group; branches have prompts of their own. The row holds a prompt
once, and the tokens of every sample with this prompt attend to it. The last token of a completion predicts nothing, so
the row leaves it out:

    prompt ab, completions XY. and Z.    row      a b X Y Z        positions 0 1 2 3 2
                                         sample 0 [0 1 2 3]        sample 1 [0 1 4]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class PackedRow:
    """Row of R tokens, and the division into samples."""

    token_ids_R: Tensor
    position_ids_R: Tensor
    """Position of each token in its sample."""
    source_T: Tensor
    """(T,) row index of the output that predicts completion token t: the index of the token before t in the sample."""
    samples: tuple[NDArray[np.int64], ...]
    """Row indices of each sample's tokens, in order."""
    prompts: tuple[int, ...]
    """Number of prompt tokens of each sample."""
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # indices by numpy: nothing to trace
    def planned(self, plan: Callable[["PackedRow"], Plan]) -> Plan:
        """Return `plan(row)`, for example the index arrays of a kernel; cached for all layers."""
        if plan not in self._plans:
            self._plans[plan] = plan(self)
        return self._plans[plan]  # type: ignore[no-any-return]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an integer array as a tensor of indices on the device of the row."""
        return indices(array, self.token_ids_R.device)

    def forward_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        return {
            "input_ids": self.token_ids_R[None],
            "position_ids": self.position_ids_R[None],
            "attention_mask": None,  # packed_row says which tokens see each other
            "use_cache": False,  # keys and values are not needed again
            "packed_row": self,
        }


def pack_row(
    token_ids: NDArray[np.int32],
    sample_offsets: NDArray[np.int64],
    prompt_lengths: NDArray[np.int64],
    prompts: Sequence[int],
    device: torch.device,
) -> PackedRow:
    """Return the row of a micro-batch.

    Args:
        token_ids: (N,) prompt and completion of each sample, one after the other.
        sample_offsets: (B+1,) start of each sample, and the end of the last.
        prompt_lengths: (B,) tokens of each sample's prompt, at least 1.
        prompts: (B,) number of each sample's prompt; neighbouring samples with one number share the prompt.
        device: device of the tensors.
    """
    row: list[NDArray[np.int32]] = []
    positions, index_of, sources = [], [], []
    end = 0
    prompt_index = np.zeros(0, np.int64)
    for b, prompt in enumerate(prompts):
        sample = token_ids[sample_offsets[b] : sample_offsets[b + 1]]
        size = int(prompt_lengths[b])
        # samples with the same prompt are neighbours in a micro-batch, so a look at the sample before suffices
        if b == 0 or prompt != prompts[b - 1]:
            prompt_index = np.arange(end, end + size)
            row.append(sample[:size])
            positions.append(np.arange(size))
            end += size
        num_completion = sample.size - size
        # the last token predicts nothing, so it is left out
        completion_index = np.arange(end, end + max(0, num_completion - 1))
        row.append(sample[size : size + completion_index.size])
        # every completion starts right behind the prompt, wherever it stands in the row
        positions.append(size + np.arange(completion_index.size))
        end += completion_index.size
        index = np.concatenate([prompt_index, completion_index])
        index_of.append(index)
        # the shift by one: a token is predicted by the output before it, the first one by the last prompt token
        sources.append(index[size - 1 :][:num_completion])
    return PackedRow(
        token_ids_R=indices(np.concatenate(row), device),
        position_ids_R=indices(np.concatenate(positions), device),
        source_T=indices(np.concatenate(sources), device),
        samples=tuple(index_of),
        prompts=tuple(prompt_lengths.tolist()),
    )


def indices(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array of whole numbers as a tensor of indices."""
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
