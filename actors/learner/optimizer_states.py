"""State of an optimizer, in memory and as a checkpoint has it.

In 8 bits a number is a code, an index into a map of 256 values, and a block of numbers has a scale (Dettmers et al.
2021, arXiv 2110.02861). bitsandbytes counts blocks of 256 through the whole weight. A weight that is spread over ranks
has blocks of 128 within its rows, so that each rank has whole blocks, however many ranks there are. A checkpoint has
both under the names of bitsandbytes: state1 (codes), qmap1 (map) and absmax1 (scales) for the mean of the gradients,
the same with a 2 for the mean of their squares. Scales of blocks within rows have as many axes as the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from actors.learner.shards import part, placed, spread_as

Value = Tensor | int
"""State of a parameter: moments, maps of a quantisation; a count of steps may be a number."""
State = dict[str, Value]
"""All state of a parameter, by name."""

WHOLE_BLOCK, ROW_BLOCK = 256, 128
"""Numbers with the same scale: in bitsandbytes, and in weights that are spread over ranks."""
SMALLEST = 4096
"""Weights with fewer numbers have their state in float32, as in bitsandbytes."""
MOMENTS = {"1": ("exp_avg", True), "2": ("exp_avg_sq", False)}
"""By the suffix in a checkpoint: name in torchao, and whether numbers may be negative."""


@dataclass(frozen=True)
class StateFormat:
    """How the state of a kind of optimizer is begun, saved and loaded. This one: as torch's optimizers have it."""

    begin: Callable[[Tensor], State] = lambda parameter: {}
    """Return the state before the first update; empty: the optimizer makes it."""
    saved: Callable[[State], State] = lambda state: state
    """Return state in memory as a checkpoint has it."""
    loaded: Callable[[Tensor, State], State] = lambda parameter, state: {
        name: placed(value, parameter) for name, value in state.items()
    }
    """Return a parameter's state in memory from that of a checkpoint."""


# --- bitsandbytes ------------------------------------------------------------------------------------------------


def _whole_from_saved(parameter: Tensor, state: State) -> State:
    """Return the state for bitsandbytes. Blocks within rows, which it does not know, are quantised again."""
    found = dict(state)
    for suffix in MOMENTS:
        scales = state.get(f"absmax{suffix}")
        if isinstance(scales, Tensor) and scales.ndim > 1:
            from bitsandbytes.functional import quantize_blockwise

            code: Any = state[f"qmap{suffix}"]
            codes, quantised = quantize_blockwise(in_float32(state, suffix), code, blocksize=WHOLE_BLOCK)
            found |= {f"state{suffix}": codes, f"absmax{suffix}": quantised.absmax}
    return {name: placed(value, parameter) for name, value in found.items()}


# --- torchao -----------------------------------------------------------------------------------------------------


def has_row_blocks(parameter: Tensor) -> bool:
    """Return whether the state of a spread weight is in 8 bits: each rank has rows of it, of whole blocks.

    All ranks return the same.
    """
    rows, ranks = parameter.shape[0], 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            ranks *= parameter.device_mesh.size(axis) if placement.is_shard(0) else 1
    is_on_all = -(-rows // ranks) * (ranks - 1) < rows
    is_large = parameter.ndim > 1 and parameter.numel() >= SMALLEST
    return is_large and is_on_all and part(parameter).shape[-1] % ROW_BLOCK == 0


def _row_blocks_begun(parameter: Tensor) -> State:
    """Return zeros: 8 bits where the weight has whole blocks, else float32."""
    from torchao.optim.subclass_8bit import OptimState8bit

    local, found = part(parameter), State(step=torch.tensor(0.0))
    for name, is_signed in MOMENTS.values():
        if has_row_blocks(parameter):
            zeros = OptimState8bit.zeros(local.shape, is_signed, ROW_BLOCK, local.device, torch.float32)
        else:
            zeros = torch.zeros_like(local, dtype=torch.float32)
        found[name] = spread_as(zeros, parameter)
    return found


def _row_blocks_saved(state: State) -> State:
    found: State = {"step": int(state["step"])}
    for suffix, (name, _) in MOMENTS.items():
        value: Any = state[name]
        local: Any = part(value)
        if not hasattr(local, "codes"):
            found[f"state{suffix}"] = value
            continue
        found[f"state{suffix}"] = spread_as(local.codes, value)
        found[f"qmap{suffix}"] = local.qmap
        found[f"absmax{suffix}"] = spread_as(local.scale.view(*local.shape[:-1], -1), value, per=ROW_BLOCK)
    return found


def _row_blocks_loaded(parameter: Tensor, state: State) -> State:
    """Return the state for torchao. Blocks of bitsandbytes are quantised again."""
    found = _row_blocks_begun(parameter)
    found["step"] = torch.tensor(float(state["step"]))
    for suffix, (name, _) in MOMENTS.items():
        local: Any = part(found[name])  # type: ignore[arg-type]
        scales: Any = state.get(f"absmax{suffix}")
        if hasattr(local, "codes") and scales is not None and scales.ndim > 1:
            codes: Any = state[f"state{suffix}"]
            local.codes.copy_(part(placed(codes, parameter)))
            local.scale.copy_(part(placed(scales, parameter, per=ROW_BLOCK)).flatten())
        else:
            local.copy_(part(placed(in_float32(state, suffix), parameter)))
    return found


def in_float32(state: State, suffix: str) -> Tensor:
    """Return a moment from a checkpoint, in the shape of its weight.

    Args:
        suffix: "1": mean of the gradients; "2": mean of their squares.
    """
    codes, scales, values = (state.get(f"{name}{suffix}") for name in ("state", "absmax", "qmap"))
    assert isinstance(codes, Tensor)
    if not (isinstance(scales, Tensor) and isinstance(values, Tensor)):
        return codes.float()
    block = WHOLE_BLOCK if scales.ndim == 1 else codes.shape[-1] // scales.shape[-1]
    scale = scales.flatten().repeat_interleave(block)[: codes.numel()]
    return values[codes.long()] * scale.view(codes.shape)


PLAIN = StateFormat()
WHOLE_BLOCKS = StateFormat(loaded=_whole_from_saved)
"""Of bitsandbytes."""
ROW_BLOCKS = StateFormat(_row_blocks_begun, _row_blocks_saved, _row_blocks_loaded)
"""Of torchao, for weights that are spread over ranks."""
