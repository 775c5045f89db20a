"""One session: the endpoint of one trajectory, from its opening to its end.

Consumes calls. Emits replies, and keeps what the record needs: which turn belongs to which reply, rewards of replies,
and parameters that were not obeyed. Waits for the engines alone, as long as the trajectory has time. A call that the
client repeats is answered from the record; the turn of an answer that no client has taken is not trained.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.rollout.sessions.dialects.calls import Call, CallError, Json, Reply
from actors.rollout.sessions.history import History
from actors.trajectories.bridges import BridgeError, Message
from actors.trajectories.chat import Chat
from actors.trajectories.images import ImagesError, MessageImages, TextAlone, parts_of
from actors.trajectories.recorder import LARGE_CHARACTERS, RecordedTurn, TrajectoryOverError
from schemas import limits

REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What dialects put in front of a reply's id."""
INFO_CHARACTERS = 199
"""Most characters of a text in a trajectory's `info`."""
MOST_AT_ONCE = 256
"""Most requests of a session at the same time."""
MOST_NAMES = 100
"""Most names of parameters that a session remembers: clients may make up others with each call."""

Ask = Callable[[Sequence[Message], Json, Sequence[int] | None], Awaitable[RecordedTurn]]
"""Coroutine function of messages, options of a sample, and the prompt's token ids where the caller has made them."""


@dataclass
class _Asked:
    """A call under way, or answered."""

    task: "asyncio.Task[Reply]"
    is_taken: bool = False
    """True once a client has got the whole answer."""
    num_waiting: int = 0
    """Clients that wait for the answer, or are getting it."""


