"""Base of all messages: frozen pydantic models with a kind, a version, the run's id and declared arrays."""

from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast

from schemas import limits
from schemas.arrays import ArrayLayout, ArraySpec


class FirstProblem(FailFast):
    """pydantic's `FailFast`, made hashable for use in unions, whose members pydantic hashes."""

    __hash__ = object.__hash__


Item = TypeVar("Item")
Listed = Annotated[list[Item], FirstProblem()]
"""List field of a message. Validation stops at the first wrong element: one error for each could take gigabytes."""

FORMAT = 2
"""Number of the way in which messages become frames. 2: small arrays are joined in the header."""
ARRAYS_KEY = "%"
"""Key of the header's entry on arrays, [layout, sizes, small arrays]. No field can have this name."""


def check_name(name: str) -> str:
    """Return the name unchanged if it can be part of a ZeroMQ identity.

    Raises:
        ValueError: the name has more than NAME_BYTES bytes or can't be encoded as UTF-8.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError("a name has half a pair of surrogates, which is no character") from error
    if size > limits.NAME_BYTES:
        raise ValueError(f"a name has {size} bytes, and {limits.NAME_BYTES} are the most")
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""Name of an actor, a boot id or another short id, at most `limits.NAME_BYTES` bytes of UTF-8."""


def check_address(address: str) -> str:
    """Return an address, URL or path unchanged if it is short enough to be sent to every peer.

    Raises:
        ValueError: the address has more than ADDRESS_BYTES bytes.
    """
    # surrogatepass: a path may hold any bytes, and Python shows those that are not UTF-8 as lone surrogates
    if len(address.encode("utf-8", "surrogatepass")) > limits.ADDRESS_BYTES:
        raise ValueError(f"an address has more than {limits.ADDRESS_BYTES} bytes")
    return address


Address = Annotated[str, AfterValidator(check_address)]
"""Socket address, URL or path, at most `limits.ADDRESS_BYTES` bytes."""
Reason = Annotated[str, AfterValidator(limits.cut_reason)]
"""Text for people, the reason of an end, cut to `limits.REASON_CHARACTERS`."""
Words = Annotated[str, AfterValidator(limits.cut)]
"""Text for people, cut to `limits.DETAIL_CHARACTERS` by sender and receiver, since a peer's text is sent on to many."""

AXES_AGREE: dict[str, bool] = {}
"""Validation context of a caller that has built all arrays by `ArrayLayout.open`, so that checking again is needless.

Compared by identity; the content has no meaning.
"""


class Frozen(BaseModel):
    """Immutable value without undeclared fields; values with equal content are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Message(Frozen):
    """Base of all message types. Arrays are fields too; on the wire each large array is a frame of its own.

    A new optional field keeps the `version`. Every other change of a type bumps it, and the type's golden file in the
    tests shows the change.
    """

    kind: ClassVar[str]
    """Name of the type on the wire."""
    version: ClassVar[int] = 1
    """Version of the type on the wire; receivers refuse another one."""
    layout: ClassVar[ArrayLayout] = ArrayLayout({})
    """Array fields in the order of declaration, which is the order of their frames. Set for each subclass."""
    header_keys: ClassVar[frozenset[str]] = frozenset()
    """All keys allowed in the header of a message of this kind. Set for each subclass."""
    texts: ClassVar[tuple[str, ...]] = ()
    """Names of fields (a text, or a list of texts) sent as UTF-8 in one frame after the arrays, not in the header."""
    blobs: ClassVar[tuple[str, ...]] = ()
    """Names of fields with a list of bytes each, joined in frames behind all others. The header has their sizes."""
    rare: ClassVar[tuple[str, ...]] = ()
    """Names of fields that the header leaves out while they are empty."""
    apart: ClassVar[str] = ""
    """Name of the field with a `Neighbours`, which is sent as a message of its own; the header has only its name."""
    loads: ClassVar[str] = ""
    """Name of the array that is equal for all receivers with the same `apart`, and changes all the time: a change of
    it alone is not sent at once, and each answer has the newest one. It is the last array: the end of the header, or
    the last frame."""

    run: str
    """Random id of the run, created with its ledger. Empty in messages of a peer that has not received it yet."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set `layout` and `header_keys` of the subclass from its fields."""
        fields = cls.model_fields.items()
        specs = {n: spec for n, f in fields for spec in f.metadata if isinstance(spec, ArraySpec)}
        cls.layout = ArrayLayout(specs)
        assert not cls.loads or (cls.loads == [*specs][-1] and not cls.texts), "loads must be the end of a frame"
        cls.header_keys = frozenset([*cls.model_fields, ARRAYS_KEY]) - cls.layout.specs.keys()

    def model_post_init(self, context: Any) -> None:
        """Check arrays and content. pydantic turns a ValueError into a ValidationError."""
        # a received message has its arrays from `ArrayLayout.open`, which makes valid arrays only
        if context is not AXES_AGREE:
            self.layout.check(self.__dict__)
        self.check()

    def check(self) -> None:
        """Check what a kind requires beyond the types of its fields.

        Raises:
            ValueError: the content is invalid; names the field.
        """

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the array fields by name, in wire order."""
        values = self.__dict__
        return {name: values[name] for name in self.layout.specs}

    def equals(self, other: "Message") -> bool:
        """Return whether two messages have equal content, NaNs equal to NaNs (pydantic's == can't compare arrays)."""
        if type(self) is not type(other):
            return False
        mine, theirs = self.arrays(), other.arrays()
        same_arrays = all(
            np.array_equal(mine[name], theirs[name], equal_nan=mine[name].dtype.kind == "f") for name in mine
        )
        names = set(mine)
        return same_arrays and self.model_dump(exclude=names) == other.model_dump(exclude=names)
