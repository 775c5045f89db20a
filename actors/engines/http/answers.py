"""Answers to clients: the JSON of OpenAI's two endpoints, with token ids, prompts and stop reasons in vLLM's form.

Additional fields: `boot_id` names the answering process, `segments` the sampling policies: P25 (each segment of a
group names a policy).
"""

import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic

from actors.engines.http.requests import ChatRequest, CompletionRequest, Request
from actors.engines.protocol import Completion
from actors.engines.text import Detokenize, ShownText, text_of

LEAST_LOGPROB = -9999.0
"""Lowest logprob in an answer, OpenAI's number for a token of probability 0: JSON has no infinity."""

TokenText = Callable[[int], str]
"""Function from a token id to the token's text, for special tokens too."""
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
        self, asked: Request, prompts: list[list[int]], boot_id: str, detokenize: Detokenize, token_text: TokenText
    ) -> None:
        self._asked, self._prompts = asked, prompts
        self._detokenize, self._token_text = detokenize, token_text
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
            self._content(text_of(completion, self._detokenize), whole=True)
            | self._told(index, completion)
            | self._opening(index)
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

    def _content(self, text: str, *, whole: bool) -> Json:
        return {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text}}

    def _opened(self, index: int, choice: Json) -> list[Json]:
        # a chunk of its own, as clients expect: OpenAI's client counts logprobs twice if they come with a role
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._chunk(opening) | self._beside(), self._chunk(choice)]

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
