"""Attention for packed rows: samples in one row of tokens, none sees another, a shared prompt is computed once.

Linear layers want one long row; attention wants each sequence apart (a block-diagonal mask over a row still costs the
square of the row). So tokens travel through the model as one row, and only inside the attention function they are
gathered into one padded block per class of lengths, attended causally, and scattered back. Padding is on the right, so
causality alone keeps real tokens from seeing it.

Completions of one group have the same prompt. The row holds it once, and every completion's gather index points at it.
The last token of a completion is predicted and predicts nothing, so it is not in the row at all:

    prompt ab, completions XY. and Z.    row      a b X Y Z        positions 0 1 2 3 2
                                         sample 0 [0 1 2 3]        sample 1 [0 1 4 –]

Registered with transformers' AttentionInterface, so that no model code is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "grpo_packed"


@dataclass(frozen=True)
class PackedRow:
    """How one row of R tokens falls apart into B samples.

    `blocks` are (b, l) indices into the row, one block per class of lengths; `back_R` says where in the concatenation
    of the blocks' outputs each row token's output stands.
    """

    token_ids_R: Tensor
    position_ids_R: Tensor
    blocks: tuple[Tensor, ...]
    back_R: Tensor
    source_T: Tensor
    """Row index whose output predicts completion token t: the token before it in its sample."""
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, length: int, sliding_window: int | None) -> Tensor:
        """Which key (column) a query (row) of a block sees; made once per forward, since all layers ask for it."""
        found = self._masks.get((length, sliding_window))
        if found is None:
            at = torch.arange(length, device=self.back_R.device)
            age = at[:, None] - at[None]
            found = (age >= 0) & (age < (sliding_window or length))
            self._masks[length, sliding_window] = found
        return found

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
    blocks, back = _blocks(index_of, end)
    return PackedRow(
        token_ids_R=_tensor(np.concatenate(row), device),
        position_ids_R=_tensor(np.concatenate(positions), device),
        blocks=tuple(_tensor(block, device) for block in blocks),
        back_R=_tensor(back, device),
        source_T=_tensor(np.concatenate(sources), device),
    )


def _blocks(
    index_of: list[NDArray[np.int64]], num_row_tokens: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Padded index blocks, samples of like length (within a factor of two) together, and the way back."""
    by_class: dict[int, list[NDArray[np.int64]]] = {}
    for index in index_of:
        by_class.setdefault(int(index.size).bit_length(), []).append(index)
    blocks, back, start = [], np.zeros(num_row_tokens, np.int64), 0
    for indices in by_class.values():
        width = max(index.size for index in indices)
        block = np.zeros((len(indices), width), np.int64)
        for b, index in enumerate(indices):
            block[b, : index.size] = index
            back[index] = start + b * width + np.arange(index.size)
        blocks.append(block)
        start += block.size
    return blocks, back


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: PackedRow,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sample of a packed row; (1, heads, R, dim) → (1, R, heads, dim)."""
    query_R, key_R, value_R = (x[0].transpose(0, 1) for x in (query, key, value))  # (R, heads, dim)
    outputs = []
    for block in packed_row.blocks:
        q, k, v = (_gathered(x, block).transpose(1, 2) for x in (query_R, key_R, value_R))  # (b, heads, l, dim)
        length = block.shape[1]
        reaches_back = sliding_window is None or length <= sliding_window
        if softcap is not None:
            out = capped_attention(q, k, v, packed_row.mask(length, sliding_window), scaling, softcap)
        else:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if reaches_back else packed_row.mask(length, sliding_window),
                is_causal=reaches_back,
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packed_row.back_R)[None], None


def _gathered(x_R: Tensor, block: Tensor) -> Tensor:
    """(R, …) → (b, l, …); index_select, since its backward on a CPU takes half the time of indexing."""
    return x_R.index_select(0, block.flatten()).view(*block.shape, *x_R.shape[1:])


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores are bent to ±softcap (Gemma 2), which torch's fused kernels don't offer.

    Args:
        query: (b, heads, l, dim); key and value may have fewer heads, each for as many consecutive ones of the query.
        seen: bool, broadcasts to (b, 1, l, keys).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)


AttentionInterface.register(NAME, packed_attention)
