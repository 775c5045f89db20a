"""Running sequences as arrays: row b is the sequence in slot b of the cache.

Rows are always 0…B−1. When sequences end, rows from the end move into the gaps:

    rows a b c d e, b and d end      a e c      moved: 4 → 1
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engines.embedded.sampling import Distribution, Drawn, TokenValues, sample, uniforms
from actors.engines.protocol import Alternatives, Completion, SampleRequest, Segment
from actors.engines.text import Detokenize, StopWatch
from actors.models.vision.positions import position_shift
from actors.models.vision.row_images import PlacedImage
from schemas.config.sampling import SamplingParams
from schemas.routed import UNKNOWN, Experts, narrow

GREEDY = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: logits divided by less could overflow."""


@dataclass(eq=False)
class Request:
    """Request, with the finished completions by number."""

    asked: SampleRequest
    future: "Future[list[Completion]]" = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)
    images: list[PlacedImage] = field(default_factory=list)
    """Images of the prompt with their features, once the engine has computed them."""

    @property
    def ready(self) -> bool:
        """True once the features of all images are there."""
        return len(self.images) == len(self.asked.images)

    @property
    def finished(self) -> bool:
        """True once all completions have finished."""
        return len(self.completions) == self.asked.num_completions


@dataclass(eq=False)
class _Owner:
    """Completion of a row, with all data but tokens and logprobs."""

    request: Request
    number: int
    segments: list[Segment]
    watch: StopWatch | None
    stop_reason: str | int | None = None
    top_logprobs: list[Alternatives] = field(default_factory=list)


Entry = tuple[int, int, float]
"""Row, token id, and a value."""


def _values(entries: list[Entry]) -> TokenValues | None:
    # also with a penalty alone, as long as no token is there for it
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return np.array(rows), np.array(tokens), np.array(values, np.float32)


