"""Recorder of a trajectory: asks the model for each next message, and keeps the exact tokens of all turns.

A caller shows messages and gets a message. The recorder looks for the longest earlier conversation, answer included,
with which these messages begin. The next prompt is that conversation's exact tokens and a bridge for the messages that
are new; without one, the messages are rendered anew, which starts a branch. Limits are checked before each request.
"""

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.trajectories.bridges import Message
from actors.trajectories.chat import Chat, assistant_message
from actors.trajectories.forms import AnswerForm, Demand
from actors.trajectories.images import MessageImages, ShownImage, TextAlone, parts_of, shows_images
from actors.trajectories.tree import SampledTurn, TrajectoryTree
from schemas.messages import StopCondition
from schemas.routed import Experts

LONGEST_TOKEN = 256
"""Characters of the longest token that any tokenizer may have; blanks are the longest, with 128 or fewer."""
USUAL_TOKEN = 16
"""Characters of a token that few texts reach on average."""
LARGE_CHARACTERS = 64 << 10
"""Characters of a conversation that is rendered in a thread: the event loop serves all trajectories."""


class TrajectoryOverError(Exception):
    """Error at a request that a limit forbids. `stop` names the limit."""

    def __init__(self, stop: StopCondition, words: str) -> None:
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
    train_forced_turns: bool = False
    """Whether a turn that was sampled under a demand is part of the loss."""
    stop: tuple[str, ...] = ()
    """Texts that end each turn."""


@dataclass(frozen=True)
class TurnRequest:
    """Request to an engine."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    form: AnswerForm | None = None
    """Form that the answer must have."""
    images: Sequence[ShownImage] = ()
    """Images of the prompt in the order of their places."""


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
    routed_experts: Experts | None = None
    """Experts of all tokens of prompt and turn but the last; None: unknown."""


@dataclass(frozen=True)
class RecordedTurn:
    """A turn as it stands in the record."""

    number: int
    """In the tree."""
    prompt_ids: Sequence[int]
    answer: TurnAnswer
    message: Message


Sample = Callable[[TurnRequest], Awaitable[TurnAnswer]]
"""Coroutine function that samples a turn; asks another engine after a failure, with the same tokens and seed."""


@dataclass(frozen=True)
class _Prompt:
    """Prompt of a turn."""

    ids: list[int]
    images: Sequence[ShownImage] = ()
    num_boundary: int = 0
    """Tokens that close the turn before."""


@dataclass
class _Turn:
    number: int
    """In the tree."""
    num_messages: int
    """Messages up to this turn's answer."""
    message: Message
    last_id: int
    cut_off: bool


