"""Choice of an engine for each ticket, request, and choice of another engine after a failure.

Consumes directives with engines and signs of life. Emits requests, and the completions of a whole ticket. Waits for an
engine with the ticket's version and for the engine's answer. The timeout of the attempt ends both waits. The wait for
an answer also ends when the engine is gone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from actors.algorithms.balancing import less_loaded
from actors.engines.http.client import EngineError, RequestRefusedError, SampledCompletion
from actors.engines.protocol import PromptImage
from actors.rollout.held import AttemptError
from actors.rollout.presence import Presence
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import SHORT_SECONDS, span
from actors.trajectories.forms import AnswerForm
from schemas.config import RunConfig
from schemas.messages import EnginePeer, RolloutDirective, Ticket

log = structlog.get_logger("rollout")

RETRY_SECONDS = 0.05
"""Seconds between two looks for an engine with the ticket's version."""
LIVE_CHECK_SECONDS = 0.25
"""Seconds between two checks of the engine asked for a ticket: is the engine still alive?."""


class Client(Protocol):
    """Interface to the engines; implemented by `actors.engines.http.client.CompletionClient`."""

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        form: AnswerForm | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[SampledCompletion]:
        """Return all completions of a ticket, sampled by this engine; `stop` are texts that end one.

        Raises:
            RequestRefusedError: the engine refuses the request itself; another try would fail too.
            EngineError: the engine has failed; the ticket may be tried again.
        """
        ...

    async def close(self) -> None:
        """Close all connections to engines."""
        ...


@dataclass
class Affinity:
    """Engine of a trajectory's turns: it has the keys and values of the turns before in its cache."""

    boot_id: str = ""
    """Boot id of the engine; empty before the first turn."""


class EngineChoice:
    """Asker of engines. An async context manager, which makes the client and closes it.

    Args:
        config: configuration of the run.
        metrics: destination of the `grpo_rollout_*` metrics.
        make_client: maker of the client to the engines; called inside the event loop.
    """

    def __init__(self, config: RunConfig, metrics: Metrics, make_client: Callable[[], Client]) -> None:
        self._retries, self._lease = config.rollout.completion_retries, config.bus.lease
        self._metrics, self._make_client = metrics, make_client
        self._wants_experts = config.trainer.router_replay
        self._client: Client | None = None
        self._engines: Sequence[EnginePeer] = []
        self._presence = Presence(config.bus.lease)
        self.asked: Counter[str] = Counter()
        """Completions requested by this process and not answered yet, by the engine's boot id.

        Loads in the directive are about a second old, so the choice of an engine adds these.
        """
        self._waits: dict[int, str] = {}
        """Words on the current wait of each ticket, by ordinal."""

    async def __aenter__(self) -> "EngineChoice":
        self._client = self._make_client()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()

    def note(self, now: float, directive: RolloutDirective) -> None:
        """Take the engines of a directive, once for each directive."""
        self._engines = directive.engines
        self._presence.note(now, directive.term, directive.live_engines, self._engines)

    def take_wait(self, ordinal: int) -> str:
        """Return the words on a ticket's current wait, for the error text of a timeout; the words are forgotten."""
        return self._waits.pop(ordinal, "")

    async def ask(
        self,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        affinity: "Affinity | None" = None,
        form: AnswerForm | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[SampledCompletion]:
        """Return all completions of a ticket. Retry on another engine after a failure, inside the same attempt.

        P11 (a failed completion is tried again in place; then the whole attempt fails): there are
        `rollout.completion_retries` retries. The engine at fault is avoided for a lease; after a lease
        the directive no longer names a dead engine. Without this pause a dead engine, which fails at once and has no
        load, would use up the retries of all groups within a second.

        Args:
            ticket: what to sample; for a turn of a trajectory, the ticket of one completion.
            prompt_ids: the prompt.
            stop: texts that end a completion.
            affinity: of a trajectory, whose turns go to the same engine while it may sample.
            form: form that each completion must have.
            images: images of the prompt in the order of their places.

        Raises:
            AttemptError: the engine refuses the request, or all retries have failed.
        """
        last_error: EngineError | None = None
        shunned: dict[str, float] = {}
        for _ in range(1 + self._retries):
            with span("wait for an engine", waits=True, least=SHORT_SECONDS):
                engine = await self._choose(ticket, shunned, affinity)
            started = time.monotonic()
            self.asked[engine.boot_id] += ticket.num_completions
            self._waits[ticket.ordinal] = f": {engine.name} at {engine.url} has not answered"
            try:
                with span("request", waits=True, engine=engine.name, completions=ticket.num_completions):
                    completions = await self._answer(engine, ticket, prompt_ids, stop, form, images)
                check_answer(engine, ticket, completions)
                if self._wants_experts and ticket.purpose == "train":
                    check_experts(engine, len(prompt_ids), completions)
                return completions
            except RequestRefusedError as error:
                # every engine would refuse the request for the same reason
                raise AttemptError("engine", str(error)) from error
            except EngineError as error:
                last_error = error
                shunned[engine.boot_id] = time.monotonic() + self._lease
                log.warning("engine failed", ordinal=ticket.ordinal, detail=str(error))
            finally:
                self.asked[engine.boot_id] -= ticket.num_completions
                seconds = time.monotonic() - started
                self._metrics.count("grpo_rollout_wait_seconds_total", seconds, cause="engine_answer")
                self._metrics.observe("grpo_rollout_request_seconds", seconds)
        raise AttemptError("engine", str(last_error))

    async def _answer(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str],
        form: AnswerForm | None,
        images: Sequence[PromptImage],
    ) -> list[SampledCompletion]:
        """Return the engine's answer. Wait as long as the engine is alive: a frozen engine keeps connections open.

        Raises:
            EngineError: the client's errors; also if directives of the same packer have not named the engine for a
                lease, or name another process under the engine's name.
        """
        assert self._client is not None
        request = asyncio.ensure_future(self._client.sample(engine, ticket, prompt_ids, stop, form, images))
        try:
            while not (await asyncio.wait({request}, timeout=LIVE_CHECK_SECONDS))[0]:
                if self._presence.is_gone(engine.name, engine.boot_id):
                    raise EngineError(f"{engine.name} at {engine.url} is gone: it has stopped sending heartbeats")
            return request.result()
        finally:
            # closes the connection of an unanswered request, at which the engine stops sampling for it
            request.cancel()

    async def _choose(self, ticket: Ticket, shunned: Mapping[str, float], affinity: "Affinity | None") -> EnginePeer:
        """Return an engine with a low load among those allowed to sample this ticket; wait for the first.

        P10 (a ticket is sampled only by an engine with version `min_version` or newer). The attempt's timeout ends the
        wait.
        """
        started = time.monotonic()
        wanted = f"version {ticket.policy or f'{ticket.min_version} or newer'}"
        self._waits[ticket.ordinal] = f": no engine{' but those that failed' if shunned else ''} serves {wanted}"
        # the timeout of the attempt cancels the task, which ends the loop
        while True:
            now = time.monotonic()
            fit = [e for e in self._engines if may_sample(e, ticket) and now >= shunned.get(e.boot_id, 0.0)]
            if fit:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - started, cause="engine_choice")
                # loads in the directive are a second old: without this rollout's own requests all tickets that come
                # together would go to the same engine
                best = less_loaded(fit, lambda engine: engine.load + self.asked[engine.boot_id], ticket.seed)
                if affinity is None:
                    return best
                chosen = next((engine for engine in fit if engine.boot_id == affinity.boot_id), best)
                affinity.boot_id = chosen.boot_id
                return chosen
            await asyncio.sleep(RETRY_SECONDS)


