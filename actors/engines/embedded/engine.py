"""Embedded engine: one thread decodes all running sequences together, one token at a time.

Between two tokens the thread handles cancellations, new weights and new requests, in this order. Requests that wait
at the same time start with one forward for all prompts, up to `inference.engine.max_prefill_tokens`. New weights enter
by `weights.update_mode`:

    drain       new requests wait, running ones finish under the old version, then switch
    interrupt   switch, compute keys and values of the tokens so far again, continue (the default)
    inflight    switch and continue with the keys and values as they are

A request that can't start, for example for lack of memory, fails alone; others are served on. After MAX_FAILED such
requests in a row the engine stops. A deterministic engine (`inference.engine.deterministic`) drains and runs one
request at a time (see `_take`).
"""

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import structlog
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.running import Request, Running
from actors.engines.protocol import (
    NO_FORMS,
    Completion,
    EngineStatus,
    EngineStoppedError,
    RequestError,
    SampleRequest,
    SamplingError,
    check_token_ids,
)
from actors.engines.tokenizing import Tokenizing
from actors.models.vision.row_images import PlacedImage
from actors.telemetry.spans import SHORT_SECONDS, JoinedRounds, span
from bus import threads
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.config.services import UpdateMode
from schemas.messages import PolicyVersion

log = structlog.get_logger("engine")

MAX_FAILED = 8
"""Failed starts in a row after which the engine stops: the fault is then taken to be the engine's."""


@dataclass(eq=False)
class _Update:
    """New weights, waiting for a token boundary."""

    policy: PolicyVersion
    weights: Weights
    done: "Future[float]" = field(default_factory=Future)


