"""The protocol as a pure state machine, and its SQLite store.

`Machine` takes what was heard (beats, scored groups, the time) and says what shall be written and said. It has no
clock, no socket and no file, so that tests, and a search over all interleavings, run the very code that the packer
runs.
"""

from actors.ledger.groups import Verdict
from actors.ledger.machine import Machine
from actors.ledger.rows import Changes, ExampleRef, Group, GroupFacts, GroupState, Settings, Step
from actors.ledger.store import LedgerReader, Store

__all__ = [
    "Changes",
    "ExampleRef",
    "Group",
    "GroupFacts",
    "GroupState",
    "LedgerReader",
    "Machine",
    "Settings",
    "Step",
    "Store",
    "Verdict",
]
