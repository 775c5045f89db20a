"""An engine without a model, for tests: tokens are a hash of seed, position and the weights' digest.

Completions have 4 to 11 tokens and end with token 0. Token t ≥ 2 stands for the letter chr(97 + t % 26).
"""

import contextlib
import hashlib
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from actors.engines.protocol import Completion, EngineStatus, EngineStoppedError, RequestError, SampleRequest
from bus.weights import Weights
from schemas.config.actors import FakeEngineConfig
from schemas.messages import Policy

EOS = 0


class FakeEngine:
    """Deterministic double of an engine."""

    holds_two_versions = False

    def __init__(self, config: FakeEngineConfig) -> None:
        self._config = config
        self._policy: Policy | None = None
        self._salt = b""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="fake-engine")
        self._closed = threading.Event()
        self._running = self._waiting = self._generated = 0

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Sample in a thread."""
        if not request.prompt_ids:
            raise RequestError("prompt: is empty")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._config.vocab_size:
            raise RequestError(f"prompt: token ids must be from 0 to {self._config.vocab_size - 1}")
        future: Future[list[Completion]] = Future()
        with self._lock:
            if self._closed.is_set():
                raise EngineStoppedError("the engine has been closed")
            self._pool.submit(self._sample, request, future)
            self._waiting += request.num_completions
        return future

    def load(self, policy: Policy, weights: Weights, timeout: float) -> float:
        """The digest of the weights salts all tokens from now on."""
        content = hashlib.sha256()
        for name, tensor in sorted(weights.tensors.items()):
            content.update(name.encode() + tensor.numpy().tobytes())
        with self._lock:
            self._policy, self._salt = policy, content.digest()
        return 0.0

    def status(self) -> EngineStatus:
        """A snapshot."""
        return EngineStatus(self._policy, self._running, self._waiting, self._generated, 0.0)

    def detokenize(self, token_ids: list[int]) -> str:
        """One letter per token."""
        return "".join(chr(97 + token % 26) for token in token_ids if token != EOS)

    def tokenize(self, text: str) -> list[int]:
        """One token per character."""
        return [2 + ord(character) % (self._config.vocab_size - 2) for character in text]

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            self._closed.set()
        self._pool.shutdown(wait=True)

    def _sample(self, request: SampleRequest, future: "Future[list[Completion]]") -> None:
        with self._lock:
            policy, salt = self._policy, self._salt
            self._waiting -= request.num_completions
            self._running += request.num_completions
        completions = [self._complete(request, request.seed + i, policy, salt) for i in range(request.num_completions)]
        left = max(len(c.token_ids) for c in completions)
        while left and not future.cancelled() and not self._closed.wait(self._config.token_seconds):
            left -= 1
        with self._lock:
            self._running -= request.num_completions
            self._generated += sum(len(c.token_ids) for c in completions)
        with contextlib.suppress(InvalidStateError):  # cancelled
            if left:
                future.set_exception(EngineStoppedError("the engine has been closed"))
            else:
                future.set_result(completions)

    def _complete(self, request: SampleRequest, seed: int, policy: Policy | None, salt: bytes) -> Completion:
        stream = hashlib.sha256(salt + f"{seed} {request.prompt_ids}".encode()).digest()
        length = min(4 + stream[0] % 8, request.max_tokens)
        ended = length < request.max_tokens
        tokens = [2 + byte % (self._config.vocab_size - 2) for byte in stream[1 : length + 1]]
        if ended:
            tokens[-1] = EOS
        segments = [] if policy is None else [(0, policy.lineage, policy.version)]
        logprobs = [-(1 + byte) / 256 for byte in stream[1 : length + 1]]
        return Completion(tokens, logprobs, segments, "stop" if ended else "length")