def may_sample(engine: EnginePeer, ticket: Ticket) -> bool:
    """Return whether an engine serves exactly the ticket's policy, or at least the ticket's version."""
    # an evaluation measures one version and no other
    if ticket.policy is not None:
        return engine.policy == ticket.policy
    return engine.policy.version >= ticket.min_version


def check_experts(engine: EnginePeer, num_prompt_tokens: int, completions: Sequence[SampledCompletion]) -> None:
    """Check that an engine has told the experts of each token that it has computed (`trainer.router_replay`).

    Raises:
        EngineError: it has not; the ticket may be tried again.
    """
    shapes = set[tuple[int, ...]]()
    for one in completions:
        told, expected = one.routed_experts, num_prompt_tokens + len(one.token_ids) - 1
        if told is None or len(told) != expected:
            raise EngineError(
                f"{engine.name} at {engine.url}: experts of {0 if told is None else len(told)} tokens, and it has "
                f"computed {expected} (trainer.router_replay)"
            )
        shapes.add(told.shape[1:])
    if len(shapes) > 1:
        raise EngineError(f"{engine.name} at {engine.url}: experts of completions differ in layers: {sorted(shapes)}")


def check_answer(engine: EnginePeer, ticket: Ticket, completions: Sequence[SampledCompletion]) -> None:
    """Check an engine's answer for missing completions or fields: a group is sampled as a whole or not at all (P11).

    Raises:
        EngineError: something is missing; the ticket may be tried again.
    """
    who = f"{engine.name} at {engine.url}"
    # a group with a gap would be trained with wrong advantages: better none than a part
    if len(completions) != ticket.num_completions or not all(c.token_ids for c in completions):
        raise EngineError(f"{who}: {len(completions)} completions for {ticket.num_completions}, or an empty one")
    if any(len(c.token_ids) != len(c.logprobs) or not c.segments for c in completions):
        raise EngineError(f"{who}: the answer lacks logprobs or policies of some tokens")
