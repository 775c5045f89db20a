"""Arrays as declared fields of messages: dtype, axes, and the axes that must agree within one message.

    token_ids: Array_N_i4        # Annotated[NDArray[int32], ArraySpec("<i4", ("N",))]

An axis is a name (`N`), a name plus a number (`G+1`, the offsets of G things) or a number (`3`). The same name means
the same length everywhere in one message; `check_axes` holds a message to that.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class ArraySpec:
    """dtype (little-endian, as numpy writes it) and axes of one array field."""

    dtype_name: str
    axes: tuple[str, ...]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype; always little-endian, so that a frame means the same on every machine."""
        return np.dtype(self.dtype_name)

    @cached_property
    def plan(self) -> tuple[tuple[int, str | None, int], ...]:
        """(position, axis name or None, constant) per axis: `G+1` is (i, "G", 1) and `3` is (i, None, 3)."""
        return tuple((position, *_parse_axis(axis)) for position, axis in enumerate(self.axes))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Only the class is checked here; `check_axes` sees all arrays of a message at once and checks the rest."""
        return core_schema.is_instance_schema(np.ndarray)


def _parse_axis(axis: str) -> tuple[str | None, int]:
    if axis.isdigit():
        return None, int(axis)
    name, _, constant = axis.partition("+")
    return name, int(constant or 0)


def check_axes(arrays: dict[str, tuple[ArraySpec, NDArray[Any]]]) -> None:
    """Hold arrays to their specs: dtype, number of axes, and equal lengths for equal axis names.

    Raises:
        ValueError: names the field, what it has and what is declared.
    """
    lengths: dict[str, int] = {}
    for name, (spec, array) in arrays.items():
        if array.dtype != spec.dtype:
            raise ValueError(f"{name}: dtype {array.dtype.str}, declared {spec.dtype_name}")
        shape = array.shape
        if len(shape) != len(spec.axes):
            raise ValueError(f"{name}: shape {shape}, declared axes {spec.axes}")
        for position, axis, constant in spec.plan:
            length = shape[position] - constant
            if axis is None:
                if length != 0:
                    raise ValueError(f"{name}: axis {position} has length {shape[position]}, declared {constant}")
            elif length < 0 or lengths.setdefault(axis, length) != length:
                raise ValueError(
                    f"{name}: axis {spec.axes[position]} has length {shape[position]}, so {axis} = {length}, "
                    f"but {axis} is {max(lengths.get(axis, 0), 0)} elsewhere in the message"
                )


def check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    """Offsets start at 0, rise strictly, and end at `end`: so every part has at least one element.

    Raises:
        ValueError: names the field.
    """
    if offsets[0] != 0 or offsets[-1] != end or (offsets.size > 1 and not (offsets[1:] > offsets[:-1]).all()):
        raise ValueError(f"{name}: offsets must start at 0, rise strictly and end at {end}, got {offsets[:8]}…")


# The array types of the wire, by axes and dtype.
Int32_P = Annotated[NDArray[np.int32], ArraySpec("<i4", ("P",))]
Int32_N = Annotated[NDArray[np.int32], ArraySpec("<i4", ("N",))]
UInt8_N = Annotated[NDArray[np.uint8], ArraySpec("|u1", ("N",))]
Float32_N = Annotated[NDArray[np.float32], ArraySpec("<f4", ("N",))]
Float32_G = Annotated[NDArray[np.float32], ArraySpec("<f4", ("G",))]
Float64_G = Annotated[NDArray[np.float64], ArraySpec("<f8", ("G",))]
Float64_FG = Annotated[NDArray[np.float64], ArraySpec("<f8", ("F", "G"))]
Offsets_G = Annotated[NDArray[np.int64], ArraySpec("<i8", ("G+1",))]
Segments_S = Annotated[NDArray[np.int64], ArraySpec("<i8", ("S", "3"))]
Float32_S = Annotated[NDArray[np.float32], ArraySpec("<f4", ("S",))]
Int64_B = Annotated[NDArray[np.int64], ArraySpec("<i8", ("B",))]
Int64_K = Annotated[NDArray[np.int64], ArraySpec("<i8", ("K",))]
Offsets_B = Annotated[NDArray[np.int64], ArraySpec("<i8", ("B+1",))]
Offsets_M = Annotated[NDArray[np.int64], ArraySpec("<i8", ("M+1",))]
Holds_H = Annotated[NDArray[np.int64], ArraySpec("<i8", ("H", "2"))]
