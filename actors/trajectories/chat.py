"""The language of a chat model: messages to tokens and back, by its chat template."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from actors.trajectories.bridges import Bridges, Message
from actors.trajectories.forms import AnswerForm, Demand, form_of
from actors.trajectories.parsing import OPENING_TOKENS, Parsed, Syntax, looked_for, opens_thoughts, parse

T = TypeVar("T")


@dataclass(frozen=True)
class Chat:
    """Template, tokenizer and syntax of a model.

    Args:
        bridges: the template.
        encode: tokens of a text.
        decode: text of tokens, with all special tokens.
        ends: texts of the tokens that end a completion.
        syntax: of tool calls; None if the template has none that is known.
    """

    bridges: Bridges
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[str, ...]
    syntax: Syntax | None = None
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1), compare=False, repr=False)

    async def aside(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what work on large texts gives, done in a thread: the event loop serves all trajectories.

        One after the other, since a tokenizer takes more than a hundred bytes of memory for a token.
        """
        async with self._turn:
            return await asyncio.to_thread(work, *arguments, **named)

    def form_of(self, prompt_ids: Sequence[int], demand: Demand) -> AnswerForm:
        """Return the form that meets a demand on the answer to this prompt.

        Raises:
            ValueError: the chat template can't meet the demand.
        """
        return form_of(demand, self.syntax, opens_thoughts(self.decode(prompt_ids[-OPENING_TOKENS:])))

    def read(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        tools: Sequence[Any] | None,
        stop: Sequence[str] = (),
    ) -> Parsed:
        """Return thoughts, text and tool calls of a sampled turn; without tools no calls are looked for.

        Args:
            stop: texts of which one may have ended the turn; the text is told without it, as in OpenAI's API.
        """
        text, opened = self.decode(token_ids), self.decode(prompt_ids[-OPENING_TOKENS:])
        syntax = looked_for(self.syntax, tools)
        whole = parse(text, syntax, tools or (), opened, self.ends)
        places = [place for one in stop if one and (place := text.find(one)) >= 0]
        if not places:
            return whole
        before = parse(text[: min(places)], syntax, tools or (), opened, self.ends)
        # the stop may be the end of a call itself
        return whole if len(whole.calls) > len(before.calls) else before

    def cut(self, message: Message, max_tokens: int) -> Message:
        """Return a message with a content of at most about `max_tokens` tokens: its start and its end are kept."""
        content = message.get("content")
        # a token has at least one byte of text, so short texts need no count
        if not isinstance(content, str) or len(content.encode()) <= max_tokens:
            return message
        ids = self.encode(content)
        if len(ids) <= max_tokens:
            return message
        head, tail = (max_tokens + 1) // 2, max_tokens // 2
        kept = [self.decode(ids[:head]), self.decode(ids[len(ids) - tail :])]
        return message | {"content": f"\n[{len(ids) - head - tail} tokens left out]\n".join(kept)}


def assistant_message(parsed: Parsed, turn: int) -> Message:
    """Return the message of a sampled turn, as in OpenAI's API.

    Ids of tool calls have nine letters and digits, as Mistral's templates ask.

    Args:
        turn: number of the turn, for the ids.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        calls = enumerate(parsed.calls)
        message["tool_calls"] = [call.message(f"call{turn % 1000:03}{number % 100:02}") for number, call in calls]
    return message