class EmbeddedEngine(Tokenizing):
    """Engine with a transformers model in this process. The module describes its loop.

    `load` only hands over weights; the engine's thread copies tensors into the model. Futures stay pending until they
    have a result, so a holder may cancel at any moment; the engine notices at the next token boundary.

    Args:
        model: model of the policy.
        config: limits of the engine.
        update_mode: treatment of running requests when weights change.
        decoder: loaded model; None: the engine loads the model, without noise.
    """

    holds_two_versions = False

    def __init__(
        self,
        model: ModelConfig,
        config: EmbeddedEngineConfig,
        update_mode: UpdateMode,
        decoder: Decoder | None = None,
    ) -> None:
        super().__init__(model)
        self._config = config
        # a request sampled by two versions would depend on the token at which the versions were switched
        self._mode = "drain" if config.deterministic else update_mode
        self._decoder = decoder or Decoder(model, config)
        self._eos_E = np.array(sorted(self._eos), np.int32)
        self._policy: PolicyVersion | None = None
        self._running = Running(config.max_sequences, self._decoder.max_length, self._tokenizer.decode, self._eos)
        self._waiting: deque[Request] = deque()
        self._update: _Update | None = None
        self._loading = threading.Lock()
        """Held by one `load` at a time."""
        self._changed = threading.Condition()
        """Guards the fields shared by `submit`, `load`, `status`, `close` and the engine's thread."""
        self._stopping = self._shall_rest = self._rests = False
        """Wishes of other threads, and whether the thread stands still with its cache in host memory."""
        self._failure: BaseException | None = None
        self._num_failed = self._one_by_one = 0
        """Failed starts in a row, and requests still to be started separately."""
        self._generated_tokens, self._busy_seconds = 0, 0.0
        self._rounds = JoinedRounds("decode")
        self._thread = threads.start("engine", self._loop)

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Queue a request. Cancelling the future ends all completions at the next token boundary.

        Raises:
            RequestError: the request can never be served.
            EngineStoppedError: the engine has failed or been closed.
        """
        self._check(request)
        if request.max_tokens is None:
            request = replace(request, max_tokens=self._decoder.max_length - len(request.prompt_ids))
        queued = Request(request)
        with self._changed:
            self._ensure_alive()
            self._waiting.append(queued)
            self._changed.notify()
        return queued.future

    def load(self, policy: PolicyVersion, weights: Weights, timeout: float) -> float:
        """Hand weights to the engine's thread, wait for the switch, and return the seconds taken.

        Raises:
            ValueError: the weights do not fit the model; the old version serves on.
            TimeoutError: the switch did not start within `timeout` seconds; the old version serves on.
            EngineStoppedError: the engine has failed or been closed.
        """
        update = _Update(policy, weights)
        with self._loading:
            with self._changed:
                self._ensure_alive()
                self._update = update
                self._changed.notify()
            with contextlib.suppress(TimeoutError):
                return update.done.result(timeout)
            with self._changed:
                late, self._update = self._update is update, None
            # the engine's thread has taken the update and is applying it, which ends soon
            if not late:
                return update.done.result()
        raise TimeoutError(
            f"weights {policy} were not switched in within {timeout:g} s (weights.timeout, "
            f"weights.update_mode {self._mode})"
        )

    def rest(self, timeout: float) -> None:
        """Stop between two tokens, and move the cache to host memory.

        Raises:
            TimeoutError, EngineStoppedError: as `TakesTurns.rest`.
        """
        self._order_rest(rests=True, timeout=timeout)

    def wake(self, timeout: float) -> None:
        """Move the cache back and go on. Raises as `rest` does."""
        self._order_rest(rests=False, timeout=timeout)

    def _order_rest(self, *, rests: bool, timeout: float) -> None:
        with self._changed:
            self._ensure_alive()
            self._shall_rest = rests
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._rests == rests or self._stopping, timeout):
                raise TimeoutError(f"the engine did not {'rest' if rests else 'wake'} within {timeout:g} s")
            self._ensure_alive()

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state.

        Raises:
            EngineStoppedError: the engine has failed.
        """
        self._check_base()
        with self._changed:
            if self._failure is not None:
                self._ensure_alive()
            waiting = sum(request.asked.num_completions for request in self._waiting)
        return EngineStatus(self._policy, len(self._running), waiting, self._generated_tokens, self._busy_seconds)

    def close(self) -> None:
        """Stop the thread; pending requests fail. Waits at most 10 seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(10.0)

    def _check_base(self) -> None:
        """Check that the model's base is there. A trainer that lives now has lived while a token was computed.

        Raises:
            EngineStoppedError: the trainer whose memory it is has ended.
        """
        if self._decoder.shared_base is not None and (gone := self._decoder.shared_base.ended()):
            raise EngineStoppedError(gone)

    def _ensure_alive(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure!r}") from self._failure
        if self._stopping:
            raise EngineStoppedError("the engine has been closed")

    def _check(self, request: SampleRequest) -> None:
        size, longest = len(request.prompt_ids), self._decoder.max_length
        if request.form is not None:
            raise RequestError(f"response_format, tool_choice: {NO_FORMS.format(engine='embedded')}")
        if size == 0:
            raise RequestError("prompt: is empty")
        if request.images and not self._decoder.sees_images:
            raise RequestError("images: the model sees none; model.path names a model of text alone")
        check_token_ids("prompt", request.prompt_ids, self._decoder.vocab_size)
        check_token_ids("stop_token_ids", request.stop_token_ids, self._decoder.vocab_size)
        check_token_ids("logit_bias", request.logit_bias, self._decoder.vocab_size)
        # with no limit there must be room for one token at least
        new = 1 if request.max_tokens is None else request.max_tokens
        if size + new > longest:
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {new} new ones exceed {longest} "
                "(inference.engine.max_sequence_len, or the model's own limit)"
            )
        if request.num_completions > self._config.max_sequences:
            raise RequestError(
                f"n: {request.num_completions} exceeds {self._config.max_sequences} (inference.engine.max_sequences)"
            )

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while True:
                if not len(self._running):
                    self._rounds.close()
                self._rest_while_ordered()
                with span("wait for requests", waits=True, least=SHORT_SECONDS), self._changed:
                    self._changed.wait_for(
                        lambda: (
                            self._stopping or self._shall_rest or self._waiting or self._update or len(self._running)
                        )
                    )
                    if self._stopping:
                        break
                    if self._shall_rest:
                        continue
                threads.mark("inference.engine")  # fault point of the chaos tests
                started = time.monotonic()
                # first, so that their rows are free for the requests admitted below
                cancelled = [request for request in self._running.requests if request.future.cancelled()]
                if cancelled:
                    self._remove(self._running.rows_of(cancelled))
                # also those behind a request that does not fit yet
                with self._changed:
                    self._waiting = deque(request for request in self._waiting if not request.future.cancelled())
                self._switch_if_due()
                self._admit()
                if count := len(self._running):
                    begun = time.monotonic()
                    logits_BV = self._decoder.decode(*self._running.last_tokens(), self._running.shifts())
                    self._running.tell_experts(self._decoder.experts_T)
                    self._draw(0, logits_BV)
                    self._check_base()
                    self._answer(0)
                    self._rounds.add(begun, time.monotonic(), completions=count)
                self._busy_seconds += time.monotonic() - started
        except BaseException as error:
            log.exception("engine failed")
            self._end(error)
        else:
            self._end(None)

    def _rest_while_ordered(self) -> None:
        """Stand still while another thread wishes so, with the cache in host memory."""
        if not self._shall_rest:
            return
        self._rounds.close()
        self._decoder.move_cache(to_host=True)
        with span("rest", waits=True), self._changed:
            self._rests = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or not self._shall_rest)
        self._decoder.move_cache(to_host=False)
        with self._changed:
            self._rests = False
            self._changed.notify_all()

    def _switch_if_due(self) -> None:
        with self._changed:
            update = self._update
            if update is None or (self._mode == "drain" and len(self._running)):
                return
            self._update = None
        started = time.monotonic()
        self._rounds.close()
        try:
            with span("switch weights", version=update.policy.version):
                self._decoder.load(update.weights, update.policy.version)
        except ValueError as error:
            # nothing has been overwritten: the engine serves on under the old version
            update.done.set_exception(error)
            return
        except BaseException as error:
            update.done.set_exception(error)
            raise
        self._policy = update.policy
        self._running.stamp(update.policy.lineage, update.policy.version)
        if self._decoder.trains_vision:
            self._renew_images()
        # without the newest token, which the next decode computes anyway
        if len(self._running) and self._mode == "interrupt":
            with span("prefill again", completions=len(self._running)):
                running = self._running
                self._decoder.prefill(running.written(), range(len(running)), running.images())
        update.done.set_result(time.monotonic() - started)

    def _renew_images(self) -> None:
        """Compute features of images by the new weights: of running requests now, of waiting ones before they start."""
        with self._changed:
            for request in self._waiting:
                request.images = []
        if self._mode == "interrupt":  # otherwise their keys and values stay as they are
            for request in self._running.requests:
                request.images = self._placed(request.asked)

    def _admit(self) -> None:
        """Prefill as many waiting requests as fit, each prompt once, and draw the first token of each completion."""
        self._place_images()
        first = len(self._running)
        admitted = self._take()
        if not admitted:
            return
        self._rounds.close()
        tokens = sum(len(request.asked.prompt_ids) for request in admitted)
        with span("prefill", requests=len(admitted), tokens=tokens):
            self._start(first, admitted)

    def _place_images(self) -> None:
        """Compute the features of images of the requests that may start next; refuse requests with wrong images."""
        with self._changed:
            next_ones = [request for request in islice(self._waiting, self._running.free) if not request.ready]
        for request in next_ones:
            try:
                request.images = self._placed(request.asked)
            except Exception as error:  # noqa: BLE001 - reported to the request
                with self._changed:
                    self._waiting.remove(request)
                if isinstance(error, ValueError):
                    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                        request.future.set_exception(RequestError(f"images: {error}"))
                else:
                    self._fail(request, error)

    def _placed(self, asked: SampleRequest) -> list[PlacedImage]:
        """Return the images of a prompt with their features.

        Raises:
            ValueError: an image can't be read, or has not as many tokens as its place in the prompt.
        """
        placed: list[PlacedImage] = []
        for image in asked.images:
            one = self._decoder.place(image.start, image.digest, image.data)
            token, before = self._decoder.image_token, placed[-1].span.end if placed else 0
            wanted, behind = one.span.end - one.start, asked.prompt_ids[one.span.end : one.span.end + 1]
            places = asked.prompt_ids[one.start : one.span.end]
            if one.start < before or places != [token] * wanted or behind == [token]:
                raise ValueError(
                    f"image {image.digest} has {wanted} tokens, and the prompt has not as many with the id {token} "
                    f"from {one.start} on"
                )
            placed.append(one)
        return placed

    def _start(self, first: int, admitted: list[Request]) -> None:
        """Compute the prompts of admitted requests, whose rows are those from `first` on, and the first tokens."""
        try:
            # the cache's size must not depend on earlier requests
            if self._config.deterministic:
                self._decoder.forget()
            counts = np.array([request.asked.num_completions for request in admitted])
            slots = (first + np.cumsum(counts) - counts).tolist()
            prompts = [np.array(request.asked.prompt_ids, np.int32) for request in admitted]
            logits_QV = self._decoder.prefill(prompts, slots, [request.images for request in admitted])
            self._running.tell_prompt_experts(first, counts.tolist(), self._decoder.experts_T)
            for request, slot, count in zip(admitted, slots, counts.tolist(), strict=True):
                if count > 1:
                    self._decoder.repeat(slot, count - 1, len(request.asked.prompt_ids))
            rows = torch.from_numpy(np.repeat(np.arange(len(admitted)), counts)).to(logits_QV.device)
            self._draw(first, logits_QV[rows])
        except FloatingPointError:
            # caused by the weights, not by a request: the engine stops
            raise
        except Exception as error:  # noqa: BLE001 - reported to the request
            self._running.remove(range(first, len(self._running)))
            if len(admitted) == 1:
                self._fail(admitted[0], error)
                return
            # the request at fault is unknown: all wait again at the front and start alone
            log.warning("requests could not start together; starting them one by one", requests=len(admitted))
            with self._changed:
                self._waiting.extendleft(reversed(admitted))
                self._one_by_one = len(admitted)
            return
        self._num_failed = 0
        self._check_base()
        self._answer(first)

    def _fail(self, request: Request, error: Exception) -> None:
        """Fail a request after a failed start, with the reason.

        Raises:
            Exception: the given error, after MAX_FAILED failed requests in a row: the next ones would fail too.
        """
        self._num_failed += 1
        asked = request.asked
        words = (
            f"{asked.num_completions} completions of a prompt of {len(asked.prompt_ids)} tokens could not start: "
            f"{type(error).__name__}: {error}"
        )
        log.error("request failed", detail=words, failed_in_a_row=self._num_failed, exc_info=error)
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            request.future.set_exception(SamplingError(words))
        if self._num_failed >= MAX_FAILED:
            raise error

    def _take(self) -> list[Request]:
        """Take waiting requests in order of arrival, while rows and prefill tokens suffice."""
        taken: list[Request] = []
        tokens, budget = 0, self._config.max_prefill_tokens
        segments = [] if self._policy is None else [(0, self._policy.lineage, self._policy.version)]
        with self._changed:
            holding_back = self._mode == "drain" and self._update is not None
            # first come, first served: a large request that does not fit yet holds back the smaller ones behind it
            while self._waiting and not holding_back:
                if taken and self._one_by_one:
                    break
                request = self._waiting[0]
                if not request.ready:  # submitted after its features could be computed
                    break
                if not request.future.cancelled():
                    tokens += len(request.asked.prompt_ids)
                    # a deterministic engine runs each request alone. The shape of a forward decides the order in which
                    # kernels add, and so the last bits of each row: 3 rows give other bits than 4, a context padded to
                    # 33 others than a context of 32. Alone, all shapes follow from the request itself. Padding all
                    # forwards to one shape would not help, since the bits of a row may depend on its place: of 7 rows
                    # that two threads multiply, three are computed by another kernel than four.
                    alone, fits = len(self._running) == 0, request.asked.num_completions <= self._running.free
                    if not (alone if self._config.deterministic else fits) or (taken and tokens > budget):
                        break
                    taken.append(request)
                    self._running.add(request, segments)
                self._waiting.popleft()
            if taken:
                self._one_by_one = max(0, self._one_by_one - 1)
        return taken

    def _draw(self, first: int, logits_BV: torch.Tensor) -> None:
        """Add a token to each of the rows from `first` on.

        Raises:
            FloatingPointError: the logits are not finite.
        """
        logprobs_B = self._running.draw(first, logits_BV)
        # a logprob that is NaN would only show as a loss of NaN, steps later
        if not np.isfinite(logprobs_B).all():
            raise FloatingPointError(f"the model's logits are not finite under policy {self._policy}")
        self._generated_tokens += logprobs_B.size

    def _answer(self, first: int) -> None:
        """Answer the requests that the newest token of the rows from `first` on has completed."""
        running = self._running
        ended = running.ended(first, self._eos_E)
        running.tell(first, ended)
        if not ended:
            return
        finished = running.finish(ended)
        self._remove(list(ended))
        for request in finished:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                request.future.set_result([request.completions[i] for i in range(request.asked.num_completions)])

    def _remove(self, rows: list[int]) -> None:
        sources, targets, length = self._running.remove(rows)
        if sources:
            self._decoder.move(sources, targets, length)

    def _end(self, error: BaseException | None) -> None:
        """Fail everything under way; from now on nothing is taken."""
        with self._changed:
            self._failure, self._stopping = error, True
            requests = [*self._waiting, *self._running.requests]
            self._waiting.clear()
            self._running.remove(range(len(self._running)))
            update, self._update = self._update, None
        reason = EngineStoppedError(f"the engine has failed: {error!r}" if error else "the engine has been closed")
        for request in requests:
            with contextlib.suppress(InvalidStateError):
                request.future.set_exception(reason)
        if update is not None:
            update.done.set_exception(reason)
