"""The rollout actor: tickets in, sampled groups out.

Consumes tickets, releases and addresses from State. Emits RolloutGroups to reward actors. Waits on an engine that
serves the ticket's version, on its answer, and on a reward actor with room; each wait ends with the group's deadline,
a release or a State that brings a peer. A group is kept until State releases it, so whoever dies, it can be sent again
(P13).
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgpack
import numpy as np
import structlog

from actors.engines.client import EngineError, RequestRefusedError, SampledCompletion
from actors.environments import Environment, Example
from actors.faults import point
from actors.membership import Drain, Membership
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.data import Outbox
from schemas.config import RunConfig
from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.errors import ConfigError
from schemas.messages import (
    AttemptFailure,
    EnginePeer,
    Prompt,
    Purpose,
    RewardPeer,
    RolloutBeat,
    RolloutGroup,
    RolloutState,
    Ticket,
)

log = structlog.get_logger("rollout")

COALESCE_SECONDS = 0.003
"""Things that happen together become one beat."""
IDLE_SECONDS = 0.5
RETRY_SECONDS = 0.05
LIVE_CHECK_SECONDS = 0.25

Hold = tuple[int, int]
"""(ordinal, attempt)."""


class Client(Protocol):
    """What samples: `actors.engines.client.CompletionClient`."""

    async def sample(self, engine: EnginePeer, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """All completions of a ticket."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class AttemptError(Exception):
    """This attempt can't be finished; `reason` is one of telemetry's ATTEMPT_FAILURES."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class _Held:
    """A ticket from its arrival to its release."""

    ticket: Ticket
    task: "asyncio.Task[None] | None" = None
    group: RolloutGroup | None = None
    failure: AttemptFailure | None = None
    sent_to: str | None = None
    sampled_at: float = 0.0
    sent_at: float = 0.0
    resend_after: float = 0.0


@dataclass
class _Peers:
    """Whom State names."""

    engines: list[EnginePeer] = field(default_factory=list)
    rewards: list[RewardPeer] = field(default_factory=list)


class RolloutActor:
    """Samples groups.

    Args:
        environments: by purpose and label.
        encode: prompt to token ids.
        make_client: called inside the event loop.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        environments: Mapping[tuple[Purpose, str], Environment],
        encode: Callable[[Prompt], list[int]],
        make_client: Callable[[], Client],
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._environments, self._encode, self._make_client = environments, encode, make_client
        self._held: dict[Hold, _Held] = {}
        self._peers = _Peers()
        self._outboxes: dict[str, Outbox] = {}
        self._drain = Drain()
        self._asked: Counter[str] = Counter()
        """Completions under way from here, by the engine's boot id: States tell loads of a second ago."""
        self._live_at: dict[str, float] = {}
        """When State last named an engine's boot id among those that beat."""
        self._told_at = 0.0
        self._state: RolloutState | None = None
        self._waits_for: dict[int, str] = {}
        """By ordinal, for the words of a timeout."""
        self._unusable: ConfigError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._slots_said = -1
        self._run = ""
        self.membership = Membership(config, RolloutBeat, name, on_state=lambda _: self._ring(), lose=lose)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts, *(outbox.counts for outbox in list(self._outboxes.values()))]

    def run(self, metrics_url: str = "") -> None:
        """Until the run is done, or drained."""
        asyncio.run(self._main(metrics_url))

    def drain(self) -> None:
        """Ask for no more tickets; end when all groups have been released, or late. From any thread."""
        self._drain.begin()
        self._ring()

    async def _main(self, metrics_url: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = self._make_client()
        self._report(starting={"phase": "running", "metrics_url": metrics_url})
        try:
            while not self._follow():
                await self._pause()
        finally:
            for held in self._held.values():
                if held.task is not None:
                    held.task.cancel()
            await self._client.close()
            self.membership.close()

    async def _pause(self) -> None:
        waiting_to_send = any(held.group is not None and held.sent_to is None for held in self._held.values())
        try:
            await asyncio.wait_for(self._wake.wait(), RETRY_SECONDS if waiting_to_send else IDLE_SECONDS)
        except TimeoutError:
            return
        await asyncio.sleep(COALESCE_SECONDS)
        self._wake.clear()

    def _ring(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed: there is nobody to wake
                self._loop.call_soon_threadsafe(self._wake.set)

    def _follow(self) -> bool:
        """Do what the newest State says; True at the end."""
        if self._unusable is not None:
            raise self._unusable
        state = self.membership.latest()
        if isinstance(state, RolloutState):
            self._note_live(state)
            self._run, self._peers = state.run, _Peers(state.engines, state.rewards)
            self._release(state)
            for ticket in state.tickets:
                self._accept(ticket)
        self._send_groups()
        self._report()
        done = state is not None and state.phase == "done"
        return done or self._drain.may_leave(holds_work=bool(self._held))

    def _note_live(self, state: RolloutState) -> None:
        """Count the time for which an engine is missing by States: none come while the packer is away."""
        if state is self._state:
            return
        self._state, self._told_at = state, time.monotonic()
        self._live_at |= dict.fromkeys(state.live_engines, self._told_at)

    def _release(self, state: RolloutState) -> None:
        for ordinal, attempt in state.release.tolist():
            held = self._held.pop((ordinal, attempt), None)
            if held is not None and held.task is not None:
                held.task.cancel()

    def _accept(self, ticket: Ticket) -> None:
        key = (ticket.ordinal, ticket.attempt)
        if key not in self._held:
            held = self._held[key] = _Held(ticket)
            point("rollout.ticket")
            held.task = asyncio.create_task(self._attempt(held))

    def _report(self, starting: dict[str, str] | None = None) -> None:
        sampling = sum(held.task is not None for held in self._held.values())
        slots = 0 if self._drain else max(0, self._config.rollout.max_concurrent_groups - sampling)
        fields = {
            "free_slots": slots,
            "holds": np.array(sorted(self._held), np.int64).reshape(-1, 2),
            "failures": [held.failure for held in self._held.values() if held.failure],
        }
        self._metrics.set("grpo_rollout_held_groups", len(self._held))
        if starting is not None:
            self.membership.start(**fields, **starting)
            return
        draining = bool(self._drain) and self._slots_said > 0
        urgent = slots > self._slots_said or draining or bool(fields["failures"])
        self._slots_said = slots
        self.membership.report(urgent=urgent, phase=self._drain.phase, **fields)

    # --- sampling ------------------------------------------------------------------------------------------------

    async def _attempt(self, held: _Held) -> None:
        """Sample one ticket; whatever happens becomes a group or a failure, never silence."""
        ticket, timeout = held.ticket, self._config.rollout.group_timeout
        try:
            async with asyncio.timeout(timeout):
                held.group = await self._sample(ticket)
            point("rollout.sampled")
            held.sampled_at = time.monotonic()
            self._metrics.count("grpo_rollout_groups_total", purpose=ticket.purpose)
            self._metrics.count("grpo_rollout_generated_tokens_total", held.group.token_ids.size)
        except TimeoutError:
            waited = self._waits_for.get(ticket.ordinal, "")
            self._fail(held, "timeout", f"not sampled within {timeout:g} s (rollout.group_timeout){waited}")
        except AttemptError as error:
            self._fail(held, error.reason, str(error))
        except ConfigError as error:
            self._unusable = error
        except Exception as error:
            log.exception("attempt failed", ordinal=ticket.ordinal)
            self._fail(held, "internal", f"{type(error).__name__}: {error}")
        finally:
            held.task = None
            self._waits_for.pop(ticket.ordinal, None)
            self._wake.set()

    def _fail(self, held: _Held, reason: str, detail: str) -> None:
        log.warning(
            "attempt failed", ordinal=held.ticket.ordinal, attempt=held.ticket.attempt, reason=reason, detail=detail
        )
        self._metrics.count("grpo_rollout_failures_total", reason=reason)
        held.failure = AttemptFailure(
            ordinal=held.ticket.ordinal, attempt=held.ticket.attempt, reason=reason, detail=detail
        )

    async def _sample(self, ticket: Ticket) -> RolloutGroup:
        example = self._example(ticket)
        prompt_ids = self._encode(example.prompt)
        key, limit = self._longest_sample()
        if len(prompt_ids) + ticket.max_tokens > limit:
            raise AttemptError(
                "prompt_too_long",
                f"{len(prompt_ids)} prompt tokens and rollout.max_tokens {ticket.max_tokens} exceed {key} {limit}",
            )
        completions = await self._ask_engines(ticket, prompt_ids)
        return build_group(self._run, self.membership.name, ticket, example, prompt_ids, completions)

    def _longest_sample(self) -> tuple[str, int]:
        """The key that bounds prompt and completion together, and its value; the engine knows the model's own limit."""
        limits = {"packer.sequence_len": self._config.packer.sequence_len}
        engine = self._config.inference.engine
        if isinstance(engine, EmbeddedEngineConfig):
            limits["inference.engine.max_sequence_len"] = engine.max_sequence_len
        if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None:
            limits["inference.engine.max_model_len"] = engine.max_model_len
        return min(limits.items(), key=lambda item: item[1])

    def _example(self, ticket: Ticket) -> Example:
        try:
            example = self._environments[ticket.purpose, ticket.environment].example(ticket.index)
        except Exception as error:
            raise AttemptError(
                "environment", f"{ticket.environment} example {ticket.index}: {type(error).__name__}: {error}"
            ) from error
        if example.key(ticket.environment) != ticket.example_key:
            raise AttemptError(
                "environment",
                f"{ticket.environment} example {ticket.index} is another one here than at the "
                "packer: do both read the same file?",
            )
        try:
            msgpack.packb([example.prompt, example.columns])
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"{ticket.environment} example {ticket.index} can't be sent: {error} (integers have 64 bits)"
            raise AttemptError("environment", detail) from error
        return example

    async def _ask_engines(self, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """Ask an engine, and after a failure one again, in place (P11).

        The engine that failed is not asked again for one lease: if it has died, State will have forgotten it by then.
        Asked at once, a dead engine would use up the retries of all groups within a second, and their attempts.
        """
        last_error: EngineError | None = None
        shunned: dict[str, float] = {}
        for _ in range(1 + self._config.rollout.completion_retries):
            engine = await self._choose_engine(ticket, shunned)
            started = time.monotonic()
            self._asked[engine.boot_id] += ticket.num_completions
            self._waits_for[ticket.ordinal] = f": {engine.name} at {engine.url} has not answered"
            try:
                completions = await self._answer(engine, ticket, prompt_ids)
                check_answer(engine, ticket, completions)
                return completions
            except RequestRefusedError as error:
                raise AttemptError("engine", str(error)) from error
            except EngineError as error:
                last_error = error
                shunned[engine.boot_id] = time.monotonic() + self._config.bus.lease
                log.warning("engine failed", ordinal=ticket.ordinal, detail=str(error))
            finally:
                self._asked[engine.boot_id] -= ticket.num_completions
                seconds = time.monotonic() - started
                self._metrics.count("grpo_rollout_wait_seconds_total", seconds, cause="engine_answer")
                self._metrics.observe("grpo_rollout_request_seconds", seconds)
        raise AttemptError("engine", str(last_error))

    async def _answer(self, engine: EnginePeer, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """The engine's answer, waited for as long as the engine beats: one that is frozen keeps its connections.

        Raises:
            EngineError: besides those of the client, State has not named the engine for one lease. A new packer names
                it within one beat, so this one has ended its lease before.
        """
        request = asyncio.ensure_future(self._client.sample(engine, ticket, prompt_ids))
        try:
            while not (await asyncio.wait({request}, timeout=LIVE_CHECK_SECONDS))[0]:
                if self._told_at - self._live_at.get(engine.boot_id, self._told_at) > self._config.bus.lease:
                    raise EngineError(f"{engine.name} at {engine.url} is gone: it has stopped beating")
            return request.result()
        finally:
            request.cancel()

    async def _choose_engine(self, ticket: Ticket, shunned: Mapping[str, float]) -> EnginePeer:
        """The least loaded engine that may sample this ticket; waits until there is one (P10)."""
        started = time.monotonic()
        wanted = f"version {ticket.policy or f'{ticket.min_version} or newer'}"
        self._waits_for[ticket.ordinal] = f": no engine{' but those that failed' if shunned else ''} serves {wanted}"
        while True:
            now = time.monotonic()
            fit = [e for e in self._peers.engines if may_sample(e, ticket) and now >= shunned.get(e.boot_id, 0.0)]
            if fit:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - started, cause="engine_choice")
                return min(fit, key=lambda engine: engine.load + self._asked[engine.boot_id])
            await asyncio.sleep(RETRY_SECONDS)

    # --- sending -------------------------------------------------------------------------------------------------

    def _send_groups(self) -> None:
        """Send what has no living receiver, and what has been waiting for long (P13)."""
        rewards = {f"{peer.name}/{peer.boot_id}": peer for peer in self._peers.rewards}
        for identity in [i for i in self._outboxes if i not in rewards]:
            self._outboxes.pop(identity).close()
        now = time.monotonic()
        for held in self._held.values():
            if held.group is None:
                continue
            late = held.sent_to is not None and now - held.sent_at > held.resend_after
            if held.sent_to in rewards and not late:
                continue
            held.sent_to = self._send(held.group, rewards)
            if held.sent_to is None:
                return  # no reward actor has room, so none has it for the next group
            if not held.sent_at:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - held.sampled_at, cause="reward_choice")
            point("rollout.sent")
            held.sent_at = now
            held.resend_after = max(2 * held.resend_after, self._config.bus.resend_after)

    def _send(self, group: RolloutGroup, rewards: dict[str, RewardPeer]) -> str | None:
        """Identity of the reward actor that took it, the least loaded one with room; None when none has."""
        on_the_way = [held.sent_to for held in self._held.values()]
        for identity, peer in sorted(
            rewards.items(), key=lambda item: (item[1].load + on_the_way.count(item[0]), item[0])
        ):
            if identity not in self._outboxes:
                self._outboxes[identity] = Outbox("groups", peer.address, self._config.bus, self.membership.name)
            if self._outboxes[identity].try_send(group):
                return identity
        return None


def may_sample(engine: EnginePeer, ticket: Ticket) -> bool:
    """Whether an engine serves what the ticket asks for: exactly its policy, or at least its version."""
    if ticket.policy is not None:
        return engine.policy == ticket.policy
    return engine.policy.version >= ticket.min_version


def check_answer(engine: EnginePeer, ticket: Ticket, completions: Sequence[SampledCompletion]) -> None:
    """Whether all completions are there and whole: a group is sampled whole or not at all (P11).

    Raises:
        EngineError: the engine may be asked again.
    """
    who = f"{engine.name} at {engine.url}"
    if len(completions) != ticket.num_completions or not all(c.token_ids for c in completions):
        raise EngineError(f"{who}: {len(completions)} completions for {ticket.num_completions}, or an empty one")
    if any(len(c.token_ids) != len(c.logprobs) or not c.segments for c in completions):
        raise EngineError(f"{who}: the answer lacks logprobs or policies of some tokens")


def build_group(
    run: str,
    sender: str,
    ticket: Ticket,
    example: Example,
    prompt_ids: list[int],
    completions: list[SampledCompletion],
) -> RolloutGroup:
    """The message of a sampled group."""
    offsets = np.cumsum([0, *(len(c.token_ids) for c in completions)])
    segments = [
        (start + offset, lineage, version)
        for c, offset in zip(completions, offsets.tolist(), strict=False)
        for start, lineage, version in c.segments
        if start < len(c.token_ids)
    ]
    tokens = np.concatenate([np.asarray(c.token_ids, np.int32) for c in completions])
    return RolloutGroup(
        run=run,
        sender=sender,
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        purpose=ticket.purpose,
        environment=ticket.environment,
        example_key=ticket.example_key,
        prompt=example.prompt,
        columns=example.columns,
        completions=[c.text for c in completions],
        finish_reasons=[c.finish_reason for c in completions],
        prompt_ids=np.asarray(prompt_ids, np.int32),
        completion_offsets=offsets,
        token_ids=tokens,
        loss_mask=np.ones(tokens.size, np.uint8),
        logprobs=np.concatenate([np.asarray(c.logprobs, np.float32) for c in completions]),
        segments=np.array(segments, np.int64).reshape(-1, 3),
        segment_temperatures=np.full(len(segments), ticket.temperature, np.float32),
    )
