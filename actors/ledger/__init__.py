"""Protocol of a run (docs/internals/protocol.md) as a pure state machine, with its SQLite store.

`Machine` consumes heartbeats, scored groups and the time, and emits rows to write and directives to send. It has no
clock, no socket and no file, so that tests and a search over all interleavings execute the code of the packer itself.
"""

from actors.ledger.groups import Verdict
from actors.ledger.machine import Machine
from actors.ledger.rows import (
    Changes,
    EvalRule,
    ExampleRef,
    Group,
    GroupFacts,
    GroupState,
    RewindOrder,
    Rewound,
    Settings,
    Step,
)
from actors.ledger.store import LedgerReader, Store

__all__ = [
    "Changes",
    "EvalRule",
    "ExampleRef",
    "Group",
    "GroupFacts",
    "GroupState",
    "LedgerReader",
    "Machine",
    "RewindOrder",
    "Rewound",
    "Settings",
    "Step",
    "Store",
    "Verdict",
]
