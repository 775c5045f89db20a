"""Bridges: the tokens between two turns, found by rendering a made-up conversation with the model's chat template.

The next prompt is the exact tokens so far and a bridge: what the template renders behind an answer. The template is
given a user's message, a made-up answer with a word that is easy to find, and the new messages; what it renders behind
that word's turn is the bridge. The sampled answer itself is never rendered: the text of sampled tokens gives other
tokens, and templates strip thoughts and write tool calls anew. (Method: verl's "token-in-token-out" notes, the
renderers of PrimeIntellect, TRL's `_get_tool_suffix_ids`.)
"""

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]

MARK = "Zq7bridge"
"""Word of the made-up answer: plain letters, which no template changes. Another one is made if a message has it."""
THOUGHT = "Zq7thought"
REMEMBERED = 1000
"""Forms of turns whose closing and order are remembered."""
QUESTION: Message = {"role": "user", "content": "Go."}


class BridgeError(ValueError):
    """The chat template can't render what follows an answer."""


class Render(Protocol):
    """The chat template of a model."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """Return the text of a conversation."""
        ...


@dataclass(frozen=True)
class Bridge:
    """Tokens between a sampled turn and the next."""

    boundary_ids: list[int]
    """Close the turn, if it has no end of its own: cut off, or ended by a stop string."""
    environment_ids: list[int]
    """New messages, and the start of the next answer."""


class Bridges:
    """Chat template of a model, as first prompts and bridges.

    Args:
        render: the chat template.
        encode: tokens of a text, without special tokens of its own; special tokens written out are recognised.
        ends: tokens that end a completion.
        special: special tokens, which a text can't contain by chance.
    """

    def __init__(
        self, render: Render, encode: Callable[[str], list[int]], ends: Iterable[int], special: Iterable[int]
    ) -> None:
        self._render, self._encode = render, encode
        self._ends = frozenset(ends)
        self.special = frozenset(special)
        """Special tokens of the model."""
        self._known = _Known()

    def first(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the prompt of a first turn.

        Raises:
            BridgeError: the template refuses the messages.
        """
        return self.rendered(messages, tools)

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of a conversation as the chat template renders it, for callers that count.

        Raises:
            BridgeError: the template refuses the messages.
        """
        try:
            text = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            # a template is a program: it may raise whatever it likes
            raise BridgeError(f"the chat template refuses a conversation: {type(error).__name__}: {error}") from error
        return self._encode(text)

    def next(
        self,
        last_id: int,
        messages: Sequence[Message],
        calls: Sequence[Message] = (),
        tools: Sequence[Any] | None = None,
    ) -> Bridge:
        """Return the bridge behind a sampled turn.

        Args:
            last_id: last sampled token; tells whether the turn has ended by itself.
            messages: new messages, for example tool results or a user's answer.
            calls: tool calls of the sampled turn, as in its message; names and ids count, arguments do not.
            tools: tools of the conversation.

        Raises:
            BridgeError: the template refuses such messages, leaves one out, or shows no end of an answer.
        """
        mark = _unused(MARK, messages, calls, tools)
        following = self._encode(self._behind_answer([mark], [calls], [list(messages)], tools))
        self._check_shown(mark, messages, calls, tools)
        # an end that no message need follow closes the answer; otherwise it opens the next message (GLM)
        closing = self._known.get(
            ("closing", mark, calls, tools),
            lambda: self._encode(self._behind_answer([mark], [calls], [[]], tools, add_generation_prompt=False)),
        )
        closes = any(token in self._ends or token in self.special for token in closing)
        end = self._end_of_answer(following, closing)
        if last_id == following[end]:
            return Bridge([], following[end + 1 :])
        if not closes:
            return Bridge([], following[end:])
        if last_id in self._ends:  # by another token than the template's (gpt-oss)
            return Bridge([], following[end + 1 :])
        return Bridge([following[end]], following[end + 1 :])

    def deviations(self, tools: Sequence[Any] | None = None) -> list[str]:
        """Return in words where the template renders the past otherwise than the model had it; empty if nowhere.

        Bridges keep the past as it was sampled. An engine that is given messages, and not tokens, would show the model
        another past at the next turn; a caller that does so starts a branch at each turn.
        """
        reply: list[Message] = [{"role": "user", "content": "And?"}]
        found = []
        alone = self._text([MARK], [()], [[]], tools, thought=THOUGHT)
        if THOUGHT in alone and THOUGHT not in self._text([MARK], [()], [reply], tools, thought=THOUGHT):
            found.append("thoughts of an answer are left out as soon as a user's message follows")
        early = self._text([f"{MARK}A"], [()], [reply], tools)
        late = self._text([f"{MARK}A", MARK], [(), ()], [reply, reply], tools)
        if not late.startswith(early):
            found.append("the start of an answer is rendered otherwise as soon as the answer is there")
        if not late.endswith(self._behind_answer([MARK], [()], [reply], tools)):
            found.append("what follows an answer depends on what was said before it")
        return found

    def _end_of_answer(self, following: Sequence[int], closing: Sequence[int]) -> int:
        """Return the index of the token that ends an answer.

        Args:
            following: tokens behind the answer, with the new messages.
            closing: tokens behind the answer alone. Where they have an end, the answer's end stands at the same place
                (not always the same token: gpt-oss's last answer ends otherwise), and what is special before it belongs
                to the tool calls (DeepSeek). Otherwise the next message's start is the end (GLM).
        """
        either = self._ends | self.special
        for wanted in (self._ends, self.special):
            for place, token in enumerate(closing):
                if token in wanted and following[place : place + 1] and following[place] in either:
                    return place
        for place, token in enumerate(following):
            if token in either:
                return place
        raise BridgeError(
            "the chat template writes no token behind an answer by which its end could be found; such a model can be "
            "trained on single turns only"
        )

    def _check_shown(
        self, mark: str, messages: Sequence[Message], calls: Sequence[Message], tools: Sequence[Any] | None
    ) -> None:
        """Check that each new message is rendered behind the answer: some templates move a system message to the front.

        Asked with a word in place of each content, since templates strip and escape contents.
        """
        words = {
            number: f"{mark}in{number}z"
            for number, message in enumerate(messages)
            if isinstance(message.get("content"), str) and message["content"].strip()
        }
        asked = [
            message | ({"content": words[number]} if number in words else {}) for number, message in enumerate(messages)
        ]

        def hidden() -> list[int]:
            try:
                text = self._text([f"{mark}A"], [calls], [asked], tools)
            except BridgeError:
                # a template that reads contents and wants no such words
                return []
            behind = text.rpartition(f"{mark}A")[2]
            return [number for number, word in words.items() if word not in behind]

        if found := self._known.get(("hidden", mark, calls, asked, tools), hidden):
            role = messages[found[0]].get("role")
            raise BridgeError(f"the chat template does not show a new message of the role {role} behind an answer")

    def _behind_answer(self, answers: Sequence[str], *parts: Any, add_generation_prompt: bool = True) -> str:
        text = self._text(answers, *parts, add_generation_prompt=add_generation_prompt)
        _, found, behind = text.rpartition(answers[-1])
        if not found:
            raise BridgeError("the chat template leaves out an assistant's message")
        return behind

    def _text(
        self,
        answers: Sequence[str],
        calls: Sequence[Sequence[Message]],
        replies: Sequence[Sequence[Message]],
        tools: Sequence[Any] | None,
        *,
        thought: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a question, and of answers with the replies to each."""
        refused: Exception | None = None
        for write in (dict, json.dumps):  # templates want arguments as a mapping or as text
            messages: list[Message] = [QUESTION]
            for answer, made, reply in zip(answers, calls, replies, strict=True):
                messages += [_answer(answer, made, thought, write), *reply]
            try:
                return self._render(messages, tools, add_generation_prompt=add_generation_prompt)
            except Exception as error:  # noqa: BLE001 - a template is a program: it may raise whatever it likes
                refused = error
                if not any(calls):
                    break
        raise BridgeError(f"the chat template refuses a conversation: {type(refused).__name__}: {refused}") from refused


class _Known:
    """Results that a template gives again and again: they depend on the form of a turn, not on its texts."""

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, list[int]] = OrderedDict()

    def get(self, case: Any, make: Callable[[], list[int]]) -> list[int]:
        """Return the result of a case, made where it is not known."""
        key = hashlib.blake2b(json.dumps(case, default=repr).encode(), digest_size=16).digest()
        if (known := self._results.get(key)) is not None:
            return known
        self._results[key] = result = make()
        if len(self._results) > REMEMBERED:
            self._results.popitem(last=False)
        return result


def _unused(word: str, *parts: Any) -> str:
    """Return the word, or one made of it, that occurs nowhere in the parts."""
    text = repr(parts)
    names = itertools.chain([word], (f"{word}{number}x" for number in itertools.count()))
    return next(name for name in names if name not in text)


def _answer(text: str, calls: Sequence[Message], thought: str | None, write: Callable[[Any], Any]) -> Message:
    """Return a made-up answer; its last word is the text, in the last call if there are calls."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.get("id", f"call{number:06}"),
                "function": {"name": call["function"]["name"], "arguments": write({"word": text})},
            }
            for number, call in enumerate(calls)
        ]
    return message
