"""The embedded engine: one thread that decodes all running sequences a token at a time.

Between two tokens it takes, in this order: new weights, new requests, cancellations. So a request joins at a token
boundary, and so does a version of the weights:

    drain       new requests wait, the running ones finish under the old version, then switch
    interrupt   switch, compute keys and values of what was written so far again, go on (the default)
    inflight    switch and go on with the keys and values as they are
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import structlog
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.sampling import sample, uniforms
from actors.engines.protocol import Completion, EngineStatus, RequestError, SampleRequest
from actors.environments.prompts import Tokenizer, eos_ids
from bus.weights import Weights
from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.messages import Policy

log = structlog.get_logger("engine")


@dataclass(eq=False)
class _Request:
    """A request and its completions as they grow."""

    asked: SampleRequest
    future: "Future[list[Completion]]" = field(default_factory=Future)
    completions: list[Completion] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclass(eq=False)
class _Sequence:
    """One completion that is being decoded, in its slot."""

    request: _Request
    number: int
    slot: int

    @property
    def completion(self) -> Completion:
        return self.request.completions[self.number]

    @property
    def tokens(self) -> list[int]:
        return self.request.asked.prompt_ids + self.completion.token_ids


@dataclass
class _Update:
    """New weights that wait for a token boundary."""

    policy: Policy
    weights: Weights
    asked_at: float
    done: "Future[float]" = field(default_factory=Future)


class EmbeddedEngine:
    """See the module. Weights are loaded in the caller's thread and applied in the engine's."""

    holds_two_versions = False

    def __init__(
        self, model: ModelConfig, config: EmbeddedEngineConfig, update_mode: Literal["drain", "interrupt", "inflight"]
    ) -> None:
        self._config, self._mode = config, update_mode
        self._decoder = Decoder(model)
        self._tokenizer = Tokenizer(model)
        self._eos = eos_ids(model)
        self.max_sequence_len = min(config.max_sequence_len, self._decoder.max_positions)
        self._policy: Policy | None = None
        self._waiting: deque[_Request] = deque()
        self._running: list[_Sequence] = []
        self._free_slots = list(range(config.max_sequences))
        self._update: _Update | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._generated_tokens, self._busy_seconds = 0, 0.0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request."""
        self._check(request)
        queued = _Request(request)
        with self._changed:
            if self._stopping or self._failure:
                raise RuntimeError(f"the engine has stopped: {self._failure or 'closed'}")
            self._waiting.append(queued)
            self._changed.notify()
        return queued.future

    def load(self, policy: Policy, weights: Weights, timeout: float) -> float:
        """Hand weights to the engine's thread and wait until it has switched."""
        update = _Update(policy, weights, time.monotonic())
        with self._changed:
            self._update = update
            self._changed.notify()
        try:
            return update.done.result(timeout)
        except TimeoutError:
            with self._changed:
                if self._update is update:
                    self._update = None
            raise TimeoutError(
                f"weights {policy} were not switched in within {timeout:g} s (weights.timeout, "
                f"weights.update_mode {self._mode})"
            ) from None

    def status(self) -> EngineStatus:
        """A snapshot."""
        waiting = sum(request.asked.num_completions for request in list(self._waiting))
        return EngineStatus(self._policy, len(self._running), waiting, self._generated_tokens, self._busy_seconds)

    def detokenize(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(token_ids)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self._tokenizer.encode(text)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(10.0)

    def _check(self, request: SampleRequest) -> None:
        size = len(request.prompt_ids)
        if size == 0:
            raise RequestError("prompt: is empty")
        if max(request.prompt_ids) >= self._decoder.vocab_size or min(request.prompt_ids) < 0:
            raise RequestError(f"prompt: token ids must be from 0 to {self._decoder.vocab_size - 1}")
        if size + request.max_tokens > self.max_sequence_len:
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {request.max_tokens} new ones exceed "
                f"{self.max_sequence_len} (inference.engine.max_sequence_len)"
            )
        if request.num_completions > self._config.max_sequences:
            raise RequestError(
                f"n: {request.num_completions} exceeds {self._config.max_sequences} (inference.engine.max_sequences)"
            )

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                started = time.monotonic()
                self._drop_cancelled()
                self._switch_if_due()
                self._admit()
                if self._running:
                    self._decode()
                self._busy_seconds += time.monotonic() - started
        except BaseException as error:
            self._failure = error
            log.exception("engine failed")
            raise
        finally:
            self._fail_all(self._failure or RuntimeError("the engine has been closed"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopping or self._waiting or self._running or self._update):
                self._changed.wait(1.0)
            return not self._stopping

    def _switch_if_due(self) -> None:
        update = self._update
        if update is None or (self._mode == "drain" and self._running):
            return
        started = time.monotonic()
        try:
            self._decoder.load(update.weights)
        except ValueError as error:
            update.done.set_exception(error)
        else:
            self._policy = update.policy
            if self._running and self._mode == "interrupt":
                self._decoder.prefill([s.tokens[:-1] for s in self._running], [s.slot for s in self._running])
            for sequence in self._running:
                completion = sequence.completion
                completion.segments.append((len(completion.token_ids), update.policy.lineage, update.policy.version))
            update.done.set_result(time.monotonic() - started)
        with self._changed:
            if self._update is update:
                self._update = None

    def _admit(self) -> None:
        """Prefill what fits, one prompt once, and draw the first token of each of its completions."""
        admitted: list[_Request] = []
        slots: list[list[int]] = []
        with self._changed:
            holding_back = self._mode == "drain" and self._update is not None
            while (
                self._waiting and not holding_back and self._waiting[0].asked.num_completions <= len(self._free_slots)
            ):
                request = self._waiting.popleft()
                if request.future.set_running_or_notify_cancel():
                    admitted.append(request)
                    slots.append([self._take_slot() for _ in range(request.asked.num_completions)])
        if not admitted:
            return
        logits_QV = self._decoder.prefill(
            [request.asked.prompt_ids for request in admitted], [group[0] for group in slots]
        )
        first: list[_Sequence] = []
        for request, group in zip(admitted, slots, strict=True):
            if len(group) > 1:
                self._decoder.share_prefix(group[0], group[1:], len(request.asked.prompt_ids))
            start = [] if self._policy is None else [(0, self._policy.lineage, self._policy.version)]
            request.completions = [Completion(segments=list(start)) for _ in group]
            first += [_Sequence(request, number, slot) for number, slot in enumerate(group)]
        rows = np.repeat(np.arange(len(admitted)), [len(group) for group in slots])
        self._running += first
        self._draw(first, logits_QV[torch.from_numpy(rows).to(logits_QV.device)])

    def _decode(self) -> None:
        running, device = self._running, self._decoder.device
        tokens = torch.tensor([s.completion.token_ids[-1] for s in running], device=device)
        positions = torch.tensor(
            [len(s.request.asked.prompt_ids) + len(s.completion.token_ids) - 1 for s in running], device=device
        )
        self._draw(running, self._decoder.decode(tokens, positions, [s.slot for s in running]))

    def _draw(self, sequences: list[_Sequence], logits_BV: torch.Tensor) -> None:
        asked = [s.request.asked for s in sequences]
        seeds = np.array([a.seed + s.number for a, s in zip(asked, sequences, strict=True)], np.uint64)
        positions = np.array([len(s.completion.token_ids) for s in sequences], np.uint64)
        device = logits_BV.device
        tokens_B, logprobs_B = sample(
            logits_BV,
            torch.tensor([a.temperature for a in asked], device=device),
            torch.tensor([a.top_p for a in asked], device=device),
            torch.from_numpy(uniforms(seeds, positions)).to(device),
        )
        for sequence, token, logprob in zip(sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            completion = sequence.completion
            completion.token_ids.append(token)
            completion.logprobs.append(logprob)
            if token in self._eos:
                completion.finish_reason = "stop"
            elif len(completion.token_ids) >= sequence.request.asked.max_tokens:
                completion.finish_reason = "length"
        self._generated_tokens += len(sequences)
        self._retire([s for s in sequences if s.completion.finish_reason])

    def _retire(self, finished: list[_Sequence]) -> None:
        if not finished:
            return
        for sequence in finished:
            self._give_slot(sequence.slot)
        gone = set(map(id, finished))
        self._running = [s for s in self._running if id(s) not in gone]
        for request in {id(s.request): s.request for s in finished}.values():
            if request.finished and not request.future.done():
                request.future.set_result(request.completions)

    def _drop_cancelled(self) -> None:
        """End requests whose client has gone: a running future can't be cancelled, so the server marks it done."""
        abandoned = [s for s in self._running if s.request.future.done()]
        for sequence in abandoned:
            sequence.completion.finish_reason = "abort"
        self._retire(abandoned)

    def _take_slot(self) -> int:
        """The lowest free slot, so that running sequences stay close to 0…B−1."""
        slot = min(self._free_slots)
        self._free_slots.remove(slot)
        return slot

    def _give_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            requests = [*self._waiting, *{id(s.request): s.request for s in self._running}.values()]
            self._waiting.clear()
            self._running = []
            update, self._update = self._update, None
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)
        if update is not None:
            update.done.set_exception(error)
