"""Copies of worlds, and keys that say when two worlds are the same.

Both happen at every transition, so both walk plain attributes, in a few microseconds per container. They know no class
of the ledger by name: a field that the machine gains is copied and compared like the others.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from actors.ledger.clock import Clock
from actors.ledger.rows import Changes
from schemas.messages import Frozen

ValueT = TypeVar("ValueT")
Names = Mapping[str, str]

NEVER_CHANGED = (
    str,
    int,
    float,
    bool,
    bytes,
    type(None),
    tuple,
    frozenset,
    type,
    FunctionType,
    Enum,
    Frozen,
    np.ndarray,
)
LEFT_OUT = frozenset(
    {
        "_settings",
        "settings",
        "term",
        "counters",
        "issued_at",
        "last_failure",
        "num_failed_attempts",
        "newest_were_poison",
        "_refusals",
        "sequences",
        "_heaps",
        "_in_heaps",
        "_sequences",
        "_patience",
        # directives made before, and what they were made of
        "neighbourhood",
        "told",
        "told_alike",
    }
)
"""Attributes that decide nothing, or only what becomes of a message that is late, which the world's key tells."""
OF_ONE_MESSAGE = frozenset({"sequence", "boot_id", "url", "address", "fingerprint"})
"""Fields of a heartbeat that tell two processes, or two heartbeats that say the same, apart."""


# --- copies ----------------------------------------------------------------------------------------------------------

_shared: dict[type, bool] = {}


def clone(value: ValueT) -> ValueT:
    """A copy that shares nothing that may change; what occurs twice in it is one thing in the copy as well."""
    copied: ValueT = _clone(value, {})
    return copied


def _clone(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if _shared.get(kind) or (kind not in _shared and _learn(kind)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is dict:
        table: dict[Any, Any] = {}
        memo[id(value)] = table
        for key, inner in value.items():
            table[key] = inner if _shared.get(type(inner)) else _clone(inner, memo)
        return table
    if kind is list:
        return memo.setdefault(id(value), [_clone(inner, memo) for inner in value])
    if kind is deque:
        return memo.setdefault(id(value), deque(_clone(inner, memo) for inner in value))
    if kind is set:
        return memo.setdefault(id(value), set(value))
    if kind is Counter:
        return memo.setdefault(id(value), value.copy())
    return _clone_object(value, kind, memo)


def _clone_object(value: Any, kind: type, memo: dict[int, Any]) -> Any:
    copied: Any = object.__new__(kind)
    memo[id(value)] = copied
    attributes = copied.__dict__
    for name, inner in value.__dict__.items():
        attributes[name] = inner if _shared.get(type(inner)) else _clone(inner, memo)
    return copied


def _learn(kind: type) -> bool:
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    _shared[kind] = frozen or issubclass(kind, NEVER_CHANGED)
    return _shared[kind]


# --- keys ------------------------------------------------------------------------------------------------------------

MAX_MESSAGE_KEYS = 20_000
_message_keys: dict[int, tuple[Frozen, Hashable]] = {}
"""By id; the message is kept beside its key, so that its id is no other's."""


def key_of(value: Any, names: Names, now: float) -> Hashable:
    """The same for two values that will behave the same.

    Args:
        value: anything made of plain containers and objects.
        names: identities by what they are called in keys: a process that is the third of its name is "the newest".
        now: a time is told by how long ago it was.
    """
    return _Keys(names, now).of(value)


class _Keys:
    def __init__(self, names: Names, now: float) -> None:
        self._names, self._now = names, now
        self._seen: set[int] = set()

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        return (_MAKERS.get(kind) or _maker_of(kind))(self, value)

    def same(self, value: Hashable) -> Hashable:
        return value

    def text(self, value: str) -> Hashable:
        return self._names.get(value, value)

    def number(self, value: int) -> Hashable:
        return value if value >= 0 else ("minus", -value)  # Python's hashes of -1 and of -2 are the same

    def time(self, value: float) -> Hashable:
        return max(0.0, value - self._now)  # a deadline that is over is over

    def mapping(self, value: Mapping[Any, Any]) -> Hashable:
        of = self.of
        return frozenset([(of(key), of(inner)) for key, inner in value.items()])

    def sequence(self, value: Iterable[Any]) -> Hashable:
        of = self.of
        return tuple([of(inner) for inner in value])

    def unordered(self, value: Iterable[Any]) -> Hashable:
        of = self.of
        return frozenset([of(inner) for inner in value])

    def array(self, value: "np.ndarray[Any, Any]") -> Hashable:
        return value.tobytes()

    def clock(self, value: "Clock[Any]") -> Hashable:
        longest = value._seconds
        return frozenset([(self.of(key), min(self._now - since, longest)) for key, since in value._since.items()])

    def changes(self, value: Changes) -> Hashable:
        return frozenset(value.groups), len(value.steps), frozenset(value.values)  # their contents are in the rows

    def message(self, value: Frozen) -> Hashable:
        known = _message_keys.get(id(value))
        if known is None:
            fields = {name: inner for name, inner in value.__dict__.items() if name not in OF_ONE_MESSAGE}
            known = (value, (type(value).__name__, _Keys({}, 0.0).mapping(fields)))
            if len(_message_keys) >= MAX_MESSAGE_KEYS:
                _message_keys.clear()
            _message_keys[id(value)] = known
        return known[1]

    def anything(self, value: Any) -> Hashable:
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        of = self.of
        return tuple([of(inner) for name, inner in value.__dict__.items() if name not in LEFT_OUT])


_PLAIN: set[type] = {bool, type(None)}
"""Kinds whose values are their own keys."""
_MAKERS: dict[type, Callable[[_Keys, Any], Hashable]] = {
    str: _Keys.text,
    float: _Keys.time,
    int: _Keys.number,
    dict: _Keys.mapping,
    Counter: _Keys.mapping,
    list: _Keys.sequence,
    deque: _Keys.sequence,
    tuple: _Keys.sequence,
    set: _Keys.unordered,
    frozenset: _Keys.unordered,
    np.ndarray: _Keys.array,
    Clock: _Keys.clock,
    Changes: _Keys.changes,
}


def _maker_of(kind: type) -> Callable[[_Keys, Any], Hashable]:
    """How values of this kind get their key, found out once."""
    if issubclass(kind, Frozen):
        make = _Keys.message
    elif issubclass(kind, Enum | type | FunctionType) or _shared.get(kind) or _learn(kind):
        make = _Keys.same
        _PLAIN.add(kind)
    else:
        make = _Keys.anything
    _MAKERS[kind] = make
    return make
