"""Chain of witnesses: a digest per step over all groups trained or dropped up to that step (P20).

Trainer and ledger compute the chain independently from the same values; equal chains prove equal histories.
"""

import hashlib
import json
from collections.abc import Sequence

from schemas.messages import DroppedOrdinal

START = ""
"""Chain before step 1."""


def next_chain(
    chain: str, step: int, ordinals: Sequence[int], dropped: Sequence[DroppedOrdinal], digests: Sequence[str]
) -> str:
    """Return the chain after `step`, 64 hex digits.

    Args:
        chain: chain after the step before.
        step: number of the step.
        ordinals: trained ordinals, in the order of the step.
        dropped: drops reported with the step.
        digests: sha256 of each trained payload, in the order of `ordinals`.
    """
    # plain ints: json refuses numpy's
    link = [chain, step, [int(o) for o in ordinals], [[d.ordinal, d.reason] for d in dropped], list(digests)]
    return hashlib.sha256(json.dumps(link, separators=(",", ":")).encode()).hexdigest()
