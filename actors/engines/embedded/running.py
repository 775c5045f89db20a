"""The sequences that are being decoded, as arrays: row b is the sequence in slot b of the cache.

The B rows are always 0…B−1. When sequences end, those at the end move into the gaps:

    rows a b c d e, b and d end      a e c      moved: 4 → 1
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.engines.protocol import Completion, SampleRequest, Segment


@dataclass(eq=False)
class Request:
    """A request and its completions as they end."""

    asked: SampleRequest
    future: "Future[list[Completion]]" = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return len(self.completions) == self.asked.num_completions


@dataclass(eq=False)
class _Owner:
    """Whose completion a row is, and who has sampled it so far."""

    request: Request
    number: int
    segments: list[Segment]


class Running:
    """Up to `capacity` sequences of up to `max_length` tokens."""

    def __init__(self, capacity: int, max_length: int) -> None:
        self._owners: list[_Owner] = []
        self._tokens_BL = np.zeros((capacity, max_length), np.int32)
        self._logprobs_BL = np.zeros((capacity, max_length), np.float32)
        self._lengths_B = np.zeros(capacity, np.int64)
        self._prompts_B = np.zeros(capacity, np.int64)
        self._ends_B = np.zeros(capacity, np.int64)
        self._seeds_B = np.zeros(capacity, np.uint64)
        self._temperatures_B = np.zeros(capacity, np.float32)
        self._top_p_B = np.zeros(capacity, np.float32)

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        """Rows that are not taken."""
        return len(self._lengths_B) - len(self._owners)

    @property
    def requests(self) -> list[Request]:
        """The requests that have a row, each once."""
        return list({id(owner.request): owner.request for owner in self._owners}.values())

    def add(self, request: Request, segments: list[Segment]) -> None:
        """Append a row for each completion of a request, holding its prompt."""
        asked = request.asked
        prompt, n, first = len(asked.prompt_ids), asked.num_completions, len(self)
        rows = slice(first, first + n)
        self._owners += [_Owner(request, number, list(segments)) for number in range(n)]
        self._tokens_BL[rows, :prompt] = asked.prompt_ids
        self._lengths_B[rows] = self._prompts_B[rows] = prompt
        self._ends_B[rows] = prompt + asked.max_tokens
        self._seeds_B[rows] = np.arange(asked.seed, asked.seed + n, dtype=np.uint64)
        self._temperatures_B[rows], self._top_p_B[rows] = asked.temperature, asked.top_p

    def last_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The newest token of each row and its position."""
        positions_B = self._lengths_B[: len(self)] - 1
        return self._tokens_BL[np.arange(len(self)), positions_B], positions_B

    def written(self) -> list[NDArray[np.int32]]:
        """Each row's tokens but the newest: those whose keys and values are in the cache."""
        return [self._tokens_BL[b, : length - 1] for b, length in enumerate(self._lengths_B[: len(self)])]

    def draws(self, first: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Seeds of the rows from `first` on, and the number of the completion token that each draws next."""
        rows = slice(first, len(self))
        return self._seeds_B[rows], (self._lengths_B[rows] - self._prompts_B[rows]).astype(np.uint64)

    def distribution(self, first: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Temperatures and top_p of the rows from `first` on."""
        return self._temperatures_B[first : len(self)], self._top_p_B[first : len(self)]

    def append(self, first: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """One more token to each of the rows from `first` on."""
        rows = np.arange(first, len(self))
        at = self._lengths_B[rows]
        self._tokens_BL[rows, at], self._logprobs_BL[rows, at] = tokens, logprobs
        self._lengths_B[rows] += 1

    def stamp(self, lineage: int, version: int) -> None:
        """Tokens of all rows come from this policy from now on."""
        for owner, count in zip(self._owners, self._lengths_B - self._prompts_B, strict=False):
            owner.segments.append((int(count), lineage, version))

    def ended(self, eos: NDArray[np.int32]) -> dict[int, str]:
        """The rows whose newest token was their last, and why."""
        tokens_B, positions_B = self.last_tokens()
        stopped_B = np.isin(tokens_B, eos)
        full_B = positions_B + 1 == self._ends_B[: len(self)]
        return {int(b): "stop" if stopped_B[b] else "length" for b in np.flatnonzero(stopped_B | full_B)}

    def finish(self, reasons: dict[int, str]) -> list[Request]:
        """Hand the completions of these rows to their requests; returns the requests that are finished by it."""
        requests: dict[int, Request] = {}
        for b, reason in reasons.items():
            owner = self._owners[b]
            sampled = slice(self._prompts_B[b], self._lengths_B[b])
            owner.request.completions[owner.number] = Completion(
                self._tokens_BL[b, sampled].tolist(), self._logprobs_BL[b, sampled].tolist(), owner.segments, reason
            )
            requests[id(owner.request)] = owner.request
        return [request for request in requests.values() if request.finished]

    def remove(self, gone: Iterable[int]) -> tuple[list[int], list[int], int]:
        """Take rows out; returns which rows moved where, and the longest of them in tokens."""
        gone = set(gone)
        left = len(self) - len(gone)
        targets = sorted(b for b in gone if b < left)
        sources = [b for b in range(left, len(self)) if b not in gone]
        for source, target in zip(sources, targets, strict=True):
            self._owners[target] = self._owners[source]
        del self._owners[left:]
        arrays = (self._tokens_BL, self._logprobs_BL, self._lengths_B, self._prompts_B, self._ends_B, self._seeds_B)
        for array in (*arrays, self._temperatures_B, self._top_p_B):
            array[targets] = array[sources]
        return sources, targets, int(self._lengths_B[targets].max(initial=0))

    def rows_of(self, requests: Iterable[Request]) -> list[int]:
        """Rows of these requests."""
        wanted = set(map(id, requests))
        return [b for b, owner in enumerate(self._owners) if id(owner.request) in wanted]