@dataclass
class Session:
    """Session of one trajectory. Its methods are for the event loop alone.

    Args:
        environment: label of the environment.
        ask: samples a turn of the trajectory.
        chat: language of the model.
        data: row of the example, for services that fetch their work.
        images: images of the trajectory; by default none is taken.
    """

    environment: str
    ask: Ask
    chat: Chat
    data: Json = field(default_factory=dict)
    images: MessageImages = field(default_factory=TextAlone)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Secret that names this session in requests."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Name of the session for logs and services; no secret."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the agent, or the service, has ended the session."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(limits.HTTP_LARGE_REQUESTS))
    """Held by each request with a large body; further ones wait before their body is read, at the longest until the
    trajectory is over (`environments[].trajectory_timeout`)."""
    largest: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(limits.HTTP_IMAGE_REQUESTS))
    """Held by each request whose body is larger than any text of a conversation, with `large`."""
    is_over: bool = False
    """True once the trajectory is over: no call is answered any more."""
    reward: float | None = None
    """Reward of the whole trajectory, as set by the agent; None: not set."""
    num_repeated: int = 0
    """Calls answered from the record."""
    _asked: dict[str, list[_Asked]] = field(default_factory=dict)
    """Calls under way or answered, by their identity: several where a client asks the same at the same time."""
    _failed: Counter[str] = field(default_factory=Counter)
    """Calls that failed and were not asked again yet, by their identity."""
    _num_served: int = 0
    """Requests under way."""
    _replies: dict[str, Reply] = field(default_factory=dict)
    """Replies by id."""
    _rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by reply id."""
    _history: History = field(default_factory=History)
    _unheeded: dict[str, set[str]] = field(default_factory=dict)

    async def answer(self, call: Call, identity: str, model: str, *, is_repeated: bool = False) -> "_Taken":
        """Return the reply to a call. A client that leaves meanwhile cancels nothing: it may ask again.

        Args:
            identity: same for a repetition of the same call.
            model: name in the request.
            is_repeated: True if the client says that it has asked before.

        Raises:
            CallError: a limit of the trajectory is reached, the session is over, or the call can't be served.
        """
        self._check_open()
        for kind, names in (("pinned", call.pinned), ("ignored", call.ignored)):
            known = self._unheeded.setdefault(kind, set())
            known.update(name[:INFO_CHARACTERS] for name in itertools.islice(names, MOST_NAMES - len(known)))
        asked = self._repeated(identity) if is_repeated else None
        if asked is None:
            asked = _Asked(asyncio.create_task(self._reply(call, model)))
            self._asked.setdefault(identity, []).append(asked)
            asked.task.add_done_callback(functools.partial(self._forget_failed, identity, asked))
        else:
            self.num_repeated += 1
        asked.num_waiting += 1
        try:
            # shielded: the turn is kept for the client's next attempt
            reply = await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            asked.num_waiting -= 1
            if asked.task.cancelled():
                raise CallError(409, "session: the trajectory is over", "session_ended") from None
            raise
        except Exception as error:
            raise _problem(error) from error
        return _Taken(reply, asked)

    def _repeated(self, identity: str) -> _Asked | None:
        """Return the call that a client asks again; None if it has to be sampled.

        Of calls that are the same it is one whose client has left. If there is none, one that has failed is sampled
        anew: to answer it with another one's answer would give two calls the same answer.
        """
        known = self._asked.get(identity, [])
        if left := next((one for one in known if not one.is_taken and not one.num_waiting), None):
            return left
        if self._failed[identity]:
            self._failed[identity] -= 1
            return None
        return known[-1] if known else None

    def _forget_failed(self, identity: str, asked: _Asked, task: "asyncio.Task[Reply]") -> None:
        """Forget a call that has failed: it leaves no turn, and asked again it is sampled anew, with the same seed.

        Its client may have left, so nobody else looks at the error; and the error would keep the whole request.
        """
        if not task.cancelled() and not task.exception():
            return
        same = self._asked[identity]
        same.remove(asked)
        if not same:
            del self._asked[identity]
        if not task.cancelled() and _problem(task.exception()).status == 503:
            self._failed[identity] += 1

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Count a request, from before its body is read.

        Raises:
            CallError: there are too many at the same time, whose bodies take memory.
        """
        if self._num_served >= MOST_AT_ONCE:
            raise CallError(
                429, f"session: {MOST_AT_ONCE} requests at the same time are the limit", "too_many_requests"
            )
        self._num_served += 1
        try:
            yield
        finally:
            self._num_served -= 1

    def set_reward(self, reply_id: str | None, reward: Any) -> None:
        """Set the reward of a reply, or of the newest one (None).

        Raises:
            CallError: there is no such reply, or the reward is no finite number.
        """
        self._check_open()
        number = finite(reward)
        if reply_id is None:
            if not self._replies:
                raise CallError(404, "interaction_id: this session has no reply yet")
            reply_id = next(reversed(self._replies))
        if (known := self._reply_id(reply_id)) is None:
            raise CallError(404, f"interaction_id: {reply_id!r} is no reply of this session")
        self._rewards[known] = number

    def end(self, reward: Any = None) -> None:
        """End the session, with a reward of the whole trajectory where one is given.

        Raises:
            CallError: the reward is no finite number, or the session is over.
        """
        self._check_open()
        if reward is not None:
            self.reward = finite(reward)
        self.ended.set()

    async def close(self) -> None:
        """Answer no call any more, and wait for calls under way to be gone."""
        self.is_over = True
        under_way = [asked.task for asked in self._all if not asked.task.done()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def split(self, rewards: Mapping[str, float | None]) -> dict[str, float | None]:
        """Take rewards whose names are ids of replies as rewards of these, as AReaL's agents return them.

        Returns:
            Rewards by name of the whole trajectory: those that are left, and the one set at the end.
        """
        left: dict[str, float | None] = {}
        for name, value in rewards.items():
            if (known := self._reply_id(name)) is not None and value is not None:
                self._rewards[known] = value
            else:
                left[name] = value
        return left if self.reward is None else left | {self.environment: self.reward}

    @property
    def turn_rewards(self) -> list[tuple[int, float]]:
        """Turn and reward, for each reply with a reward."""
        return sorted((self._replies[name].turn.number, reward) for name, reward in self._rewards.items())

    @property
    def untaken(self) -> list[int]:
        """Turns whose answers no client has taken."""
        return [
            asked.task.result().turn.number
            for asked in self._all
            if not asked.is_taken and asked.task.done() and not asked.task.cancelled() and not asked.task.exception()
        ]

    @property
    def info(self) -> Json:
        """Parameters that were not obeyed, for the record."""
        return {kind: ", ".join(sorted(names))[:INFO_CHARACTERS] for kind, names in self._unheeded.items() if names}

    @property
    def _all(self) -> list[_Asked]:
        return [asked for same in self._asked.values() for asked in same]

    async def _reply(self, call: Call, model: str) -> Reply:
        """Sample a turn, and keep its reply."""
        messages, digest = self._history.read(await self._known(call.messages))
        options: Json = {"tools": list(call.tools) or None, "max_tokens": call.max_tokens, "stop": list(call.stop)}
        options |= {"response_format": call.response_format, "tool_choice": call.tool_choice}
        prompt = await self._encoded(call.prompt) if isinstance(call.prompt, str) else call.prompt
        if prompt is not None and not prompt:
            raise CallError(400, "prompt: is empty")
        turn = await self.ask(messages, options, prompt)
        message = turn.message
        if not call.parallel_tool_calls and len(message.get("tool_calls", ())) > 1:
            message = message | {"tool_calls": message["tool_calls"][:1]}
        reply = Reply(secrets.token_hex(12), model, int(time.time()), turn, message, *self._text(turn, call.stop))
        self._replies[reply.id] = reply
        if messages:
            self._history.add(messages, message, digest)
        return reply

    async def _known(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with digests in the place of images.

        Raises:
            ImagesError: an image can't be used.
        """
        if not any(map(parts_of, messages)):
            return messages
        # base64, checksums and digests of megabytes
        return await self.chat.aside(lambda: [self.images.known(message) for message in messages])

    async def _encoded(self, text: str) -> list[int]:
        if len(text) > LARGE_CHARACTERS:
            return await self.chat.aside(self.chat.encode, text)
        return self.chat.encode(text)

    def _text(self, turn: RecordedTurn, stops: Sequence[str]) -> tuple[str, str | None]:
        """Return the text of an answer without its end, and the text of `stops` that ended it, if any."""
        text = self.chat.decode(turn.answer.token_ids)
        for end in self.chat.ends:
            text = text.removesuffix(end)
        if turn.answer.finish_reason != "stop":
            return text, None
        places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
        if not places:
            return text, None
        place, stop = min(places)
        return text[:place], stop

    def _reply_id(self, name: str) -> str | None:
        for prefix in REPLY_PREFIXES:
            name = name.removeprefix(prefix)
        return name if name in self._replies else None

    def _check_open(self) -> None:
        if self.is_over or self.ended.is_set():
            raise CallError(409, "session: the trajectory is over", "session_ended")


@dataclass
class _Taken:
    """A reply on its way to a client."""

    reply: Reply
    _asked: _Asked

    def note(self, *, taken: bool) -> None:
        """Note whether the client has got the whole answer. Called once, at the end of its way."""
        self._asked.num_waiting -= 1
        # who has got it once has it, whatever becomes of a repetition
        self._asked.is_taken |= taken


def finite(value: Any) -> float:
    """Return a reward as a number.

    Raises:
        CallError: it is none, or not finite.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        # OverflowError: a whole number may have any number of digits
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise CallError(400, f"reward: {str(value)[:50]} is no finite number")


def _problem(error: BaseException | None) -> CallError:
    """Return what a client is told about a call that failed."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, TrajectoryOverError):
        if error.stop == "context_full":
            return CallError(400, f"messages: {error}", "context_length_exceeded")
        if error.stop == "length":
            return CallError(400, f"messages: {error}", "turn_cut_off")
        if error.stop == "done":
            return CallError(409, "session: the trajectory is over", "session_ended")
        return CallError(429, f"budget: {error}", error.stop)
    if isinstance(error, ImagesError):
        return CallError(400, f"messages: {error}")
    if isinstance(error, BridgeError | ValueError):
        return CallError(400, str(error))
    return CallError(503, f"engine: {type(error).__name__}: {error}", "engine_failed")
