"""Array fields of messages, declared with dtype and axes.

    token_ids: Int32_N        # Annotated[NDArray[int32], ArraySpec("<i4", ("N",))]

An axis is a name (`N`), a name plus a number (`G+1`, the offsets of G parts) or a number (`3`). Within one message,
equal names mean equal lengths. `ArrayLayout.check` verifies arrays of a sender, `ArrayLayout.open` builds valid arrays
from received bytes.
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

SMALL_BYTES = 4096
"""Bytes of an array up to which it travels joined with the other small arrays of its message, in the header: a frame
costs more than it carries."""
ALIGNMENT = 8
"""Bytes; each joined array starts at a multiple."""


@dataclass(frozen=True)
class ArraySpec:
    """Declaration of one array field: dtype in numpy's notation (`<i4`), and axes."""

    dtype_name: str
    axes: tuple[str, ...]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype, always little-endian, so that a frame means the same on every machine."""
        return np.dtype(self.dtype_name)

    @cached_property
    def plan(self) -> tuple[tuple[str | None, int], ...]:
        """Parsed axes, (name or None, constant) each: `G+1` is ("G", 1) and `3` is (None, 3)."""
        plan: list[tuple[str | None, int]] = []
        for axis in self.axes:
            name, _, constant = axis.partition("+")
            plan.append((None, int(axis)) if axis.isdigit() else (name, int(constant or 0)))
        return tuple(plan)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that checks the class only. `ArrayLayout.check` compares all arrays of a message."""
        return core_schema.is_instance_schema(np.ndarray)


