"""The chain of witnesses: a digest per step over everything that was trained or dropped up to it (P20).

Trainer and ledger compute it from the same values on their own; equal chains mean that they saw the same history.
"""

import hashlib
import json
from collections.abc import Sequence

from schemas.messages import DroppedOrdinal

START = ""


def next_chain(
    chain: str, step: int, ordinals: Sequence[int], dropped: Sequence[DroppedOrdinal], digests: Sequence[str]
) -> str:
    """The chain after `step`, hex."""
    link = [chain, step, [int(o) for o in ordinals], [[d.ordinal, d.reason] for d in dropped], list(digests)]
    return hashlib.sha256(json.dumps(link, separators=(",", ":")).encode()).hexdigest()