@dataclass
class Recorder:
    """Recorder of one trajectory.

    Args:
        chat: language of the model.
        sample: asks an engine.
        limits: bounds.
        seed: of the first turn; the seeds of later turns are derived from it.
        images: images of the messages; by default none is taken.
    """

    chat: Chat
    sample: Sample
    limits: TurnLimits
    seed: int
    tree: TrajectoryTree = field(default_factory=TrajectoryTree)
    images: MessageImages = field(default_factory=TextAlone)
    num_calls: int = 0
    """Tool calls that could be read."""
    num_malformed: int = 0
    """Tool calls that could not be read; they stay in the text."""
    num_forced: int = 0
    """Turns sampled under a demand, whose logprobs are of the distribution without the forbidden tokens."""
    cut_off: bool = False
    """Whether the last turn that came reached its limit of tokens, so that its message is not whole."""
    _turns: dict[bytes, _Turn] = field(default_factory=dict)
    """Newest turn by the digest of its conversation, answer included."""
    _taken: set[int] = field(default_factory=set)
    """Numbers of turns that are asked or answered, by which seeds and ids of calls differ."""
    _under_way: dict[int, int] = field(default_factory=dict)
    """Most tokens that each turn under way may bring."""
    _closed: bool = False

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        demand: Demand | None = None,
    ) -> Message:
        """Return the model's next message: that of `turn`."""
        return (await self.turn(messages, tools, max_tokens, stop, demand)).message

    async def turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        demand: Demand | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> RecordedTurn:
        """Ask for the model's next message.

        Args:
            messages: the whole conversation.
            tools: functions that the model may call; other ones than before start a branch, since they are part of
                the prompt.
            max_tokens: a lower limit for this turn.
            stop: texts that end the turn; the message is without them.
            demand: demand on the message, which the engine meets by masking tokens.
            prompt_ids: the prompt, where the caller has made it itself. It continues the turn with the longest exact
                prefix.

        Several may be asked at the same time.

        Raises:
            TrajectoryOverError: a limit is reached, the turn to be continued was cut off, or the recorder is closed.
            BridgeError: the chat template can't render what is new.
            ValueError: max_tokens is below 1, the demand can't be met, or the engine answered without a token.
        """
        self._check_open()
        stop = tuple(dict.fromkeys([*self.limits.stop, *stop]))
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens} is less than 1")
        if len(self._taken) >= self.limits.max_turns:
            raise TrajectoryOverError("max_turns", f"{len(self._taken)} turns are the limit (max_turns)")
        self._left()
        digests, num_characters = _digests(messages, tools)
        # taken before any wait: what is asked meanwhile gets another one
        ordinal = next(number for number in itertools.count() if number not in self._taken)
        self._taken.add(ordinal)
        try:
            if prompt_ids is not None:
                if self.tree.has_images or shows_images(messages):
                    raise ValueError("prompt: a trajectory with images takes messages, and no token ids")
                prompt = _Prompt(list(prompt_ids))
            elif num_characters > LARGE_CHARACTERS:
                prompt = await self.chat.aside(self._prompt, messages, tools, digests)
                self._check_open()
            else:
                prompt = self._prompt(messages, tools, digests)
            budget = self._budget(prompt.ids, self._left(), max_tokens)
            form = None if demand is None else self.chat.form_of(prompt.ids, demand)
            self._under_way[ordinal] = budget
            request = TurnRequest(prompt.ids, budget, self.turn_seed(ordinal), stop, form, prompt.images)
            answer = await self.sample(request)
            self._check_open()
            if not answer.token_ids:
                raise ValueError("the engine answered a turn without a token")
        except BaseException:
            # asked again, it has the same seed
            self._taken.discard(ordinal)
            raise
        finally:
            self._under_way.pop(ordinal, None)
        parsed = self.chat.read(prompt.ids, answer.token_ids, tools, stop if answer.finish_reason == "stop" else ())
        message = assistant_message(parsed, ordinal)
        self.num_calls += len(parsed.calls)
        self.num_malformed += len(parsed.malformed)
        self.num_forced += form is not None
        number = self._keep(prompt, answer, digests, message, forced=form is not None)
        return RecordedTurn(number, self.tree.prompt(number), answer, message)

    def _keep(
        self,
        prompt: _Prompt,
        answer: TurnAnswer,
        digests: Sequence[bytes],
        message: Message,
        *,
        forced: bool,
    ) -> int:
        """Add a turn to the tree, remember its conversation, and return its number.

        Args:
            digests: of the conversation in front of the message, behind each of its messages.
        """
        self.cut_off = answer.finish_reason == "length"
        turn = SampledTurn(
            answer.token_ids,
            answer.logprobs,
            answer.segments,
            answer.temperature,
            trains=(self.limits.train_cut_turns or not self.cut_off) and (self.limits.train_forced_turns or not forced),
            routed_experts=answer.routed_experts,
        )
        number = self.tree.add(prompt.ids, turn, prompt.num_boundary, prompt.images)
        if digests:
            digest = _next_digest(digests[-1], _text(message))
            self._turns[digest] = _Turn(number, len(digests) + 1, message, answer.token_ids[-1], self.cut_off)
        return number

    def close(self) -> None:
        """End the trajectory: no turn is asked or added any more. The environment's own tasks may outlive it."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TrajectoryOverError("done", "the episode is over")

    def turn_seed(self, turn: int) -> int:
        """Return the seed of a turn: the same for a turn that is asked again."""
        if turn == 0:
            return self.seed
        return int.from_bytes(hashlib.blake2b(f"{self.seed} {turn}".encode(), digest_size=6).digest(), "big")

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None, digests: Sequence[bytes]) -> _Prompt:
        """Return the prompt for messages: what is new of the conversation, behind the exact tokens before."""
        # the newest of the longest
        longest = (self._turns[digest] for digest in reversed(digests[:-1]) if digest in self._turns)
        if (before := next(longest, None)) is None:
            # what stands before the first answer is the example's own, system message included
            roles = [message.get("role") for message in messages]
            own = roles.index("assistant") if "assistant" in roles else len(roles)
            shown = [*messages[:own], *(self.cut(message) for message in messages[own:])]
            shown = [self.images.known(message) for message in shown]
            self._check_length(shown, tools)
            return _Prompt(*self.images.expand(shown, self.chat.bridges.first(shown, tools)))
        if before.cut_off:
            # half a message is no move: a bridge behind it would show the model an answer that it never gave
            raise TrajectoryOverError("length", "the turn to be continued was cut off at its limit of tokens")
        new = [self.images.known(self.cut(message)) for message in messages[before.num_messages :]]
        self._check_length(new, tools)
        bridge = self.chat.bridges.next(before.last_id, new, before.message.get("tool_calls", ()), tools)
        so_far = [*self.tree.ids(before.number), *bridge.boundary_ids]
        ids, images = self.images.expand(new, bridge.environment_ids)
        return _Prompt(
            [*so_far, *ids],
            [*self.tree.images(before.number), *(image.moved(len(so_far)) for image in images)],
            len(bridge.boundary_ids),
        )

    def _check_length(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Refuse texts that can't fit in any tokens: to encode them would hold all other trajectories up."""
        contents = [content for one in messages if isinstance(content := one.get("content"), str)]
        parts = (part for one in messages for part in parts_of(one) if isinstance(part, dict))
        contents += [text for part in parts if isinstance(text := part.get("text"), str)]
        contents.append(_written(list(tools or ())))
        longest, most = max(contents, key=len, default=""), self.limits.sequence_len
        size, what = sum(map(len, contents)), "characters"
        if size <= LONGEST_TOKEN * most and len(longest) > LARGE_CHARACTERS and len(longest) > USUAL_TOKEN * most:
            # the beginning tells of most texts that the whole is too long
            size, what = (
                len(self.chat.encode(longest[: USUAL_TOKEN * most])),
                "tokens in the beginning of a message, or of the tools,",
            )
            size = size if size > most else 0
        elif size <= LONGEST_TOKEN * most:
            size = 0
        if size:
            words = f"{size} {what} leave no room in {most} tokens (sequence_len)"
            raise TrajectoryOverError("context_full", words)

    def _left(self) -> int | None:
        """Return the number of tokens that all further turns may have together; None for any number."""
        if not (limit := self.limits.max_total_tokens):
            return None
        asked = self.tree.num_sampled + sum(self._under_way.values())
        if asked >= limit:
            raise TrajectoryOverError(
                "max_total_tokens", f"{asked} tokens are sampled or asked for, the limit is {limit} (max_total_tokens)"
            )
        return limit - asked

    def _budget(self, prompt_ids: Sequence[int], left: int | None, max_tokens: int | None) -> int:
        """Return the most tokens that may be sampled behind a prompt."""
        limits = self.limits
        room = limits.sequence_len - len(prompt_ids)
        if room < 1:
            raise TrajectoryOverError(
                "context_full", f"{len(prompt_ids)} prompt tokens leave no room in {limits.sequence_len} (sequence_len)"
            )
        return min(room, limits.max_tokens, *(most for most in (left, max_tokens) if most is not None))

    def cut(self, message: Message) -> Message:
        """Return a message of the environment with a content of at most `max_message_tokens` tokens."""
        longest = self.limits.max_message_tokens
        return self.chat.cut(message, longest) if longest and message.get("role") != "assistant" else message


def _digests(messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[list[bytes], int]:
    """Return behind each message a digest of tools and conversation so far, by which an unchanged history is known.

    Beside them stands the number of characters of all, as JSON.

    null, an empty text, an empty list and an absent field are the same: clients send messages back in all four ways.
    """
    text = _written(list(tools or ()))
    digest, digests, num_characters = text.encode(), [], len(text)
    for message in messages:
        text = _text(message)
        digest, num_characters = _next_digest(digest, text), num_characters + len(text)
        digests.append(digest)
    return digests, num_characters


def _text(message: Message) -> str:
    return written({key: value for key, value in message.items() if value not in (None, "", [])})


def written(fields: dict[str, Any]) -> str:
    """Return a text that is equal for equal fields: JSON, or a form that is faster where all fields are texts."""
    if all(type(value) is str for value in fields.values()):
        # no JSON begins like this, and the lengths keep one field from looking like two
        return "\0" + "".join(f"{len(name)} {name} {len(fields[name])} {fields[name]}" for name in sorted(fields))
    return _written(fields)


def _next_digest(digest: bytes, text: str) -> bytes:
    """Return the digest of a conversation that a message continues."""
    return hashlib.blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_written = json.JSONEncoder(sort_keys=True, default=str).encode
