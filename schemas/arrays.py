"""Arrays as declared fields of messages: dtype, axes, and the axes that must agree within one message.

    token_ids: Array_N_i4        # Annotated[NDArray[int32], ArraySpec("<i4", ("N",))]

An axis is a name (`N`), a name plus a number (`G+1`, the offsets of G things) or a number (`3`). The same name means
the same length everywhere in one message; `ArrayLayout.check` holds a message to that.
"""

import operator
import reprlib
from collections.abc import Sequence
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
    """The array fields of one message type in wire order, and how their lengths hang together.

    Two fields `offsets: ("G+1",)` and `rewards: ("F", "G")` have the sizes G and F, in order of first appearance. Sizes
    are all that a receiver must be told: [16, 2] means shapes (17,) and (2, 16). `text` says the rest, the same for
    all messages of the type: `offsets:<i8[G+1] rewards:<f8[F,G]`.
    """

    def __init__(self, specs: dict[str, ArraySpec]) -> None:
        self.specs = specs
        self.text = " ".join(f"{name}:{spec.dtype_name}[{','.join(spec.axes)}]" for name, spec in specs.items())
        axes = [(name, i, *axis) for name, spec in specs.items() for i, axis in enumerate(spec.plan)]
        self._sizes = list(dict.fromkeys(axis for _, _, axis, _ in axes if axis is not None))
        first_use = {axis: (name, i, constant) for name, i, axis, constant in reversed(axes)}
        self._first_uses = [first_use[axis] for axis in self._sizes]
        # `open` has the sizes as a list with a 0 behind it, where axes without a name find theirs.
        places = {axis: place for place, axis in enumerate([*self._sizes, None])}
        plans = {name: [(places[axis], constant) for axis, constant in spec.plan] for name, spec in specs.items()}
        self._dtypes = [(name, spec.dtype) for name, spec in specs.items()]
        self._vectors = [(name, *plan[0]) for name, plan in plans.items() if len(plan) == 1]
        self._tables = [(name, plan) for name, plan in plans.items() if len(plan) > 1]

    def sizes(self, values: dict[str, Any]) -> list[int]:
        """The sizes of arrays that have been checked."""
        return [values[name].shape[i] - constant for name, i, constant in self._first_uses]

    def open(self, sizes: list[int], buffers: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Read-only views of flat byte buffers as the declared arrays; all that `check` demands holds by construction.

        Raises:
            ValueError, TypeError: sizes and buffers do not fit the layout or each other.
        """
        if len(sizes) != len(self._sizes) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {reprlib.repr(sizes)} for the arrays {self.text!r}")
        arrays = {}
        for (name, dtype), buffer in zip(self._dtypes, buffers, strict=True):
            array = arrays[name] = np.frombuffer(buffer, dtype)
            if buffer.__class__ is not bytes:
                array.setflags(False)  # type: ignore[call-arg]  # by keyword it takes twice as long
        lengths = [*sizes, 0]
        for name, place, constant in self._vectors:
            if len(arrays[name]) != lengths[place] + constant:
                raise ValueError(f"{name}: {len(arrays[name])} elements, its size is {lengths[place] + constant}")
        for name, plan in self._tables:
            arrays[name] = arrays[name].reshape([lengths[place] + constant for place, constant in plan])
        return arrays

    def check(self, values: dict[str, Any]) -> None:
        """Hold arrays to their specs: dtype, number of axes, and equal lengths for equal axis names.

        Raises:
            ValueError: names the field, what it has and what is declared.
        """
        sizes: dict[str | None, int] = {None: 0}
        for name, spec in self.specs.items():
            array = values[name]
            if array.dtype != spec.dtype:
                raise ValueError(f"{name}: dtype {array.dtype.str}, declared {spec.dtype_name}")
            if array.ndim != len(spec.axes):
                raise ValueError(f"{name}: shape {array.shape}, declared axes ({', '.join(spec.axes)})")
            for length, (axis, constant) in zip(array.shape, spec.plan, strict=True):
                size = length - constant
                if size < 0 or sizes.setdefault(axis, size) != size:
                    elsewhere = f"; {axis} is {sizes[axis]} elsewhere" if axis is not None and axis in sizes else ""
                    raise ValueError(f"{name}: shape {array.shape}, declared axes ({', '.join(spec.axes)}){elsewhere}")


def check_starts(name: str, starts: NDArray[np.int64], end: int) -> None:
    """Parts of something of length `end` start at 0, then further and further on; none is empty.

    Raises:
        ValueError: names the field.
    """
    first, last, rises = _course(starts) if len(starts) else (None, end, False)
    if first != 0 or last >= end or not rises:
        raise ValueError(f"{name}: must start at 0, rise strictly and stay below {end}, got {starts[:8].tolist()}…")


def check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    """Offsets are the starts of parts and, behind them, their end.

    Raises:
        ValueError: names the field.
    """
    first, last, rises = _course(offsets)
    if first != 0 or last != end or not rises:
        raise ValueError(f"{name}: must start at 0, rise strictly and end at {end}, got {offsets[:8].tolist()}…")


def _course(values: NDArray[np.int64]) -> tuple[int, int, bool]:
    """First value, last value, and whether each is greater than the one before."""
    if len(values) <= 64:  # a call of numpy costs about 1 µs; up to here a list is faster
        few = values.tolist()
        return few[0], few[-1], all(map(operator.lt, few, few[1:]))
    return values.item(0), values.item(-1), bool((values[1:] > values[:-1]).all())


# The array types of the wire, by axes and dtype.
Int32_P = Annotated[NDArray[np.int32], ArraySpec("<i4", ("P",))]
Int32_N = Annotated[NDArray[np.int32], ArraySpec("<i4", ("N",))]
UInt8_N = Annotated[NDArray[np.uint8], ArraySpec("|u1", ("N",))]
Float32_N = Annotated[NDArray[np.float32], ArraySpec("<f4", ("N",))]
Float32_A = Annotated[NDArray[np.float32], ArraySpec("<f4", ("A",))]
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
Int64_U = Annotated[NDArray[np.int64], ArraySpec("<i8", ("U",))]
Offsets_U = Annotated[NDArray[np.int64], ArraySpec("<i8", ("U+1",))]
Holds_H = Annotated[NDArray[np.int64], ArraySpec("<i8", ("H", "2"))]
