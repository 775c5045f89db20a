"""Rows of tokens in which several samples stand, none of which sees another; a shared prompt stands there once.

Completions of one group have the same prompt. The row holds it once, and every completion's tokens attend to it. The
last token of a completion is predicted and predicts nothing, so it is not in the row at all:

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
    """One row of R tokens, and how it falls apart into samples."""

    token_ids_R: Tensor
    position_ids_R: Tensor
    source_T: Tensor
    """Row index whose output predicts completion token t: the token before it in its sample."""
    samples: tuple[NDArray[np.int64], ...]
    """Row indices of each sample's tokens, in their order."""
    prompts: tuple[int, ...]
    """How many of them are its prompt's."""
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # numpy computes indices, which nobody need trace
    def planned(self, plan: Callable[["PackedRow"], Plan]) -> Plan:
        """What a kernel makes of this row; once per forward, since all layers ask for it."""
        if plan not in self._plans:
            self._plans[plan] = plan(self)
        return self._plans[plan]  # type: ignore[no-any-return]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """The array as indices on the device of the row."""
        return indices(array, self.token_ids_R.device)

    def forward_arguments(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return {
            "input_ids": self.token_ids_R[None],
            "position_ids": self.position_ids_R[None],
            "attention_mask": None,
            "use_cache": False,
            "packed_row": self,
        }


def pack_row(
    token_ids: NDArray[np.int32],
    sample_offsets: NDArray[np.int64],
    prompt_lengths: NDArray[np.int64],
    groups: Sequence[int],
    device: torch.device,
) -> PackedRow:
    """The row of one micro-batch.

    Args:
        token_ids: (N,) prompt and completion of each sample, one after the other.
        sample_offsets: (B+1,) where samples start.
        prompt_lengths: (B,) tokens of each sample's prompt, at least 1.
        groups: (B,) samples with the same group that stand next to each other share their prompt.
        device: of the tensors.
    """
    row: list[NDArray[np.int32]] = []
    positions, index_of, sources = [], [], []
    end = 0
    prompt_index = np.zeros(0, np.int64)
    for b, group in enumerate(groups):
        sample = token_ids[sample_offsets[b] : sample_offsets[b + 1]]
        size = int(prompt_lengths[b])
        if b == 0 or group != groups[b - 1]:
            prompt_index = np.arange(end, end + size)
            row.append(sample[:size])
            positions.append(np.arange(size))
            end += size
        num_completion = sample.size - size
        completion_index = np.arange(end, end + max(0, num_completion - 1))
        row.append(sample[size : size + completion_index.size])
        positions.append(size + np.arange(completion_index.size))
        end += completion_index.size
        index = np.concatenate([prompt_index, completion_index])
        index_of.append(index)
        sources.append(index[size - 1 :][:num_completion])
    return PackedRow(
        token_ids_R=indices(np.concatenate(row), device),
        position_ids_R=indices(np.concatenate(positions), device),
        source_T=indices(np.concatenate(sources), device),
        samples=tuple(index_of),
        prompts=tuple(prompt_lengths.tolist()),
    )


def indices(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array of whole numbers as a tensor to index with."""
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
