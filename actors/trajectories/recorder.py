"""Recorder of a trajectory: asks the model for each next message, and keeps the exact tokens of all turns.

A caller shows messages and gets a message. The recorder looks for the longest earlier conversation, answer included,
with which these messages begin. The next prompt is that conversation's exact tokens and a bridge for the messages that
are new; without one, the messages are rendered anew, which starts a branch. Limits are checked before each request.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.trajectories.bridges import Message
from actors.trajectories.chat import Chat, assistant_message
from actors.trajectories.tree import SampledTurn, TrajectoryTree

Stop = Literal["done", "env_truncated", "length", "max_turns", "max_total_tokens", "context_full"]
"""Why a trajectory ended: the environment was done, or ran out of its own turns; the model's turn was cut off at its
limit; or a limit of ours was reached before the next turn."""


class TrajectoryOverError(Exception):
    """Error at a request that a limit forbids. `stop` names the limit."""

    def __init__(self, stop: Stop, words: str) -> None:
        super().__init__(words)
        self.stop = stop


@dataclass(frozen=True)
class TurnLimits:
    """Bounds of a trajectory."""

    sequence_len: int
    """Tokens of a prompt and its completion."""
    max_tokens: int
    """Sampled tokens of a turn."""
    max_turns: int = 10
    max_total_tokens: int = 0
    """Sampled tokens of all turns; 0 for any number."""
    max_message_tokens: int = 0
    """Tokens of a message from the environment; longer ones lose their middle. 0 for any number."""
    train_cut_turns: bool = True
    """Whether a turn that was cut off at its limit is part of the loss."""


@dataclass(frozen=True)
class TurnRequest:
    """Request to an engine."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnAnswer:
    """Completion of a turn."""

    token_ids: list[int]
    logprobs: list[float]
    segments: list[tuple[int, int, int]]
    """Start in the turn, lineage, version."""
    finish_reason: str
    """`stop` or `length`."""
    temperature: float = 1.0


Sample = Callable[[TurnRequest], Awaitable[TurnAnswer]]
"""Coroutine function that samples a turn; asks another engine after a failure, with the same tokens and seed."""


@dataclass
class _Turn:
    number: int
    """In the tree."""
    num_messages: int
    """Messages up to this turn's answer."""
    message: Message
    last_id: int


@dataclass
class Recorder:
    """Recorder of one trajectory.

    Args:
        chat: language of the model.
        sample: asks an engine.
        limits: bounds.
        seed: of the first turn; the seeds of later turns are derived from it.
    """

    chat: Chat
    sample: Sample
    limits: TurnLimits
    seed: int
    tree: TrajectoryTree = field(default_factory=TrajectoryTree)
    num_calls: int = 0
    """Tool calls that could be read."""
    num_malformed: int = 0
    """Tool calls that could not be read; they stay in the text."""
    cut_off: bool = False
    """Whether the last turn reached its limit of tokens, so that its message is not whole."""
    _turns: dict[bytes, _Turn] = field(default_factory=dict)
    """Newest turn by the digest of its conversation, answer included."""

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """Return the model's next message.

        Args:
            messages: the whole conversation.
            tools: functions that the model may call.
            max_tokens: a lower limit for this turn.
            stop: texts that end the turn.

        Raises:
            TrajectoryOverError: a limit is reached.
            BridgeError: the chat template can't render what is new.
        """
        number = self.tree.num_turns
        if number >= self.limits.max_turns:
            raise TrajectoryOverError("max_turns", f"{number} turns are the limit (max_turns)")
        prompt_ids, num_boundary = self._prompt(messages, tools)
        request = TurnRequest(prompt_ids, self._budget(prompt_ids, max_tokens), self.turn_seed(number), tuple(stop))
        answer = await self.sample(request)
        self.cut_off = answer.finish_reason == "length"
        self.tree.add(
            prompt_ids,
            SampledTurn(
                answer.token_ids,
                answer.logprobs,
                answer.segments,
                answer.temperature,
                trains=self.limits.train_cut_turns or not self.cut_off,
            ),
            num_boundary,
        )
        parsed = self.chat.read(prompt_ids, answer.token_ids, tools)
        self.num_calls += len(parsed.calls)
        self.num_malformed += len(parsed.malformed)
        message = assistant_message(parsed, number)
        *_, digest = _digests([*messages, message])
        self._turns[digest] = _Turn(number, len(messages) + 1, message, answer.token_ids[-1])
        return message

    def turn_seed(self, turn: int) -> int:
        """Return the seed of a turn: the same for a turn that is asked again."""
        if turn == 0:
            return self.seed
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {turn}".encode(), digest_size=6).digest(), "big")

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[list[int], int]:
        """Return the prompt, and the number of its tokens that close the turn before."""
        if (before := self._longest(messages)) is None:
            return self.chat.bridges.first([self._cut(message) for message in messages], tools), 0
        new = [self._cut(message) for message in messages[before.num_messages :]]
        bridge = self.chat.bridges.next(before.last_id, new, before.message.get("tool_calls", ()), tools)
        return (
            [*self.tree.ids(before.number), *bridge.boundary_ids, *bridge.environment_ids],
            len(bridge.boundary_ids),
        )

    def _longest(self, messages: Sequence[Message]) -> _Turn | None:
        """Return the turn whose whole conversation the messages begin with; the newest of the longest."""
        digests = list(_digests(messages[:-1]))
        return next((self._turns[digest] for digest in reversed(digests) if digest in self._turns), None)

    def _budget(self, prompt_ids: Sequence[int], max_tokens: int | None) -> int:
        """Return the most tokens that may be sampled behind a prompt."""
        limits = self.limits
        room = limits.sequence_len - len(prompt_ids)
        if room < 1:
            raise TrajectoryOverError(
                "context_full", f"{len(prompt_ids)} prompt tokens leave no room in {limits.sequence_len} (sequence_len)"
            )
        budget = min(room, limits.max_tokens, max_tokens or limits.max_tokens)
        if limits.max_total_tokens:
            left = limits.max_total_tokens - self.tree.num_sampled
            if left < 1:
                raise TrajectoryOverError(
                    "max_total_tokens", f"{self.tree.num_sampled} tokens are sampled, the limit is max_total_tokens"
                )
            budget = min(budget, left)
        return budget

    def _cut(self, message: Message) -> Message:
        longest = self.limits.max_message_tokens
        return self.chat.cut(message, longest) if longest and message.get("role") != "assistant" else message


def _digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield behind each message a digest of the conversation so far, by which an unchanged history is known again.

    null, an empty text, an empty list and an absent field are the same: clients send messages back in all four ways.
    """
    digest = b""
    for message in messages:
        plain = {key: value for key, value in message.items() if value not in (None, "", [])}
        written = json.dumps(plain, sort_keys=True, default=str).encode()
        digest = hashlib.blake2b(digest + written, digest_size=16).digest()
        yield digest
