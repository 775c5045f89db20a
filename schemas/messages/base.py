"""What every message is: a frozen pydantic model with a kind, a version, a run, and declared arrays."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from schemas.arrays import ArrayLayout, ArraySpec

AXES_AGREE: dict[str, bool] = {}
"""Passed as validation context by a caller that has made all arrays from the type's layout itself."""


class Frozen(BaseModel):
    """A value: equal by content, never changed, no field beyond the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Message(Frozen):
    """One typed message. Arrays are fields too; on the wire each is a frame of its own.

    A new optional field keeps the `version`; anything else bumps it, and the golden file of the kind shows the change.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    layout: ClassVar[ArrayLayout] = ArrayLayout({})
    """Made from the array fields, in the order of declaration, which is the order of their frames."""

    run: str
    """Random id of the run, made with its ledger; empty while a peer has not heard it yet."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the array fields."""
        fields = cls.model_fields.items()
        cls.layout = ArrayLayout({n: spec for n, f in fields for spec in f.metadata if isinstance(spec, ArraySpec)})

    def model_post_init(self, context: Any) -> None:
        """Arrays are as declared; pydantic makes a ValidationError of the ValueError that says which is not."""
        if context is not AXES_AGREE:
            self.layout.check(self.__dict__)
        self.check()

    def check(self) -> None:
        """What a kind demands beyond its types; raises ValueError."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The array fields in wire order."""
        values = self.__dict__
        return {name: values[name] for name in self.layout.specs}

    def equals(self, other: "Message") -> bool:
        """Equality by content, arrays bit by bit (pydantic's == can't compare arrays)."""
        if type(self) is not type(other):
            return False
        mine, theirs = self.arrays(), other.arrays()
        same_arrays = all(
            np.array_equal(mine[name], theirs[name], equal_nan=mine[name].dtype.kind == "f") for name in mine
        )
        names = set(mine)
        return same_arrays and self.model_dump(exclude=names) == other.model_dump(exclude=names)
