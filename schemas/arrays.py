"""Arrays as declared fields of messages: dtype, axes, and the axes that must agree within one message.

    token_ids: Array_N_i4        # Annotated[NDArray[int32], ArraySpec("<i4", ("N",))]

An axis is a name (`N`), a name plus a number (`G+1`, the offsets of G things) or a number (`3`). The same name means
the same length everywhere in one message; `ArrayLayout.check` holds a message to that.
"""

import operator
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
    def plan(self) -> tuple[tuple[str | None, int], ...]:
        """(axis name or None, constant) per axis: `G+1` is ("G", 1) and `3` is (None, 3)."""
        return tuple(_parse_axis(axis) for axis in self.axes)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Only the class is checked here; `ArrayLayout.check` sees all arrays of a message and checks the rest."""
        return core_schema.is_instance_schema(np.ndarray)


def _parse_axis(axis: str) -> tuple[str | None, int]:
    if axis.isdigit():
        return None, int(axis)
    name, _, constant = axis.partition("+")
    return name, int(constant or 0)


class ArrayLayout:
    """The array fields of one message type in wire order, prepared so that checking them costs about 2 µs a message.

    `text` names every array with its dtype. It travels with each message, so that a peer whose arrays differ is
    refused by one comparison: `prompt_ids:<i4 completion_offsets:<i8 …`.
    """

    def __init__(self, specs: dict[str, ArraySpec]) -> None:
        self.specs = specs
        self.text = " ".join(f"{name}:{spec.dtype_name}" for name, spec in specs.items())
        self.dtypes = tuple((name, spec.dtype) for name, spec in specs.items())
        self._plan = tuple((name, spec.dtype, len(spec.axes), spec.plan) for name, spec in specs.items())

    def check(self, values: dict[str, Any]) -> None:
        """Hold arrays to their specs: dtype, number of axes, and equal lengths for equal axis names.

        Raises:
            ValueError: names the field, what it has and what is declared.
        """
        lengths: dict[str | None, int] = {None: 0}  # an axis of constant length c is the axis None plus c
        for name, dtype, num_axes, plan in self._plan:
            array = values[name]
            if array.dtype is not dtype and array.dtype != dtype:
                raise ValueError(f"{name}: dtype {array.dtype.str}, declared {dtype.str}")
            shape = array.shape
            if len(shape) != num_axes:
                raise ValueError(f"{name}: shape {shape}, declared axes {self.specs[name].axes}")
            for length, (axis, constant) in zip(shape, plan, strict=True):
                if length < constant or lengths.setdefault(axis, length - constant) != length - constant:
                    raise ValueError(self._wrong_length(name, shape, lengths))

    def _wrong_length(self, name: str, shape: tuple[int, ...], lengths: dict[str | None, int]) -> str:
        axes = self.specs[name].axes
        known = ", ".join(f"{axis} = {length}" for axis, length in lengths.items() if axis is not None)
        return f"{name}: shape {shape}, declared axes {axes}" + (f", where the message has {known}" if known else "")


def rises_strictly(values: NDArray[np.int64]) -> bool:
    """Whether each value is greater than the one before."""
    if values.size <= _FEW:
        few = values.tolist()
        return all(map(operator.lt, few, few[1:]))
    return bool((values[1:] > values[:-1]).all())


_FEW = 64
"""Up to here a list is faster than numpy, whose every call costs about 1 µs."""


def check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    """Offsets start at 0, rise strictly, and end at `end`: so every part has at least one element.

    Raises:
        ValueError: names the field.
    """
    if offsets.item(0) != 0 or offsets.item(-1) != end or not rises_strictly(offsets):
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
