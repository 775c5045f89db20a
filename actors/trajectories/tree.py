"""Tokens of a trajectory as a tree of turns, and the samples that a trainer learns from.

A turn is one call of the model: exact prompt in, sampled tokens out. A turn whose prompt begins with all tokens of an
earlier turn continues that turn; the tokens in between come from the environment. A prompt that begins with no earlier
turn starts a branch: its author has edited the history, as agents do that summarise, or that drop earlier thoughts.

    turn 0: prompt ab   sampled X      turn 1: prompt abXc  sampled Y      turn 2: prompt abd  sampled Z

    turn 1 continues turn 0, with c from the environment; turn 2 is a branch. Two samples:
    ab | X c Y with the mask 1 0 1, and abd | Z with the mask 1

Each path from a first turn to a last one is a sample. A turn on several paths is trained in the first of them, so each
sampled token is trained exactly once; in the others it belongs to the prompt. (Rule: prime-rl's `trajectories.py`,
verifiers' message graph, and OpenEnv's capture all train a shared turn once.)
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actors.trajectories.images import ShownImage
from schemas import routed
from schemas.messages import NO_POLICY, Origin
from schemas.routed import Experts

ID_BYTES = array("i").itemsize
"""Bytes of a token id in a hash."""


@dataclass(frozen=True)
class SampledTurn:
    """Sampled tokens of a turn."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Engine's logprob of each token."""
    segments: Sequence[tuple[int, int, int]]
    """Runs of tokens by one policy: start in the turn, lineage, version; the first starts at 0."""
    temperature: float = 1.0
    trains: bool = True
    """True if the tokens are part of the loss; a turn that was cut off may be kept out."""
    routed_experts: Experts | None = None
    """Experts of all tokens from the root to the end of the turn but the last; None: unknown. In the tree, those from
    the last token of the parent on."""

    def __post_init__(self) -> None:
        """Check that there are tokens, and a logprob and a policy for each.

        Raises:
            ValueError: names the field.
        """
        if not self.token_ids:
            raise ValueError("token_ids: a turn has no tokens")
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"logprobs: {len(self.logprobs)} for {len(self.token_ids)} tokens")
        starts = [start for start, _, _ in self.segments]
        if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= len(self.token_ids):
            raise ValueError(f"segments: starts {starts} must rise from 0 and lie below {len(self.token_ids)}")


