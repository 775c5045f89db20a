"""Routed experts on the wire: the experts that an engine's routers chose for each token, in each layer.

An array (tokens, layers, experts per token) of int8 or int16. UNKNOWN stands where no choice is known: for the last
token of a sample, which no engine has computed, and for dense layers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[Any]
"""Array (tokens, layers, experts per token)."""
UNKNOWN = -1
"""In place of an expert's index."""
CHUNK_BYTES = 32 << 20
"""Bytes of a piece on the wire."""


def packed(experts: Experts) -> tuple[list[bytes], list[int]]:
    """Return an array as pieces of bytes, with bytes per index, layers, and experts per token."""
    data = np.ascontiguousarray(experts).tobytes()
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    return pieces, [experts.itemsize, *experts.shape[1:]]


def unpacked(pieces: Sequence[bytes], layout: Sequence[int], start: int = 0, end: int | None = None) -> Experts:
    """Return the array of `packed`, or its tokens from `start` to `end` (exclusive); read-only.

    Only the pieces with these tokens are copied.
    """
    size, num_layers, num_chosen = layout
    token_bytes = size * num_layers * num_chosen
    low, high = start * token_bytes, None if end is None else end * token_bytes
    found, begin = list[bytes | memoryview](), 0
    for piece in pieces:
        view = memoryview(piece)[max(0, low - begin) : None if high is None else max(0, high - begin)]
        if view:
            found.append(view)
        begin += len(piece)
    data = found[0] if len(found) == 1 else b"".join(found)
    experts: Experts = np.frombuffer(data, f"<i{size}").reshape(-1, num_layers, num_chosen)
    return experts


def check(pieces: Sequence[bytes], layout: Sequence[int], num_tokens: int) -> None:
    """Check that pieces hold the experts of a number of tokens.

    Raises:
        ValueError: they do not; names the field.
    """
    if len(layout) != 3 or layout[0] not in (1, 2) or min(layout) < 1:
        raise ValueError(f"expert_layout: {list(layout)} is not bytes per index (1 or 2), layers, experts per token")
    found, expected = sum(map(len, pieces)), num_tokens * layout[0] * layout[1] * layout[2]
    if found != expected:
        raise ValueError(f"routed_experts: {found} bytes, and {num_tokens} tokens of {list(layout)} have {expected}")


def bounds(pieces: Sequence[bytes], layout: Sequence[int]) -> tuple[int, int]:
    """Return the least and the largest index; UNKNOWN for both if there are none."""
    # no index lies in two pieces, since CHUNK_BYTES is even
    found = [np.frombuffer(piece, f"<i{layout[0]}") for piece in pieces if piece]
    if not found:
        return UNKNOWN, UNKNOWN
    return min(int(part.min()) for part in found), max(int(part.max()) for part in found)


def narrow(experts: NDArray[Any]) -> Experts:
    """Return an array in the smallest type that holds it."""
    small = not experts.size or int(experts.max()) <= np.iinfo(np.int8).max
    return experts.astype(np.int8 if small else np.int16, copy=False)


def unknown(num_tokens: int, like: Experts) -> Experts:
    """Return an array of which nothing is known."""
    return np.full((num_tokens, *like.shape[1:]), UNKNOWN, like.dtype)
