"""Answers to clients: the JSON of OpenAI's two endpoints, with token ids, prompts and stop reasons in vLLM's form.

An answer with tools is a message with thoughts, text and tool calls, read from the sampled text; a stream then has the
message in a single chunk, since a call is known only at its end.

Additional fields: `boot_id` names the answering process, `segments` the sampling policies: P25 (each segment of a
group names a policy).
"""

import itertools
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic

from actors.engines.http.requests import ChatRequest, CompletionRequest, Request
from actors.engines.protocol import Completion
from actors.engines.text import Detokenize, ShownText, text_of
from actors.trajectories.parsing import Parsed

LEAST_LOGPROB = -9999.0
"""Lowest logprob in an answer, OpenAI's number for a token of probability 0: JSON has no infinity."""

CALL_ID_BYTES = 5
"""Random bytes in the id of a tool call: its letters and digits, nine of them, are what Mistral's templates ask for."""

TokenText = Callable[[int], str]
"""Function from a token id to the token's text, for special tokens too."""
ReadMessage = Callable[[list[int], Completion, Sequence[Mapping[str, Any]]], Parsed]
"""Function from a prompt's tokens, a completion and the tools to the message of the completion."""
Json = dict[str, Any]


class Answer(ABC, Generic[Request]):
    """Answer to a request, whole or in chunks. Choices are numbered by prompt, then by completion.

    Args:
        prompts: token ids of all prompts.
        boot_id: answering process.
    """

    id_prefix: ClassVar[str]
    """Beginning of the answer's id."""
    kind: ClassVar[str]
    """Value of `object` in a whole answer."""
    chunk_kind: ClassVar[str]
    """Value of `object` in a chunk."""

    def __init__(
        self,
        asked: Request,
        prompts: list[list[int]],
        boot_id: str,
        detokenize: Detokenize,
        token_text: TokenText,
        read_message: ReadMessage,
    ) -> None:
        self._asked, self._prompts = asked, prompts
        self._detokenize, self._token_text, self._read_message = detokenize, token_text, read_message
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
            "boot_id": boot_id,
        }
        # one per choice: each holds back the end of its own text
        self._shown = [ShownText(asked.stop, detokenize) for _ in range(len(prompts) * asked.n)]
        # sums per choice: tokens so far, and characters so far (`text_offset`)
        self._num_tokens = [0] * len(self._shown)
        self._offsets = [0] * len(self._shown)

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the whole answer with all choices, in the order of the prompts."""
        self._num_tokens = [len(completion.token_ids) for completion in completions]
        choices = [
            self._told(index, completion) | self._whole_content(completion) | self._opening(index)
            for index, completion in enumerate(completions)
        ]
        return self._head | {"object": self.kind, "choices": choices, "usage": self._usage()} | self._beside()

    def chunks(self, index: int, piece: Completion) -> list[Json]:
        """Return the chunks for the next piece of a choice."""
        first = self._num_tokens[index] == 0
        self._num_tokens[index] += len(piece.token_ids)
        choice = self._content(self._shown[index].add(piece), whole=False) | self._told(index, piece)
        return self._opened(index, choice) if first else [self._chunk(choice)]

    def _opened(self, index: int, choice: Json) -> list[Json]:
        """Return the first chunk of a choice, after an opening chunk if the API has one."""
        return [self._chunk(choice | self._opening(index))]

    def _chunk(self, choice: Json) -> Json:
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def last_chunk(self) -> Json:
        """Return the chunk with the token counts of the whole stream."""
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def _whole_content(self, completion: Completion) -> Json:
        """Return the field with the text of a whole choice, and whatever the text says otherwise than `_told`."""
        return self._content(text_of(completion, self._detokenize), whole=True)

    def _told(self, index: int, completion: Completion) -> Json:
        """Return the fields of a choice, or of a piece of a choice, except the text."""
        told: Json = {
            "index": index,
            # null in every chunk but the last
            "finish_reason": completion.finish_reason or None,
            "stop_reason": completion.stop_reason,
            "logprobs": self._logprobs(index, completion) if self._asked.wants_logprobs else None,
            "segments": completion.segments,
        }
        if self._asked.return_token_ids:
            told["token_ids"] = completion.token_ids
        return told

    def _usage(self) -> Json:
        prompt, completion = sum(map(len, self._prompts)), sum(self._num_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _opening(self, index: int) -> Json:
        """Return fields present once per choice: in a stream, in the first chunk."""
        return {}

    def _beside(self) -> Json:
        """Return fields present once per answer."""
        return {}

    @abstractmethod
    def _content(self, text: str, *, whole: bool) -> Json:
        """Return the field with the text of a choice: the whole text, or the part in a chunk."""

    @abstractmethod
    def _logprobs(self, index: int, completion: Completion) -> Json: ...


class TextAnswer(Answer[CompletionRequest]):
    """Answer of `/v1/completions`."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str, *, whole: bool) -> Json:
        return {"text": text}

    def _opening(self, index: int) -> Json:
        # the n choices of a prompt follow each other
        return {"prompt_token_ids": self._prompts[index // self._asked.n]} if self._asked.return_token_ids else {}

    def _logprobs(self, index: int, completion: Completion) -> Json:
        tokens = [self._token_text(token) for token in completion.token_ids]
        *offsets, self._offsets[index] = itertools.accumulate(map(len, tokens), initial=self._offsets[index])
        told: Json = {"tokens": tokens, "token_logprobs": completion.logprobs, "top_logprobs": None}
        told["text_offset"] = offsets
        if self._asked.num_top_logprobs:
            told["top_logprobs"] = []
            places = zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True)
            for sampled, logprob, alternatives in places:
                by_text: dict[str, float] = {}
                # told by text, best first, so that of several tokens with the same text the most probable one counts;
                # the sampled token is always among them
                for token, value in [*alternatives, (sampled, logprob)]:
                    by_text.setdefault(self._token_text(token), max(value, LEAST_LOGPROB))
                told["top_logprobs"].append(by_text)
        return told


class ChatAnswer(Answer[ChatRequest]):
    """Answer of `/v1/chat/completions`."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # by choice: completions of which pieces have arrived
        self._arriving: dict[int, Completion] = {}

    def chunks(self, index: int, piece: Completion) -> list[Json]:
        """Return the chunks for the next piece of a choice. A message that is read comes whole, with the last piece."""
        if not self._asked.reads_message:
            return super().chunks(index, piece)
        completion = self._arriving.setdefault(index, Completion())
        first = not completion.token_ids
        completion.token_ids += piece.token_ids
        completion.logprobs += piece.logprobs
        completion.segments += piece.segments
        completion.top_logprobs += piece.top_logprobs
        completion.finish_reason, completion.stop_reason = piece.finish_reason, piece.stop_reason
        chunks = [self._role_chunk(index)] if first else []
        if not piece.finish_reason:
            return chunks
        self._num_tokens[index] = len(completion.token_ids)
        content = self._whole_content(completion)
        delta = content.pop("message")
        # in the chunk before; OpenAI's client would join both
        del delta["role"]
        for number, call in enumerate(delta.get("tool_calls", ())):
            # OpenAI's client joins the parts of a call by this number
            call["index"] = number
        return [*chunks, self._chunk(self._told(index, completion) | content | {"delta": delta})]

    def _whole_content(self, completion: Completion) -> Json:
        if not self._asked.reads_message:
            return super()._whole_content(completion)
        tools = self._asked.called_tools
        parsed = self._read_message(self._prompts[0], completion, tools)
        if parsed.malformed:
            # a call that can't be read stays text, as with vLLM: the client sees what the model wrote
            parsed = Parsed(text_of(completion, self._detokenize))
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        calls = parsed.calls if self._asked.parallel_tool_calls else parsed.calls[:1]
        if not calls:
            return {"message": message}
        message["content"] = parsed.content or None
        message["tool_calls"] = [call.message(secrets.token_hex(CALL_ID_BYTES)[:9]) for call in calls]
        return {"message": message} | ({"finish_reason": "tool_calls"} if completion.finish_reason == "stop" else {})

    def _content(self, text: str, *, whole: bool) -> Json:
        return {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text}}

    def _opened(self, index: int, choice: Json) -> list[Json]:
        return [self._role_chunk(index), self._chunk(choice)]

    def _role_chunk(self, index: int) -> Json:
        # a chunk of its own, as clients expect: OpenAI's client counts logprobs twice if they come with a role
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._chunk(opening) | self._beside()

    def _beside(self) -> Json:
        return {"prompt_token_ids": self._prompts[0]} if self._asked.return_token_ids else {}

    def _logprobs(self, index: int, completion: Completion) -> Json:
        alternatives = completion.top_logprobs or [[] for _ in completion.token_ids]
        return {
            "content": [
                self._named(token, logprob) | {"top_logprobs": [self._named(*other) for other in others]}
                for token, logprob, others in zip(completion.token_ids, completion.logprobs, alternatives, strict=True)
            ]
        }

    def _named(self, token: int, logprob: float) -> Json:
        text = self._token_text(token)
        # numbers: JSON has no bytes
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}