@dataclass(frozen=True)
class Sample:
    """Row of tokens that is trained: prompt, then N tokens, of which the sampled ones have the mask 1."""

    prompt_ids: list[int]
    """All tokens before the first one that is trained here."""
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    """0 for tokens that were not sampled."""
    temperatures: list[float]
    """1 for tokens that were not sampled."""
    segments: list[tuple[int, int, int, Origin, int]]
    """Start in the N tokens, lineage, version, origin, turn."""
    images: list[ShownImage] = field(default_factory=list)
    """Images in the order of tokens; starts count the prompt, and the N tokens behind it."""
    experts: Experts | None = None
    """Experts of the prompt's tokens and of the N tokens behind it; None: unknown."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        ends = [start for start, *_ in self.segments[1:]] + [len(self.token_ids)]
        pairs = zip(self.segments, ends, strict=True)
        return sum(end - start for (start, _, _, origin, _), end in pairs if origin is Origin.MODEL)


@dataclass
class _Node:
    parent: int | None
    between_ids: list[int]
    """Tokens between the end of the parent and the sampled tokens; of a first turn, the whole prompt."""
    num_boundary: int
    """Number of tokens at the start of `between_ids` that close the parent."""
    turn: SampledTurn
    length: int
    """Number of tokens from the root to the end of this turn."""
    digest: bytes
    """Digest of these tokens and images."""
    images: list[ShownImage] = field(default_factory=list)
    """Images of `between_ids`; starts count from the root."""
    children: list[int] = field(default_factory=list)


class TrajectoryTree:
    """Turns of a trajectory, in the order in which they were sampled.

    Args:
        joins: turns that continue each other are one sample. False: each turn is a sample by itself, with all tokens
            before it as its prompt (AReaL's style `individual`).
    """

    def __init__(self, *, joins: bool = True) -> None:
        self._joins = joins
        self._nodes: list[_Node] = []
        self._num_branches = 0
        self._image_ids: dict[str, int] = {}
        """Token id of each image in hashes, below 0: all images have equal token ids."""

    @property
    def num_turns(self) -> int:
        """Number of turns."""
        return len(self._nodes)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of all turns."""
        return sum(len(node.turn.token_ids) for node in self._nodes)

    @property
    def num_branches(self) -> int:
        """Number of turns, behind the first, that continue no earlier turn, or one that is continued already."""
        return self._num_branches

    def add(
        self,
        prompt_ids: Sequence[int],
        turn: SampledTurn,
        num_boundary: int = 0,
        images: Sequence[ShownImage] = (),
    ) -> int:
        """Add a turn; return its number.

        Args:
            prompt_ids: exact prompt that the engine was given.
            turn: what was sampled.
            num_boundary: number of prompt tokens, directly behind the earlier turn, that close that turn.
            images: images of the prompt in the order of their places.
        """
        packed = self._content(prompt_ids, images)
        parent, hashed = self._continued(packed)
        start = 0 if parent is None else self._nodes[parent].length
        number = len(self._nodes)
        self._num_branches += bool(number) and (parent is None or bool(self._nodes[parent].children))
        between = list(prompt_ids[start:])
        boundary = min(num_boundary, len(between)) if parent is not None else 0
        hashed.update(_packed(turn.token_ids))
        length = len(prompt_ids) + len(turn.token_ids)
        own = [image for image in images if image.start >= start]
        if turn.routed_experts is not None:
            # an earlier turn has told the rest: all turns of a long conversation would take memory squared
            told = turn.routed_experts[max(0, start - 1) : length - 1].copy()
            turn = replace(turn, routed_experts=told if len(told) == length - 1 - max(0, start - 1) else None)
        self._nodes.append(_Node(parent, between, boundary, turn, length, hashed.digest(), own))
        if parent is not None:
            self._nodes[parent].children.append(number)
        return number

    def continued(self, prompt_ids: Sequence[int], images: Sequence[ShownImage] = ()) -> int | None:
        """Return the turn that a prompt continues: the one with the longest exact prefix; None if there is none."""
        return self._continued(self._content(prompt_ids, images))[0]

    def _content(self, prompt_ids: Sequence[int], images: Sequence[ShownImage]) -> bytes:
        """Return tokens as bytes, in which each image has an id of its own."""
        if not images:
            return _packed(prompt_ids)
        ids = list(prompt_ids)
        for image in images:
            number = self._image_ids.setdefault(image.digest, -1 - len(self._image_ids))
            ids[image.start : image.start + image.length] = [number] * image.length
        return _packed(ids)

    def _continued(self, packed: bytes) -> "tuple[int | None, hashlib.blake2b]":
        """Return the turn that a packed prompt continues, and the hash of the whole prompt, made in one pass."""
        by_length: dict[int, list[int]] = {}
        for number, node in enumerate(self._nodes):
            if node.length * ID_BYTES <= len(packed):
                by_length.setdefault(node.length, []).append(number)
        hashed, done, found = hashlib.blake2b(digest_size=16), 0, None
        view = memoryview(packed)
        for length in sorted(by_length):
            hashed.update(view[done : length * ID_BYTES])
            done, digest = length * ID_BYTES, hashed.digest()
            # of equal turns, which a retry makes, the newest is continued: its answer was the one that arrived
            equal = (number for number in reversed(by_length[length]) if self._nodes[number].digest == digest)
            found = next(equal, found)
        hashed.update(view[done:])
        return found, hashed

    def leave_out(self, turn: int) -> None:
        """Keep a turn out of the loss that nobody has seen; one that was continued was seen."""
        node = self._nodes[turn]
        if not node.children:
            node.turn = replace(node.turn, trains=False)

    def ids(self, turn: int) -> list[int]:
        """Return all tokens from the root to the end of a turn."""
        found: list[int] = []
        for number in self._path(turn):
            found += self._nodes[number].between_ids
            found += self._nodes[number].turn.token_ids
        return found

    def images(self, turn: int) -> list[ShownImage]:
        """Return the images of all tokens from the root to the end of a turn."""
        return [image for number in self._path(turn) for image in self._nodes[number].images]

    @property
    def has_images(self) -> bool:
        """True if a turn has images."""
        return bool(self._image_ids)

    def prompt(self, turn: int) -> "TurnPrompt":
        """Return the prompt of a turn, which takes no memory of its own."""
        return TurnPrompt(self, turn, self._nodes[turn].length - len(self._nodes[turn].turn.token_ids))

    def samples(self) -> list[Sample]:
        """Return the samples, in the order of their last turns; those in which no token would be trained are left out.

        A turn is on several paths if it was continued several times; it is trained on the first path. If no token of
        the tree would be trained, the first path is returned, so that a trajectory with turns has a sample.
        """
        if not self._joins:
            return self._each_turn()
        trained: set[int] = set()
        found: list[Sample] = []
        for leaf in (number for number, node in enumerate(self._nodes) if not node.children):
            path = self._path(leaf)
            new = [number for number in path if number not in trained]
            trained.update(new)
            if any(self._nodes[number].turn.trains for number in new):
                found.append(self._sample(path, new))
        if self._nodes and not found:
            path = self._path(next(number for number, node in enumerate(self._nodes) if not node.children))
            found.append(self._sample(path, path))
        return found

    def _each_turn(self) -> list[Sample]:
        kept = [number for number, node in enumerate(self._nodes) if node.turn.trains] or [*range(len(self._nodes))][:1]
        return [self._sample(self._path(number), [number]) for number in kept]

    def _path(self, turn: int) -> list[int]:
        """Return the turns from the root to this one."""
        path: list[int] = []
        number: int | None = turn
        while number is not None:
            path.append(number)
            number = self._nodes[number].parent
        return path[::-1]

    def _sample(self, path: Sequence[int], new: Sequence[int]) -> Sample:
        # the new turns are the end of the path: whoever was trained has all its ancestors trained
        first = path.index(next((number for number in new if self._nodes[number].turn.trains), new[0]))
        prompt = self.ids(path[first - 1]) if first else []
        prompt += self._nodes[path[first]].between_ids
        sample = Sample(prompt, [], [], [], [], [], self.images(path[-1]))
        for number in path[first:]:
            node = self._nodes[number]
            if number != path[first]:
                self._append(sample, node.between_ids[: node.num_boundary], Origin.BOUNDARY, number)
                self._append(sample, node.between_ids[node.num_boundary :], Origin.ENVIRONMENT, number)
            turn, start = node.turn, len(sample.token_ids)
            sample.token_ids.extend(turn.token_ids)
            sample.loss_mask.extend([int(turn.trains)] * len(turn.token_ids))
            sample.logprobs.extend(turn.logprobs)
            sample.temperatures.extend([turn.temperature] * len(turn.token_ids))
            sample.segments.extend(
                (start + s, line, version, Origin.MODEL, number) for s, line, version in turn.segments
            )
        return replace(sample, experts=self._experts(path))

    def _experts(self, path: Sequence[int]) -> Experts | None:
        """Return the experts of all tokens on a path, each as told by the first turn that computed it.

        The last token has not been computed, and has none.
        """
        found: list[Experts] = []
        for number in path:
            told = self._nodes[number].turn.routed_experts
            if told is None:
                return None
            found.append(told)
        return np.concatenate([*found, routed.unknown(1, found[0])])

    @staticmethod
    def _append(sample: Sample, ids: Sequence[int], origin: Origin, turn: int) -> None:
        if not ids:
            return
        sample.segments.append((len(sample.token_ids), NO_POLICY, NO_POLICY, origin, turn))
        sample.token_ids.extend(ids)
        sample.loss_mask.extend([0] * len(ids))
        sample.logprobs.extend([0.0] * len(ids))
        sample.temperatures.extend([1.0] * len(ids))


class TurnPrompt(Sequence[int]):
    """Prompt of a turn, put together from the tree when it is read: each call of an agent sends a longer one."""

    def __init__(self, tree: TrajectoryTree, turn: int, length: int) -> None:
        self._tree, self._turn, self._length = tree, turn, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._tree.ids(self._turn)[: self._length][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tree.ids(self._turn)[: self._length])


def _packed(ids: Sequence[int]) -> bytes:
    """Return tokens as bytes, to be hashed."""
    return array("i", ids).tobytes()