class ArrayLayout:
    """Array fields of one message type in wire order, with the relations between their lengths.

    Fields `offsets: ("G+1",)` and `rewards: ("F", "G")` have the sizes G and F, in order of first appearance. A message
    carries only its sizes: [16, 2] means shapes (17,) and (2, 16). The attribute `text` describes the layout and is the
    same for all messages of the type: `offsets:<i8[G+1] rewards:<f8[F,G]`.

    Args:
        specs: declarations by name.
    """

    def __init__(self, specs: dict[str, ArraySpec]) -> None:
        self.specs = specs
        self.text = " ".join(f"{name}:{spec.dtype_name}[{','.join(spec.axes)}]" for name, spec in specs.items())
        axes = [(name, i, *axis) for name, spec in specs.items() for i, axis in enumerate(spec.plan)]
        self._sizes = list(dict.fromkeys(axis for _, _, axis, _ in axes if axis is not None))
        # reversed, so that the first use of an axis is the one that stays
        first_use = {axis: (name, i, constant) for name, i, axis, constant in reversed(axes)}
        self._first_uses = [first_use[axis] for axis in self._sizes]
        # an axis without a name has size 0 plus its constant: `open` appends this 0 to the sizes, at place None
        places = {axis: place for place, axis in enumerate([*self._sizes, None])}
        self._plans = [
            (name, spec.dtype, [(places[axis], constant) for axis, constant in spec.plan])
            for name, spec in specs.items()
        ]

    def sizes(self, values: dict[str, Any]) -> list[int]:
        """Return the sizes of checked arrays, in the order of first appearance.

        Args:
            values: array fields by name; other keys are ignored.
        """
        return [values[name].shape[i] - constant for name, i, constant in self._first_uses]

    def split(self, values: dict[str, Any]) -> tuple[bytearray, dict[str, bytes | memoryview]]:
        """Return the bytes of checked arrays: of all small ones joined, and of each larger one by name, in wire order.

        The larger ones share memory with the arrays where these are contiguous.

        Args:
            values: array fields by name; other keys are ignored.
        """
        joined, frames = bytearray(), dict[str, bytes | memoryview]()
        for name in self.specs:
            array = values[name]
            if array.nbytes > SMALL_BYTES:
                # a view as flat bytes, which needs contiguous memory
                frames[name] = np.ascontiguousarray(array).data.cast("B")
            else:
                joined += wire_bytes(array)
        return joined, frames

    def open(self, sizes: list[int], joined: bytes | None, frames: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Return read-only views of flat byte buffers as the declared arrays. Valid by construction, without `check`.

        Args:
            sizes: lengths of the named axes, in the order of first appearance.
            joined: bytes of all small arrays, as `split` joins them; None: each array has a frame of its own.
            frames: bytes of each further array, in wire order.

        Raises:
            ValueError, TypeError: sizes, bytes and frames do not fit the layout or each other.
        """
        # a negative size could fit together with a constant: G = −1 gives the axis `G+1` the length 0
        if len(sizes) != len(self._sizes) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes {reprlib.repr(sizes)} for the arrays {self.text!r}")
        arrays = {}
        lengths = [*sizes, 0]  # the 0 is the size of axes without a name
        start, place_of_frame = 0, 0
        for name, dtype, plan in self._plans:
            place, constant = plan[0]
            num = lengths[place] + constant
            for place, constant in plan[1:]:
                num *= lengths[place] + constant
            num_bytes = num * dtype.itemsize
            if joined is not None and num_bytes <= SMALL_BYTES:
                array = np.frombuffer(joined, dtype, num, start)
                start += num_bytes + -num_bytes % ALIGNMENT
            else:
                if place_of_frame == len(frames):
                    raise ValueError(f"{name}: its frame is missing, behind {len(frames)} others")
                buffer = frames[place_of_frame]
                place_of_frame += 1
                array = np.frombuffer(buffer, dtype)
                if len(array) != num:
                    raise ValueError(f"{name}: {len(array)} elements, and {num} by its sizes")
                # views of bytes are read-only already
                if buffer.__class__ is not bytes:
                    array.setflags(False)  # type: ignore[call-arg]  # by keyword it takes twice as long
            if len(plan) > 1:
                array = array.reshape([lengths[place] + constant for place, constant in plan])
            arrays[name] = array
        if place_of_frame != len(frames) or start != len(joined or b""):
            raise ValueError(
                f"{len(frames)} frames and {len(joined or b'')} joined bytes came, and the arrays have "
                f"{place_of_frame} and {start}"
            )
        return arrays

    def check(self, values: dict[str, Any]) -> None:
        """Check arrays against their declarations: dtype, number of axes, and equal lengths for equal axis names.

        Args:
            values: array fields by name; other keys are ignored.

        Raises:
            ValueError: an array does not fit; with the field, its dtype or shape and the declared one.
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
                # sizes[None] is 0, so that an axis `3` must have exactly the length 3
                if size < 0 or sizes.setdefault(axis, size) != size:
                    elsewhere = f"; {axis} is {sizes[axis]} elsewhere" if axis is not None and axis in sizes else ""
                    raise ValueError(f"{name}: shape {array.shape}, declared axes ({', '.join(spec.axes)}){elsewhere}")


def wire_bytes(array: NDArray[Any]) -> bytes:
    """Return the bytes of an array as a message has them: those of a small one filled up to a multiple of ALIGNMENT."""
    data = array.tobytes()
    return data + bytes(-len(data) % ALIGNMENT) if len(data) <= SMALL_BYTES else data


def check_starts(name: str, starts: NDArray[np.int64], end: int) -> None:
    """Check start positions of consecutive non-empty parts of a range 0 … end: [0, 2, 3] is valid for end 5.

    Raises:
        ValueError: the first is not 0, values do not rise strictly, or one is not below `end`; names the field.
    """
    first, last, rises = _course(starts) if len(starts) else (None, end, False)
    if first != 0 or last >= end or not rises:
        raise ValueError(f"{name}: must start at 0, rise strictly and stay below {end}, got {starts[:8].tolist()}…")


def check_offsets(name: str, offsets: NDArray[np.int64], end: int) -> None:
    """Check offsets of consecutive non-empty parts, starts followed by the end: [0, 2, 3, 5] is valid for end 5.

    Raises:
        ValueError: the first is not 0, values do not rise strictly, or the last is not `end`; names the field.
    """
    first, last, rises = _course(offsets)
    if first != 0 or last != end or not rises:
        raise ValueError(f"{name}: must start at 0, rise strictly and end at {end}, got {offsets[:8].tolist()}…")


def _course(values: NDArray[np.int64]) -> tuple[int, int, bool]:
    """Return first value, last value, and whether the values rise strictly."""
    # a call of numpy costs about 1 µs; up to 64 values a list is faster
    if len(values) <= 64:
        few = values.tolist()
        return few[0], few[-1], all(map(operator.lt, few, few[1:]))
    return values.item(0), values.item(-1), bool((values[1:] > values[:-1]).all())


# Array types of the messages: dtype and axes, e.g. Offsets_B has B + 1 values. Segments_S, Counts_G and Float64_R
# have the columns of `RolloutGroup.segments`, `counts` and `turn_rewards`, Holds_H and Holds_K pairs (ordinal,
# attempt), Drops_D pairs (ordinal, index of the reason).
Int32_P = Annotated[NDArray[np.int32], ArraySpec("<i4", ("P",))]
Int32_N = Annotated[NDArray[np.int32], ArraySpec("<i4", ("N",))]
UInt8_N = Annotated[NDArray[np.uint8], ArraySpec("|u1", ("N",))]
Float32_N = Annotated[NDArray[np.float32], ArraySpec("<f4", ("N",))]
Float32_A = Annotated[NDArray[np.float32], ArraySpec("<f4", ("A",))]
Float32_G = Annotated[NDArray[np.float32], ArraySpec("<f4", ("G",))]
Float64_G = Annotated[NDArray[np.float64], ArraySpec("<f8", ("G",))]
Float64_FG = Annotated[NDArray[np.float64], ArraySpec("<f8", ("F", "G"))]
Float64_EG = Annotated[NDArray[np.float64], ArraySpec("<f8", ("E", "G"))]
Float64_R = Annotated[NDArray[np.float64], ArraySpec("<f8", ("R", "3"))]
Counts_G = Annotated[NDArray[np.int64], ArraySpec("<i8", ("G", "3"))]
Offsets_Q = Annotated[NDArray[np.int64], ArraySpec("<i8", ("Q+1",))]
Offsets_G = Annotated[NDArray[np.int64], ArraySpec("<i8", ("G+1",))]
Segments1_S = Annotated[NDArray[np.int64], ArraySpec("<i8", ("S", "3"))]
Segments_S = Annotated[NDArray[np.int64], ArraySpec("<i8", ("S", "5"))]
Float32_S = Annotated[NDArray[np.float32], ArraySpec("<f4", ("S",))]
Float32_B = Annotated[NDArray[np.float32], ArraySpec("<f4", ("B",))]
Float64_B = Annotated[NDArray[np.float64], ArraySpec("<f8", ("B",))]
Int64_B = Annotated[NDArray[np.int64], ArraySpec("<i8", ("B",))]
Drops_D = Annotated[NDArray[np.int64], ArraySpec("<i8", ("D", "2"))]
Int8_E = Annotated[NDArray[np.int8], ArraySpec("|i1", ("E",))]
UInt8_R = Annotated[NDArray[np.uint8], ArraySpec("|u1", ("R",))]
Int16_L = Annotated[NDArray[np.int16], ArraySpec("<i2", ("L",))]
Int64_K = Annotated[NDArray[np.int64], ArraySpec("<i8", ("K",))]
Offsets_B = Annotated[NDArray[np.int64], ArraySpec("<i8", ("B+1",))]
Offsets_M = Annotated[NDArray[np.int64], ArraySpec("<i8", ("M+1",))]
Int64_U = Annotated[NDArray[np.int64], ArraySpec("<i8", ("U",))]
Offsets_U = Annotated[NDArray[np.int64], ArraySpec("<i8", ("U+1",))]
Holds_H = Annotated[NDArray[np.int64], ArraySpec("<i8", ("H", "2"))]
Holds_K = Annotated[NDArray[np.int64], ArraySpec("<i8", ("K", "2"))]
