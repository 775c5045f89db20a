"""Marks of configuration keys by what may change when a run is resumed (protocol rule P23).

Each key is marked at the declaration, for example `seed: Identity[int] = 0`. Identity on a section covers all keys of
the section. Free and Repack cover one key only: a new key in a free section needs another mark.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

KeyClass = Literal["free", "repack", "identity"]

T = TypeVar("T")


@dataclass(frozen=True)
class ResumeMark:
    """Mark of a key, in the metadata of its field."""

    key_class: KeyClass


Free = Annotated[T, ResumeMark("free")]
"""Mark of a key that only affects execution (paths, timeouts, numbers of processes, learning rate): may change."""
Repack = Annotated[T, ResumeMark("repack")]
"""Mark of a key that affects the packing of committed groups: may change; steps not yet trained are packed again."""
Identity = Annotated[T, ResumeMark("identity")]
"""Mark of a key without which the groups in the ledger would mean something else: a change makes another run, which
needs `--fork`."""
