"""Rows of tokens with several samples. No sample sees another; a prefix that samples have in common is there once.

Completions of a single turn have the prompt of their group in common. The prompt of a branch starts with tokens of an
earlier sample, sampled ones among them: they are predicted for the earlier sample, and are only context here. The last
token of a completion predicts nothing, so the row leaves it out:

    prompt ab, completions XY. and Z.    row      a b X Y Z        positions 0 1 2 3 2
                                         sample 0 [0 1 2 3]        sample 1 [0 1 4]
    prompt abXc of a branch, V.          row      a b X Y c V      positions 0 1 2 3 3 4
                                         sample 1 [0 1 2 4 5]      shared with the sample before: 3

Samples stand depth first: the tokens of a sample and of all that continue it are neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.models.attention.row_ranks import RowRanks, own_part, with_all_heads, with_all_tokens
from actors.models.vision.positions import image_positions
from actors.models.vision.row_images import PlacedImage, RowImages
from schemas.routed import UNKNOWN, Experts

Plan = TypeVar("Plan")
Attention = Callable[..., tuple[Tensor, None]]


@dataclass(frozen=True)
class RowLengths:
    """Lengths to which rows are padded, few enough for code and memory that are prepared for each length."""

    multiple: int = 1
    """Tokens; 1: no row is padded."""
    longest: int = 0
    """Tokens of the longest row (`packer.sequence_len`), which is a length too."""

    def of(self, length: int) -> int:
        """Return the least such length that holds a row."""
        return max(length, min(-(-length // self.multiple) * self.multiple, self.longest))


UNPADDED = RowLengths()


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
    has_many_copies: bool = False
    """True if the samples together may have many times the row's tokens: a completion has several samples, or a group's
    prompt counts once in the capacity (`packer.count_prompts`)."""
    images: RowImages | None = None
    """Images of the row; None if no sample has any."""
    experts_RLK: Tensor | None = None
    """Experts that the engine chose for each token in each layer (`router_replay`); None: the routers choose."""
    ranks: RowRanks | None = None
    """Ranks that compute the row together; None: this process computes all of it."""
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # indices by numpy: nothing to trace
    def planned(self, plan: Callable[["PackedRow"], Plan]) -> Plan:
        """Return `plan(row)`, for example the index arrays of a kernel; cached for all layers."""
        if plan not in self._plans:
            self._plans[plan] = plan(self)
        return self._plans[plan]  # type: ignore[no-any-return]

    def padded(self, size: int) -> "PackedRow":
        """Return the row with tokens behind it that are in no sample, up to `size` tokens; cached."""
        missing = size - len(self.token_ids_R)
        if not missing:
            return self
        if ("padded", size) not in self._plans:
            ids, positions = (nn.functional.pad(x, (0, missing)) for x in (self.token_ids_R, self.position_ids_R))
            images = None if self.images is None else self.images.padded(missing)
            experts = self.experts_RLK
            if experts is not None:
                experts = nn.functional.pad(experts, (0, 0, 0, 0, 0, missing), value=UNKNOWN)
            self._plans["padded", size] = PackedRow(
                ids, positions, self.source_T, self.samples, self.has_many_copies, images, experts
            )
        return self._plans["padded", size]  # type: ignore[no-any-return]

    def divided(self, ranks: RowRanks) -> "PackedRow":
        """Return the row as one that ranks compute together: this rank passes its part to the model; cached."""
        padded = self.padded(-(-len(self.token_ids_R) // ranks.size) * ranks.size)
        key = ("divided", ranks.has_own_heads)
        if key not in self._plans:
            self._plans[key] = replace(padded, ranks=ranks, _plans={})
        return self._plans[key]  # type: ignore[no-any-return]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an integer array as a tensor of indices on the device of the row."""
        return indices(array, self.token_ids_R.device)

    def forward_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward, with images inside `vision.row_images.placing`.

        Of a divided row, the tokens are those of this rank.
        """
        more = {} if self.images is None else self.images.forward_arguments()
        ids, positions = self.token_ids_R, self.position_ids_R
        if self.ranks is not None:
            ids = own_part(ids, self.ranks)
            if not self.ranks.has_own_heads:  # queries are turned by positions where they are computed
                positions = own_part(positions, self.ranks)
        return {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": None,  # packed_row says which tokens see each other
            "use_cache": False,  # keys and values are not needed again
            "packed_row": self,
        } | more


def pack_row(
    token_ids: NDArray[np.int32],
    sample_offsets: NDArray[np.int64],
    prompt_lengths: NDArray[np.int64],
    shared: Sequence[int],
    device: torch.device,
    has_many_copies: bool = False,
    images: Sequence[Sequence[PlacedImage]] = (),
    experts: Sequence[Experts] = (),
) -> PackedRow:
    """Return the row of a micro-batch.

    Args:
        token_ids: (N,) prompt and completion of each sample, one after the other.
        sample_offsets: (B+1,) start of each sample, and the end of the last.
        prompt_lengths: (B,) tokens of each sample's prompt, at least 1.
        shared: (B,) leading tokens that a sample shares with the sample before it; at most its prompt.
        device: device of the tensors.
        has_many_copies: the samples together may have many times the row's tokens.
        images: images of each sample in the order of their places, all in tokens that the row holds; empty if no
            sample has any. In shared tokens both samples have the same images, none of which is cut.
        experts: of each sample, the experts of its tokens behind the shared ones; empty if none are known.
    """
    row: list[NDArray[np.int32]] = []
    chosen: list[Experts] = []
    positions, index_of, sources = [], [], []
    end = 0
    index = np.zeros(0, np.int64)
    for b, prefix in enumerate(shared):
        sample = token_ids[sample_offsets[b] : sample_offsets[b + 1]]
        size = int(prompt_lengths[b])
        num_completion = sample.size - size
        # the last token predicts nothing, so it is left out
        held = size + max(0, num_completion - 1)
        row.append(sample[prefix:held])
        if experts:
            chosen.append(experts[b][: held - prefix])
        # every sample continues right behind what it shares, wherever it stands in the row
        positions.append(np.arange(prefix, held))
        index = np.concatenate([index[:prefix], np.arange(end, end + held - prefix)])
        assert index.size == held, "a sample shares more tokens than the sample before it has in the row"
        end += held - prefix
        index_of.append(index)
        # the shift by one: a token is predicted by the output before it, the first one by the last prompt token
        sources.append(index[size - 1 :][:num_completion])
    return PackedRow(
        images=_row_images(images, shared, index_of, end, device) if any(images) else None,
        token_ids_R=indices(np.concatenate(row), device),
        position_ids_R=indices(np.concatenate(positions), device),
        source_T=indices(np.concatenate(sources), device),
        samples=tuple(index_of),
        has_many_copies=has_many_copies,
        # int16, which holds all: arrays of a row may have different types
        experts_RLK=torch.from_numpy(np.concatenate(chosen).astype(np.int16)).to(device) if chosen else None,
    )


def _row_images(
    images: Sequence[Sequence[PlacedImage]],
    shared: Sequence[int],
    index_of: Sequence[NDArray[np.int64]],
    num_tokens: int,
    device: torch.device,
) -> RowImages:
    """Return the images of a row.

    Args:
        images: images of each sample.
        shared: leading tokens that each sample shares with the sample before it.
        index_of: row indices of each sample's tokens.
        num_tokens: tokens of the row.
        device: device of the tensors.
    """
    positions_3R, seen_R = np.zeros((3, num_tokens), np.int64), np.zeros(num_tokens, bool)
    features = []
    for own, prefix, index in zip(images, shared, index_of, strict=True):
        positions_3R[:, index] = image_positions(index.size, [image.span for image in own])
        for image in own:
            if image.start >= prefix:  # others are in the row already
                seen_R[index[image.start : image.span.end]] = True
                features.append(image.features)
    seen = torch.from_numpy(seen_R).to(device)
    return RowImages(torch.from_numpy(positions_3R).to(device), seen, tuple(features))


def ends_of(row: PackedRow) -> NDArray[np.int64]:
    """Return for each token of the row the end (exclusive) of the tokens that see it, (R,).

    A row is depth first, so the tokens that see token k are k itself and those from k + 1 to this end. In the row
    a b X Y Z of the module's first example the ends are 5 5 4 4 5.
    """
    ends_R = np.zeros(len(row.token_ids_R), np.int64)
    for index in row.samples:
        ends_R[index] = np.maximum(ends_R[index], index[-1] + 1)
    # padding sees the padding before it, since a kernel may divide by the weights of no key
    ends_R[ends_R == 0] = ends_R.size
    return ends_R


def recomputed(attention: Attention) -> Attention:
    """Return an attention that copies shared tokens for each sample, without keeping copies for the backward pass.

    Only rows with many copies are computed a second time in the backward pass: there the copies may be many times the
    tokens of the row. In other rows all samples together have at most `packer.sequence_len` tokens.
    """

    @wraps(attention)
    def attend(*given: Any, packed_row: PackedRow, **options: Any) -> tuple[Tensor, None]:
        if not (packed_row.has_many_copies and torch.is_grad_enabled()):
            return attention(*given, packed_row=packed_row, **options)
        found: tuple[Tensor, None] = checkpoint(
            attention, *given, use_reentrant=False, packed_row=packed_row, **options
        )
        return found

    return attend


def dividable(attention: Attention) -> Attention:
    """Return an attention that also computes rows divided among ranks: all tokens, for this rank's heads."""

    @wraps(attention)
    def attend(*given: Any, packed_row: PackedRow, **options: Any) -> tuple[Tensor, None]:
        if packed_row.ranks is None or packed_row.ranks.has_own_heads:
            return attention(*given, packed_row=packed_row, **options)
        found: tuple[Tensor, None] = _divided(attention, packed_row.ranks, *given, packed_row=packed_row, **options)
        return found

    return attend


@torch.compiler.disable  # type: ignore[untyped-decorator]  # an exchange with other processes: nothing to trace
def _divided(
    attention: Attention,
    ranks: RowRanks,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    query, key, value = with_all_tokens([query, key, value], ranks)
    return with_all_heads(attention(module, query, key, value, *more, **options)[0], ranks), None


def indices(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array of whole numbers as a tensor of indices."""
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