class Running:
    """Table of up to `capacity` sequences of up to `max_length` tokens.

    Args:
        eos: tokens that end a sequence, unless its request ignores them.
    """

    def __init__(
        self, capacity: int, max_length: int, detokenize: Detokenize, eos: frozenset[int] = frozenset()
    ) -> None:
        self._detokenize, self._eos = detokenize, eos
        self._owners: list[_Owner] = []
        self._tokens_BL = np.zeros((capacity, max_length), np.int32)
        self._logprobs_BL = np.zeros((capacity, max_length), np.float32)
        self._lengths_B = np.zeros(capacity, np.int64)
        """Tokens of each row so far, the prompt included."""
        self._prompts_B = np.zeros(capacity, np.int64)
        """Tokens of each row's prompt."""
        self._shifts_B = np.zeros(capacity, np.int64)
        """Position of each row's newest token on the axes of images, less its place in the sequence."""
        self._ends_B = np.zeros(capacity, np.int64)
        """Length at which each row ends."""
        self._seeds_B = np.zeros(capacity, np.uint64)
        self._temperatures_B = np.zeros(capacity, np.float32)
        self._top_p_B = np.zeros(capacity, np.float32)
        self._top_k_B = np.zeros(capacity, np.int64)
        self._min_p_B = np.zeros(capacity, np.float32)
        self._num_top_logprobs_B = np.zeros(capacity, np.int64)
        self._biased_B, self._watched_B, self._told_B = (np.zeros(capacity, bool) for _ in range(3))
        """Rows with a bias, penalty or `min_tokens`, with stop strings or stop tokens, and with a callback. Loops over
        rows touch only these few."""
        self._endless_B = np.zeros(capacity, bool)
        """Rows that an end of sequence does not end."""
        self._experts_BLLK: Experts | None = None
        """Experts of each row's tokens in each layer, once some are told; the newest token has none yet."""
        # `remove` moves the rows of all arrays alike
        self._arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._lengths_B) - len(self._owners)

    @property
    def requests(self) -> list[Request]:
        """Requests with a row, each once."""
        return list({id(owner.request): owner.request for owner in self._owners}.values())

    def add(self, request: Request, segments: list[Segment]) -> None:
        """Append a row for each completion of a request, with the prompt as its tokens."""
        asked = request.asked
        assert asked.max_tokens is not None
        prompt, n, first = len(asked.prompt_ids), asked.num_completions, len(self)
        rows = slice(first, first + n)
        watched = bool(asked.stop or asked.stop_token_ids)
        for number in range(n):
            # a watch of its own for each completion: it keeps the end of the completion's text
            watch = self._watch(asked) if watched else None
            self._owners.append(_Owner(request, number, list(segments), watch))
        self._tokens_BL[rows, :prompt] = asked.prompt_ids
        self._lengths_B[rows] = self._prompts_B[rows] = prompt
        self._shifts_B[rows] = position_shift([image.span for image in request.images])
        self._ends_B[rows] = prompt + asked.max_tokens
        self._seeds_B[rows] = np.arange(asked.seed, asked.seed + n, dtype=np.uint64)
        # a greedy row has no cuts: the most probable token passes them all
        greedy = asked.sampling.temperature < GREEDY
        sampling = SamplingParams(temperature=0.0) if greedy else asked.sampling
        self._temperatures_B[rows], self._top_p_B[rows] = sampling.temperature, sampling.top_p
        self._top_k_B[rows], self._min_p_B[rows] = sampling.top_k, sampling.min_p
        self._num_top_logprobs_B[rows] = asked.num_top_logprobs
        # `asked.sampling`: penalties and `min_tokens` count in greedy rows too
        s = asked.sampling
        is_penalized = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1
        self._biased_B[rows] = bool(asked.logit_bias or is_penalized or s.min_tokens)
        self._endless_B[rows] = asked.ignore_eos
        self._watched_B[rows] = watched
        self._told_B[rows] = asked.on_piece is not None

    def last_tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return token and position of the newest token of each row."""
        positions_B = self._lengths_B[: len(self)] - 1
        return self._tokens_BL[np.arange(len(self)), positions_B], positions_B

    def shifts(self) -> NDArray[np.int64]:
        """Return the position of each row's newest token on the axes of images, less its place in the sequence."""
        return self._shifts_B[: len(self)]

    def images(self) -> list[list[PlacedImage]]:
        """Return the images of each row's prompt."""
        return [owner.request.images for owner in self._owners]

    def written(self) -> list[NDArray[np.int32]]:
        """Return the tokens of each row without the newest: the tokens with keys and values in the cache."""
        return [self._tokens_BL[b, : length - 1] for b, length in enumerate(self._lengths_B[: len(self)])]

    def draws(self, first: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return seeds of the rows from `first` on, and the number of the next completion token of each row."""
        rows = slice(first, len(self))
        return self._seeds_B[rows], (self._lengths_B[rows] - self._prompts_B[rows]).astype(np.uint64)

    def distribution(self, first: int) -> Distribution:
        """Return the distributions from which the rows from `first` on draw the next tokens."""
        rows = slice(first, len(self))
        return Distribution(
            self._temperatures_B[rows],
            self._top_p_B[rows],
            self._top_k_B[rows],
            self._min_p_B[rows],
            *self._changes(first),
        )

    def _watch(self, asked: SampleRequest) -> StopWatch:
        return StopWatch(asked.stop, asked.stop_token_ids, self._detokenize, asked.sampling.min_tokens)

    def _changes(self, first: int) -> tuple[TokenValues | None, TokenValues | None, TokenValues | None]:
        """Return bias, repetition penalties and other penalties of the rows from `first` on."""
        biases: list[Entry] = []
        repetitions: list[Entry] = []
        penalties: list[Entry] = []
        for row in np.flatnonzero(self._biased_B[first : len(self)]).tolist():
            b = first + row
            asked, prompt, length = self._owners[b].request.asked, self._prompts_B[b], self._lengths_B[b]
            sampling = asked.sampling
            values = dict(asked.logit_bias)
            if length - prompt < sampling.min_tokens:
                values |= dict.fromkeys(asked.ends(self._eos), float("-inf"))
            biases += [(row, token, value) for token, value in values.items()]
            if sampling.repetition_penalty != 1:
                seen = np.unique(self._tokens_BL[b, :length]).tolist()
                repetitions += [(row, token, sampling.repetition_penalty) for token in seen]
            if not (sampling.presence_penalty or sampling.frequency_penalty):
                continue
            # the prompt does not count, as with OpenAI and vLLM
            tokens, counts = np.unique(self._tokens_BL[b, prompt:length], return_counts=True)
            each = sampling.presence_penalty + sampling.frequency_penalty * counts
            penalties += [(row, token, value) for token, value in zip(tokens.tolist(), each.tolist(), strict=True)]
        return _values(biases), _values(repetitions), _values(penalties)

    def num_top_logprobs(self, first: int) -> int:
        """Return the largest number of alternatives reported by a row from `first` on."""
        return int(self._num_top_logprobs_B[first : len(self)].max())

    def tell_prompt_experts(self, first: int, counts: Sequence[int], experts_T: Experts | None) -> None:
        """Note the experts of prompts that have just been computed.

        Args:
            first: first row with such a prompt.
            counts: rows of each prompt, which follow each other.
            experts_T: experts of all tokens of the prompts; None: they are not recorded.
        """
        if experts_T is None:
            return
        store, start = self._store_of(experts_T), 0
        for count in counts:
            size = int(self._prompts_B[first])
            store[first : first + count, :size] = experts_T[start : start + size]
            first, start = first + count, start + size

    def tell_experts(self, experts_B: Experts | None) -> None:
        """Note the experts of each row's newest token, which has just been computed; None: they are not recorded."""
        if experts_B is not None:
            self._store_of(experts_B)[np.arange(len(self)), self._lengths_B[: len(self)] - 1] = experts_B

    def _store_of(self, like: Experts) -> Experts:
        if self._experts_BLLK is None:
            # int16 for any number of experts
            self._experts_BLLK = np.full((*self._tokens_BL.shape, *like.shape[1:]), UNKNOWN, np.int16)
            self._arrays.append(self._experts_BLLK)
        return self._experts_BLLK

    def draw(self, first: int, logits_BV: Tensor) -> NDArray[np.float32]:
        """Draw and append the next token of each of the rows from `first` on; return the logprobs of these tokens."""
        drawn = sample(logits_BV, self.distribution(first), uniforms(*self.draws(first)), self.num_top_logprobs(first))
        self.append(first, drawn)
        return drawn.logprobs_B

    def append(self, first: int, drawn: Drawn) -> None:
        """Append a token to each of the rows from `first` on."""
        rows = np.arange(first, len(self))
        at = self._lengths_B[rows]
        self._tokens_BL[rows, at], self._logprobs_BL[rows, at] = drawn.tokens_B, drawn.logprobs_B
        self._lengths_B[rows] += 1
        for b in np.flatnonzero(self._num_top_logprobs_B[rows]):
            tokens, logprobs = drawn.top_tokens_BK[b].tolist(), drawn.top_logprobs_BK[b].tolist()
            # the batch may report more alternatives than this row asks for
            alternatives = list(zip(tokens, logprobs, strict=True))[: self._num_top_logprobs_B[first + b]]
            self._owners[first + b].top_logprobs.append(alternatives)

    def stamp(self, lineage: int, version: int) -> None:
        """Start a segment of this policy at the next token of every row."""
        # the arrays have unused rows behind
        for owner, count in zip(self._owners, self._lengths_B - self._prompts_B, strict=False):
            owner.segments.append((int(count), lineage, version))

    def ended(self, first: int, eos: NDArray[np.int32]) -> dict[int, str]:
        """Return the rows from `first` on finished by the newest token, with finish reasons."""
        rows = slice(first, len(self))
        tokens_B, positions_B = (array[first:] for array in self.last_tokens())
        # the end of sequence counts before stop strings, and has no stop reason
        stopped_B = (tokens_B[:, None] == eos).any(1) & ~self._endless_B[rows]
        for b in np.flatnonzero(self._watched_B[rows] & ~stopped_B):
            owner = self._owners[first + b]
            assert owner.watch is not None
            owner.stop_reason = owner.watch.add(int(tokens_B[b]))
            stopped_B[b] = owner.stop_reason is not None
        full_B = positions_B + 1 == self._ends_B[rows]
        return {first + int(b): "stop" if stopped_B[b] else "length" for b in np.flatnonzero(stopped_B | full_B)}

    def tell(self, first: int, reasons: dict[int, str]) -> None:
        """Pass the newest token of the rows from `first` on to the requests' callbacks."""
        for b in (first + np.flatnonzero(self._told_B[first : len(self)])).tolist():
            owner = self._owners[b]
            assert owner.request.asked.on_piece is not None
            piece = self._sampled(b, int(self._lengths_B[b]) - 1, reasons.get(b, ""))
            owner.request.asked.on_piece(owner.number, piece)

    def finish(self, reasons: dict[int, str]) -> list[Request]:
        """Store the completions of these rows in the requests; return the requests now complete."""
        requests: dict[int, Request] = {}
        for b, reason in reasons.items():
            owner = self._owners[b]
            completion = self._sampled(b, int(self._prompts_B[b]), reason)
            if self._experts_BLLK is not None:
                completion.routed_experts = narrow(self._experts_BLLK[b, : self._lengths_B[b] - 1])
            owner.request.completions[owner.number] = completion
            requests[id(owner.request)] = owner.request
        return [request for request in requests.values() if request.finished]

    def _sampled(self, b: int, since: int, reason: str) -> Completion:
        """Return the tokens of row b from position `since` on, as a completion."""
        owner, first = self._owners[b], since - int(self._prompts_B[b])
        sampled = slice(since, self._lengths_B[b])
        return Completion(
            self._tokens_BL[b, sampled].tolist(),
            self._logprobs_BL[b, sampled].tolist(),
            # a piece has only the segments that start in it
            [segment for segment in owner.segments if segment[0] >= first],
            reason,
            stop_reason=owner.stop_reason,
            top_logprobs=owner.top_logprobs[first:],
        )

    def remove(self, gone: Iterable[int]) -> tuple[list[int], list[int], int]:
        """Remove rows; return old and new places of the moved rows, and the tokens of the longest moved row."""
        gone = set(gone)
        left = len(self) - len(gone)
        # the gaps among the rows that remain are as many as the remaining rows behind them
        targets = sorted(b for b in gone if b < left)
        sources = [b for b in range(left, len(self)) if b not in gone]
        for source, target in zip(sources, targets, strict=True):
            self._owners[target] = self._owners[source]
        del self._owners[left:]
        for array in self._arrays:
            array[targets] = array[sources]
        return sources, targets, int(self._lengths_B[targets].max(initial=0))

    def rows_of(self, requests: Iterable[Request]) -> list[int]:
        """Return the rows of these requests."""
        wanted = set(map(id, requests))
        return [b for b, owner in enumerate(self._owners) if id(owner.request) in wanted]
