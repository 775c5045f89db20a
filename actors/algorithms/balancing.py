"""Choice among many servers by loads that are a little old."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

CandidateT = TypeVar("CandidateT")


def less_loaded(candidates: Sequence[CandidateT], load: Callable[[CandidateT], int], seed: int) -> CandidateT:
    """Return the less loaded of two candidates drawn at random; with two candidates or one, the least loaded.

    All clients see the same loads, about a second old. If each took the least loaded of all, the requests of a second
    would all go to the same server. Two choices keep the loads even without that (Mitzenmacher 2001).

    Args:
        candidates: at least one.
        load: load of a candidate.
        seed: of the draw, so that the choice can be repeated.
    """
    if len(candidates) <= 2:
        return min(candidates, key=load)
    rng = random.Random(seed)
    first = int(rng.random() * len(candidates))
    # any other one: an offset of 1 … n − 1
    second = (first + 1 + int(rng.random() * (len(candidates) - 1))) % len(candidates)
    return min(candidates[first], candidates[second], key=load)
