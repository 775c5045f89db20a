"""Engine without a model, for tests: each token is a hash of seed, prompt, position and the digest of the weights.

Completions have 4 to 11 tokens and end with token 0. Token t ≥ 2 stands for the letter chr(97 + t % 26). New weights
take effect at the next token, as in update mode `inflight`. A hash has no distribution: temperature and top_p, present
in every ticket, change nothing, and other keys for a distribution are refused.
"""

import contextlib
import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from actors.engines.protocol import (
    NO_IMAGES,
    Completion,
    EngineStatus,
    EngineStoppedError,
    RequestError,
    SampleRequest,
    WithoutForms,
    check_token_ids,
)
from actors.engines.text import StopWatch, text_of
from actors.trajectories.bridges import Bridges, Message
from actors.trajectories.chat import Chat
from actors.trajectories.parsing import Parsed
from bus import threads
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.messages import PolicyVersion, Prompt

EOS, END = 0, "<eos>"


@dataclass
class _Row:
    """Completion in progress."""

    number: int
    seed: int
    watch: StopWatch
    length: int = 0
    """Tokens of the whole completion; 0 until the first token decides."""
    completion: Completion = field(default_factory=Completion)


class FakeEngine(WithoutForms):
    """Deterministic test double of an engine."""

    holds_two_versions = False

    def __init__(self, config: FakeEngineConfig) -> None:
        self._config = config
        self._policy: PolicyVersion | None = None
        self._salt = b""
        self._lock = threading.Lock()
        self._executor = threads.Workers(16, "fake-engine")
        self._closed, self._awake = threading.Event(), threading.Event()
        self._awake.set()
        self._running = self._waiting = self._generated = 0

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request, to be sampled in a thread of the engine."""
        if not request.prompt_ids:
            raise RequestError("prompt: is empty")
        if request.images:
            raise RequestError(f"images: {NO_IMAGES.format(engine='fake')}")
        check_token_ids("prompt", request.prompt_ids, self._config.vocab_size)
        check_token_ids("stop_token_ids", request.stop_token_ids, self._config.vocab_size)
        sampling = request.sampling.model_dump(exclude={"temperature", "top_p"}, exclude_defaults=True)
        others = {
            "logit_bias": request.logit_bias,
            "logprobs, top_logprobs": request.num_top_logprobs,
            "response_format, tool_choice": request.form,
            "ignore_eos": request.ignore_eos,
        }
        for name, value in (sampling | others).items():
            if value:
                raise RequestError(f"{name}: the fake engine has no distribution, so it can't serve {value!r}")
        future: Future[list[Completion]] = Future()
        with self._lock:
            if self._closed.is_set():
                raise EngineStoppedError("the engine has been closed")
            # inside the lock: `close` shuts the pool down only after it has held the lock
            self._executor.run(self._sample, request, future)
            self._waiting += request.num_completions
        return future

    def load(self, policy: PolicyVersion, weights: Weights, timeout: float) -> float:
        """Switch to these weights: the hash of each later token includes the digest. Takes 0.0 seconds."""
        content = hashlib.sha256()
        for name, tensor in sorted(weights.tensors.items()):
            content.update(name.encode() + tensor.numpy().tobytes())
        with self._lock:
            self._policy, self._salt = policy, content.digest()
        return 0.0

    def rest(self, timeout: float) -> None:
        """Stop sampling before the next token."""
        with self._lock:
            self._awake.clear()

    def wake(self, timeout: float) -> None:
        """Go on."""
        self._awake.set()

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state."""
        return EngineStatus(self._policy, self._running, self._waiting, self._generated, 0.0)

    def detokenize(self, token_ids: list[int]) -> str:
        """Return a letter per token; the end of sequence has none."""
        return "".join(chr(97 + token % 26) for token in token_ids if token != EOS)

    def token_text(self, token_id: int) -> str:
        """Return the letter of one token; `<eos>` for the end of sequence."""
        return self.detokenize([token_id]) or "<eos>"

    def tokenize(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return a token per character. Messages become text first: role and content of each, then `assistant: `."""
        for name, given in {"tools": tools, "chat_template_kwargs": template_kwargs}.items():
            if given:
                raise RequestError(f"{name}: the fake engine has no chat template")
        if not isinstance(prompt, str):
            prompt = "".join(f"{message['role']}: {message['content']}\n" for message in prompt) + "assistant: "
        # 0 ends a completion, 1 is unused
        return [2 + ord(character) % (self._config.vocab_size - 2) for character in prompt]

    def read_message(
        self, prompt_ids: list[int], completion: Completion, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Parsed:
        """Return the text; the fake engine has no thoughts and no tool calls."""
        return Parsed(text_of(completion, self.detokenize))

    def close(self) -> None:
        """Stop the threads; pending requests fail."""
        with self._lock:
            self._closed.set()
            self._awake.set()
        self._executor.shutdown(wait=True)

    def _sample(self, request: SampleRequest, future: "Future[list[Completion]]") -> None:
        with self._lock:
            self._waiting -= request.num_completions
            self._running += request.num_completions
        rows = [
            _Row(i, request.seed + i, StopWatch(request.stop, request.stop_token_ids, self.detokenize))
            for i in range(request.num_completions)
        ]
        left = rows
        while left and not future.cancelled() and not self._closed.wait(self._config.token_seconds):
            for row in left:
                self._extend(row, request)
            left = [row for row in left if not row.completion.finish_reason]
        with self._lock:
            self._running -= request.num_completions
        with contextlib.suppress(InvalidStateError):  # cancelled
            if left:
                future.set_exception(EngineStoppedError("the engine has been closed"))
            else:
                future.set_result([row.completion for row in rows])

    def _extend(self, row: _Row, request: SampleRequest) -> None:
        """Sample the next token of a row under the policy of this moment."""
        while True:
            self._awake.wait()
            # in one step: the policy in the segment must be the one whose digest is in the hash, and nobody rests
            with self._lock:
                if self._awake.is_set():
                    policy, salt = self._policy, self._salt
                    self._generated += 1
                    break
        stream = hashlib.sha256(salt + f"{row.seed} {request.prompt_ids}".encode()).digest()
        # the hash also fixes the length
        row.length = row.length or 4 + stream[0] % 8
        done, at = row.completion, len(row.completion.token_ids)
        # a completion cut at max_tokens has an ordinary token last, as with a real model
        ended = at + 1 == row.length and row.length != request.max_tokens
        byte = stream[1 + at]
        # the logprob is made up: from -1 to -1/256
        piece = Completion([EOS if ended else 2 + byte % (self._config.vocab_size - 2)], [-(1 + byte) / 256])
        segment = () if policy is None else (policy.lineage, policy.version)
        if segment and (not done.segments or done.segments[-1][1:] != segment):
            piece.segments = [(at, *segment)]
        piece.stop_reason = None if ended else row.watch.add(piece.token_ids[0])
        if ended or piece.stop_reason is not None:
            piece.finish_reason = "stop"
        elif at + 1 == request.max_tokens or at + 1 == row.length:
            piece.finish_reason = "length"
        done.token_ids += piece.token_ids
        done.logprobs += piece.logprobs
        done.segments += piece.segments
        done.finish_reason, done.stop_reason = piece.finish_reason, piece.stop_reason
        if request.on_piece is not None:
            request.on_piece(row.number, piece)


def chat(vocab_size: int) -> Chat:
    """Return a chat in the tokens of the fake engine: role and content of each message, an answer ends with token 0."""

    def encode(text: str) -> list[int]:
        parts = text.split(END)
        tokens = [[2 + ord(character) % (vocab_size - 2) for character in part] for part in parts]
        return [token for part in tokens for token in (*part, EOS)][:-1]

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(END if token == EOS else chr(97 + token % 26) for token in token_ids)

    def render(messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        ends = {"assistant": END}
        text = "".join(f"{one['role']}: {one['content']}{ends.get(one['role'], '')}\n" for one in messages)
        return text + ("assistant: " if add_generation_prompt else "")

    return Chat(Bridges(render, encode, [EOS], [EOS]), encode, decode, (END,))


def make(config: RunConfig, engine: FakeEngineConfig, name: str, server_index: int) -> FakeEngine:
    """Make the engine of an inference actor; the arguments are those of `actors.assembly.ENGINES`."""
    return FakeEngine(engine)
