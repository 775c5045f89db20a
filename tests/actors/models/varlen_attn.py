"""torch's kernel for sequences of different lengths, with the parameters that we give it: it has none for CPUs."""

import inspect
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.actors.models.flash_attn import attend

PARAMETERS = inspect.signature(varlen.varlen_attn).parameters
"""What the kernel of the installed torch takes: 2.13 has to be asked for fewer heads of keys, 2.11 can't be."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """(N, heads, dim) of sequences one after the other, as torch says it."""
    assert window_size[1] == 0, "0 to the right: causal"
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa == ("enable_gqa" in PARAMETERS and query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    bounds = cu_seq_q.tolist()
    assert max_q == max_k == max(end - start for start, end in pairwise(bounds))
    return torch.cat(
        [
            attend(query[start:end], key[start:end], value[start:end], scale, window_size[0], 0.0)
            for start, end in pairwise(bounds)
        ]
    )


varlen_attn.__signature__ = inspect.Signature(PARAMETERS.values())  # type: ignore[attr-defined]
