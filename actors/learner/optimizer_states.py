"""State of an optimizer, in memory and as a checkpoint has it.

In 8 bits a number is a code, an index into a map of 256 values, and a block of 256 numbers has a scale (Dettmers et al.
2021, arXiv 2110.02861). Names are those of bitsandbytes: state1 (codes), qmap1 (map) and absmax1 (scales) for the mean
of the gradients, the same with a 2 for the mean of their squares.

bitsandbytes counts blocks through the whole weight. A weight that is spread over ranks has its state in 8 bits if no
block reaches over the end of a row: then each rank has whole blocks, however many ranks there are, and the blocks are
those of bitsandbytes. Their scales are saved with as many axes as the weight, so that they are spread as the weight is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.learner.shards import part, placed, spread_as

Value = Tensor | int
"""State of a parameter: moments, maps of a quantisation; a count of steps may be a number."""
State = dict[str, Value]
"""All state of a parameter, by name."""

BLOCK = 256
"""Numbers with the same scale."""
SMALLEST = 4096
"""Weights with fewer numbers have their state in float32, as in bitsandbytes."""
MOMENTS = {"1": True, "2": False}
"""Suffix of each moment's names, and whether its numbers may be negative."""


@dataclass(frozen=True)
class StateFormat:
    """How the state of a kind of optimizer is saved and loaded. This one: as torch's optimizers have it."""

    saved: Callable[[Tensor, State], State] = lambda parameter, state: state
    """Return a parameter's state in memory as a checkpoint has it."""
    loaded: Callable[[Tensor, State], State] = lambda parameter, state: {
        name: placed(value, parameter) for name, value in state.items()
    }
    """Return a parameter's state in memory from that of a checkpoint."""


def has_blocks(parameter: Tensor) -> bool:
    """Return whether the state of a spread weight is in 8 bits: its rows have whole blocks. Equal on all ranks."""
    return parameter.ndim > 1 and parameter.numel() >= SMALLEST and part(parameter).shape[-1] % BLOCK == 0


def _whole_loaded(parameter: Tensor, state: State) -> State:
    """Return the state for bitsandbytes, which has the scales in a line, and all large weights in 8 bits."""
    found = dict(state)
    for suffix, is_signed in MOMENTS.items():
        moment, scales = (state.get(f"{name}{suffix}") for name in ("state", "absmax"))
        if isinstance(scales, Tensor):
            found[f"absmax{suffix}"] = scales.flatten()
        elif isinstance(moment, Tensor) and moment.numel() >= SMALLEST:
            values = _values(is_signed)
            codes, scales = _quantised(moment, values)
            found |= {f"state{suffix}": codes, f"qmap{suffix}": values, f"absmax{suffix}": scales}
    return {name: placed(value, parameter) for name, value in found.items()}


def spread_begun(parameter: Tensor) -> State:
    """Return the state of this rank's part of a weight before the first update."""
    local, found = part(parameter), State(step=0)
    dtype = torch.uint8 if has_blocks(parameter) else torch.float32
    for suffix, is_signed in MOMENTS.items():
        # in rows, whatever the layout of the weight: kernels count numbers by their place in memory
        found[f"state{suffix}"] = torch.zeros(local.shape, dtype=dtype, device=local.device)
        if dtype == torch.float32:
            continue
        found[f"qmap{suffix}"] = _values(is_signed).to(local.device)
        found[f"absmax{suffix}"] = torch.zeros(local.numel() // BLOCK, device=local.device)
    return found


def _spread_saved(parameter: Tensor, state: State) -> State:
    found = dict(state)
    for name, value in _tensors(state):
        if name.startswith("state"):
            found[name] = spread_as(value, parameter)
        elif name.startswith("absmax"):
            found[name] = spread_as(_by_row(value, part(parameter)), parameter, per=BLOCK)
    return found


def _spread_loaded(parameter: Tensor, state: State) -> State:
    """Return this rank's part. State that another layout has in 8 bits, or in float32, is converted."""
    found = spread_begun(parameter)
    found["step"] = int(state["step"])
    for suffix in MOMENTS:
        whole: Any = state[f"state{suffix}"]
        into: Any = found[f"state{suffix}"]
        if whole.dtype == into.dtype == torch.uint8:
            scales: Any = state[f"absmax{suffix}"]
            found[f"absmax{suffix}"] = part(placed(_by_row(scales, parameter), parameter, per=BLOCK)).flatten()
            local = part(placed(whole, parameter))
        else:
            local = part(placed(in_float32(state, suffix), parameter))
            if into.dtype == torch.uint8:
                local, found[f"absmax{suffix}"] = _quantised(local, found[f"qmap{suffix}"])
        into.copy_(local)
    return found


def _by_row(scales: Tensor, like: Tensor) -> Tensor:
    """Return scales with the axes of the weight; a rank without rows has none."""
    return scales.view(*like.shape[:-1], like.shape[-1] // BLOCK)


def _values(is_signed: bool) -> Tensor:
    """Return the map of codes to values."""
    from bitsandbytes.functional import create_dynamic_map

    values: Tensor = create_dynamic_map(signed=is_signed)  # type: ignore[no-untyped-call]
    return values


def _quantised(moment: Tensor, values: Any) -> tuple[Tensor, Tensor]:
    """Return codes and scales."""
    from bitsandbytes.functional import quantize_blockwise

    codes, found = quantize_blockwise(moment.contiguous(), values, blocksize=BLOCK)
    return codes, found.absmax


def in_float32(state: State, suffix: str) -> Tensor:
    """Return a moment from a checkpoint in the shape of its weight.

    Args:
        suffix: "1": mean of the gradients; "2": mean of their squares.
    """
    codes, scales, values = (state.get(f"{name}{suffix}") for name in ("state", "absmax", "qmap"))
    assert isinstance(codes, Tensor)
    if not (isinstance(scales, Tensor) and isinstance(values, Tensor)):
        return codes
    scale = scales.flatten().repeat_interleave(BLOCK)[: codes.numel()]
    return values[codes.long()] * scale.view(codes.shape)


def _tensors(state: State) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor)]


PLAIN = StateFormat()
WHOLE_BLOCKS = StateFormat(loaded=_whole_loaded)
"""Of bitsandbytes."""
SPREAD_BLOCKS = StateFormat(_spread_saved, _spread_loaded)
"""Of `SpreadAdamW8bit`."""
