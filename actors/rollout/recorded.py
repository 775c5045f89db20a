"""Recorded calls of the model, and engines that answer from them: a trajectory is played again without a model.

A group's tokens say what each turn was asked and what it answered. `RecordedEngines` stands for the engines of a run: a
prompt with the tokens of a recorded one gets the recorded answer, any other prompt is refused, with the place of its
first difference.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engines.http.client import SampledCompletion
from actors.engines.protocol import Segment
from schemas.messages import SEGMENT_ORIGIN, SEGMENT_START, SEGMENT_TURN, TURNS, Origin, RolloutGroup, Ticket

SHOWN_CHARACTERS = 120
"""Characters of a prompt that are shown from its first difference on."""


class NotRecordedError(ValueError):
    """Call that the record does not have."""


@dataclass(frozen=True)
class RecordedCall:
    """Turn of a trajectory: exact prompt, and what was sampled behind it."""

    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    """Runs of tokens by one policy: start in the turn, lineage, version."""


def recorded_calls(group: RolloutGroup, completion: int) -> list[RecordedCall]:
    """Return the calls of a completion that its samples name, in the order of its turns.

    A turn whose answer no client has taken is in no sample. A turn in front of all trained tokens of its samples is a
    part of their prompts, without a name.
    """
    found: dict[int, RecordedCall] = {}
    for sample in np.flatnonzero(group.sample_completions == completion).tolist():
        for call in _of_sample(group, sample):
            found.setdefault(call.turn, call)
    return [found[turn] for turn in sorted(found)]


def _of_sample(group: RolloutGroup, sample: int) -> Iterator[RecordedCall]:
    """Yield the sampled turns of a sample."""
    start, end = group.sample_offsets[sample : sample + 2].tolist()
    prompt = _prompt(group, sample)
    rows = group.segments.tolist()
    ends = [row[SEGMENT_START] for row in rows[1:]] + [len(group.token_ids)]
    turns: dict[int, list[tuple[int, int, list[int]]]] = {}
    for row, behind in zip(rows, ends, strict=True):
        if row[SEGMENT_ORIGIN] == Origin.MODEL and start <= row[SEGMENT_START] < end:
            turns.setdefault(row[SEGMENT_TURN], []).append((row[SEGMENT_START], behind, row))
    for turn, runs in turns.items():
        low, high = runs[0][0], runs[-1][1]
        yield RecordedCall(
            turn,
            [*prompt, *group.token_ids[start:low].tolist()],
            group.token_ids[low:high].tolist(),
            group.logprobs[low:high].tolist(),
            [(at - low, lineage, version) for at, _, (_, lineage, version, *_) in runs],
        )


def _prompt(group: RolloutGroup, sample: int) -> list[int]:
    first, last = group.prompt_offsets[group.sample_prompts[sample] :][:2].tolist()
    prompt: list[int] = group.prompt_ids[first:last].tolist()
    return prompt


@dataclass
class _Played:
    """Calls of one completion, while it is played again."""

    num_recorded: int
    left: list[RecordedCall]
    """Calls that have not been asked yet."""
    prompts: list[list[int]]
    """Prompts of all samples."""
    num_asked: int = 0
    differences: list[str] = field(default_factory=list)


class RecordedEngines:
    """Engines that answer from the record of a group; in place of `actors.rollout.engine_choice.EngineChoice`.

    Args:
        group: the record.
        seeds: completion by the seed of its first turn.
        decode: text of tokens, with all special tokens.
        ends: texts of the tokens that end a completion.
        special: special tokens, in whose names engines look for no stop text.
    """

    def __init__(
        self,
        group: RolloutGroup,
        seeds: Mapping[int, int],
        decode: Callable[[Sequence[int]], str],
        ends: Sequence[str],
        special: Container[int] = (),
    ) -> None:
        self._seeds, self._decode, self._ends, self._special = seeds, decode, tuple(ends), special
        self._played = {
            completion: _Played(
                int(group.counts[completion, TURNS]),
                recorded_calls(group, completion),
                [_prompt(group, sample) for sample in np.flatnonzero(group.sample_completions == completion).tolist()],
            )
            for completion in seeds.values()
        }
        # the object is kept as well, so that no other one gets its place in memory
        self._trajectories: dict[int, tuple[Any, int]] = {}

    def num_calls(self, completion: int) -> tuple[int, int]:
        """Return how many calls a completion has asked for, and how many its record has."""
        played = self._played[completion]
        return played.num_asked, played.num_recorded

    def differences(self, completion: int) -> list[str]:
        """Return words on each call of a completion that its record does not have."""
        return self._played[completion].differences

    async def ask(
        self,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        affinity: Any = None,
        form: Any = None,
        images: Any = (),
    ) -> list[SampledCompletion]:
        """Return the recorded answer to a prompt.

        Args:
            ticket: its seed names the completion, at the first turn.
            affinity: object of the trajectory; names it at later turns.

        Raises:
            NotRecordedError: the record has no such prompt, or no further answer to it.
        """
        if id(affinity) not in self._trajectories:
            self._trajectories[id(affinity)] = affinity, self._seeds[ticket.seed]
        played = self._played[self._trajectories[id(affinity)][1]]
        played.num_asked += 1
        call = next((call for call in played.left if call.prompt_ids == prompt_ids), None)
        if call is not None:
            played.left.remove(call)
        elif (call := self._unnamed(played, prompt_ids)) is None:
            words = f"call {played.num_asked} is not in the record: {self._difference(played, prompt_ids)}"
            played.differences.append(words)
            raise NotRecordedError(words)
        return [
            SampledCompletion(
                call.token_ids,
                call.logprobs,
                call.segments,
                self._finish(call, stop),
                text=self._decode(call.token_ids),
            )
        ]

    def _finish(self, call: RecordedCall, stop: Sequence[str]) -> str:
        """Return why an answer ended: by an end of its own, or at its limit of tokens."""
        text = self._decode([token for token in call.token_ids if token not in self._special])
        is_ended = self._decode(call.token_ids).endswith(self._ends) or any(one in text for one in stop)
        return "stop" if is_ended else "length"

    def _unnamed(self, played: _Played, prompt_ids: list[int]) -> RecordedCall | None:
        """Return the call whose prompt and answer are a part of a sample's prompt; its answer has an end of its own."""
        size = len(prompt_ids)
        for whole in played.prompts:
            if whole[:size] == prompt_ids:
                ends = (i for i in range(size, len(whole)) if self._decode(whole[i : i + 1]).endswith(self._ends))
                if (end := next(ends, None)) is not None:
                    answer = whole[size : end + 1]
                    return RecordedCall(-1, prompt_ids, answer, [0.0] * len(answer), [(0, 0, 0)])
        return None

    def _difference(self, played: _Played, prompt_ids: list[int]) -> str:
        """Return words on the next recorded call, and where this prompt leaves it."""
        if not played.left:
            return f"all {played.num_recorded} recorded calls have been asked"
        recorded = played.left[0].prompt_ids
        pairs = enumerate(zip(recorded, prompt_ids, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(recorded), len(prompt_ids)))
        known, asked = (self._decode(ids[at:])[:SHOWN_CHARACTERS] for ids in (recorded, prompt_ids))
        return f"from token {at} of the prompt on, the record has {known!r}, and the call {asked!r}"
