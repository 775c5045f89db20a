"""The rollout actor: tickets in, sampled groups out.

Consumes tickets, releases and addresses from State. Emits RolloutGroups to reward actors. Waits on an engine with
the ticket's version, on the engine's answer, and on a reward actor with room. Each wait ends with the group's
deadline, a release, or a State with a new peer. P13 (senders keep a group until its release): after the death of any
process the group can be sent again.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from actors.datasets import Environment, Example
from actors.datasets.base import why_not_sendable
from actors.engines.http.client import EngineError, RequestRefusedError, SampledCompletion
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership
from actors.rollout.presence import Presence
from actors.rollout.reward_choice import Arrivals
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.data import Outbox
from schemas import limits
from schemas.config import RunConfig
from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.errors import ConfigError, MessageTooLargeError
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
"""Seconds between a wake-up and the next turn of the loop: all events of this time share a beat."""
IDLE_SECONDS = 0.5
"""Longest pause of the loop. State is looked at this often, even without any event."""
RETRY_SECONDS = 0.05
"""Seconds between two attempts to find a reward actor with room, or an engine with the ticket's version."""
LIVE_CHECK_SECONDS = 0.25
"""Seconds between two checks of the engine asked for a ticket: is the engine still alive?."""
ADDRESS_LOG_SECONDS = 5.0
"""Shortest time between two log lines about unusable addresses."""

Hold = tuple[int, int]
"""Pair (ordinal, attempt): the key of a ticket, and of the group sampled for the ticket."""


class Client(Protocol):
    """Interface to the engines; implemented by `actors.engines.http.client.CompletionClient`."""

    async def sample(self, engine: EnginePeer, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """Return all completions of a ticket, sampled by this engine.

        Raises:
            RequestRefusedError: the engine refuses the request itself; another try would fail too.
            EngineError: the engine has failed; the ticket may be tried again.
        """
        ...

    async def close(self) -> None:
        """Close all connections to engines."""
        ...


class AttemptError(Exception):
    """Error at the end of an attempt. `reason` is an element of telemetry's ATTEMPT_FAILURES."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class _Held:
    """State of a ticket from arrival to release. All times are monotonic, in seconds; 0.0: not yet."""

    ticket: Ticket
    task: "asyncio.Task[None] | None" = None
    """Sampling task; None once the attempt has ended."""
    group: RolloutGroup | None = None
    failure: AttemptFailure | None = None
    sent_to: str | None = None
    """Identity (`NAME/BOOT_ID`) of the reward actor to which the group was sent last; None: not sent yet."""
    named: bool = False
    """True once any reward actor has reported the group as held."""
    accepted_at: float = field(default_factory=time.monotonic)
    sampled_at: float = 0.0
    sent_at: float = 0.0
    resend_after: float = 0.0
    """Seconds after `sent_at` until an unreported group is sent again; doubles with each sending."""


@dataclass
class _Peers:
    """Peer addresses from the newest State."""

    engines: list[EnginePeer] = field(default_factory=list)
    rewards: list[RewardPeer] = field(default_factory=list)


class RolloutActor:
    """Sampler of groups: asks engines for completions and sends each group to a reward actor.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_rollout_*` metrics.
        environments: data sets by purpose and label.
        encode: function from a prompt to token ids.
        make_client: maker of the client to the engines; called inside the event loop.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        environments: Mapping[tuple[Purpose, str], Environment],
        encode: Callable[[Prompt], list[int]],
        make_client: Callable[[], Client],
    ) -> None:
        self._config, self._metrics = config, metrics
        self._environments, self._encode, self._make_client = environments, encode, make_client
        self._held: dict[Hold, _Held] = {}
        self._peers = _Peers()
        self._outboxes: dict[str, Outbox] = {}
        self._next_address_log = 0.0
        self._drain = Drain()
        self._asked: Counter[str] = Counter()
        """Completions requested by this process and not answered yet, by the engine's boot id.

        Loads in State are about a second old, so the choice of an engine adds these.
        """
        self._arrivals = Arrivals(config.bus.resend_after)
        self._engines_there, self._rewards_there = Presence(config.bus.lease), Presence(config.bus.lease)
        self._state: RolloutState | None = None
        self._waits_for: dict[int, str] = {}
        """Words on the current wait of each ticket, by ordinal; the end of a timeout's error text."""
        self._unusable: ConfigError | None = None
        """Configuration error found while sampling; raised by the main loop, which ends the process."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._slots_said = -1  # below any number of slots: the first report counts as an increase
        self._run = ""
        self.membership = Membership(config, RolloutBeat, name, on_state=lambda _: self._ring())
        self.name, self.liveness = name, self.membership.liveness

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        # a copy of the values, since the reporter's thread reads this while the loop adds outboxes
        return [self.membership.counts, *(outbox.counts for outbox in list(self._outboxes.values()))]

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done, or this actor has drained.

        Raises:
            ConfigError: the configuration can't work, as an example or a prompt has shown.
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        asyncio.run(self._main(metrics_url))

    def drain(self) -> None:
        """Ask for no more tickets, and exit once all groups are released or the drain time is over. Thread-safe."""
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
        waiting_to_send = any(
            held.group is not None and held.sent_to is None and held.failure is None for held in self._held.values()
        )
        try:
            await asyncio.wait_for(self._wake.wait(), RETRY_SECONDS if waiting_to_send else IDLE_SECONDS)
        except TimeoutError:
            return
        # the event stays set meanwhile, so that all events of this time end in the same turn
        await asyncio.sleep(COALESCE_SECONDS)
        self._wake.clear()

    def _ring(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed, so nothing waits for the event
                self._loop.call_soon_threadsafe(self._wake.set)

    def _follow(self) -> bool:
        """Follow the newest State. Return True when the actor shall exit."""
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
        """Record which engines and reward actors this State names as alive.

        Each State counts once. While the packer is gone no State comes, so no absence grows.
        """
        if state is self._state:
            return
        self._state, now = state, time.monotonic()
        self._engines_there.note(now, state.term, state.live_engines, state.engines)
        self._rewards_there.note(now, state.term, state.live_rewards, state.rewards)

    def _release(self, state: RolloutState) -> None:
        for ordinal, attempt in state.release.tolist():
            held = self._held.pop((ordinal, attempt), None)
            # still sampling: a copy elsewhere was faster, or the run needs the group no more
            if held is not None and held.task is not None:
                held.task.cancel()

    def _accept(self, ticket: Ticket) -> None:
        key = (ticket.ordinal, ticket.attempt)
        if key not in self._held:  # State repeats a ticket until a beat has named it
            held = self._held[key] = _Held(ticket)
            point("rollout.ticket")
            held.task = asyncio.create_task(self._attempt(held))

    def _report(self, starting: dict[str, str] | None = None) -> None:
        sampling = sum(held.task is not None for held in self._held.values())
        slots = 0 if self._drain else max(0, self._config.rollout.max_concurrent_groups - sampling)
        fields = {
            "free_slots": slots,
            # tickets that have failed are named too, until the packer releases them
            "holds": np.array(sorted(self._held), np.int64).reshape(-1, 2),
            "failures": [held.failure for held in self._held.values() if held.failure][: limits.BEAT_FAILURES],
        }
        self._metrics.set("grpo_rollout_held_groups", len(self._held))
        if starting is not None:
            self.membership.start(**fields, **starting)
            return
        # a beat at once for news that the packer can use now: more slots, the drain, a failure
        draining = bool(self._drain) and self._slots_said > 0
        urgent = slots > self._slots_said or draining or bool(fields["failures"])
        self._slots_said = slots
        self.membership.report(urgent=urgent, phase=self._drain.phase, **fields)

    # --- sampling ------------------------------------------------------------------------------------------------

    async def _attempt(self, held: _Held) -> None:
        """Sample a ticket. Every outcome becomes a group or a failure reported to the packer.

        A ConfigError is left to the main loop instead, which ends the process.
        """
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
            self._wake.set()  # the group leaves, or the failure is told, in the next turn

    def _fail(self, held: _Held, reason: str, detail: str) -> None:
        log.warning(
            "attempt failed", ordinal=held.ticket.ordinal, attempt=held.ticket.attempt, reason=reason, detail=detail
        )
        self._metrics.count("grpo_rollout_failures_total", reason=reason)
        held.failure = AttemptFailure(
            ordinal=held.ticket.ordinal, attempt=held.ticket.attempt, reason=reason, detail=limits.cut(detail)
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
        """Return the key with the limit of prompt and completion together, and the limit in tokens.

        The limit of the model itself is known to the engine alone, which refuses longer requests.
        """
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
                f"{ticket.environment} example {ticket.index} has another key here than at the packer: "
                "do both read the same file?",
            )
        if why := why_not_sendable(example):
            detail = (
                f"{ticket.environment} example {ticket.index} can't be sent: {why} (integers have 64 bits; keep what "
                "is large in a file and name the file in a column)"
            )
            raise AttemptError("environment", detail)
        return example

    async def _ask_engines(self, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """Return all completions of a ticket. Retry on another engine after a failure, inside the same attempt.

        P11 (a failed completion is tried again in place; then the whole attempt fails): there are
        `rollout.completion_retries` retries. The engine at fault is avoided for a lease; after a lease
        State no longer names a dead engine. Without this pause a dead engine, which fails at once and has no load,
        would use up the retries of all groups within a second.

        Raises:
            AttemptError: the engine refuses the request, or all retries have failed.
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
        """Return the engine's answer. Wait as long as the engine is alive: a frozen engine keeps connections open.

        Raises:
            EngineError: the client's errors; also if States of the same packer have not named the engine for a
                lease, or name another process under the engine's name.
        """
        request = asyncio.ensure_future(self._client.sample(engine, ticket, prompt_ids))
        try:
            while not (await asyncio.wait({request}, timeout=LIVE_CHECK_SECONDS))[0]:
                if self._engines_there.is_gone(engine.name, engine.boot_id):
                    raise EngineError(f"{engine.name} at {engine.url} is gone: it has stopped beating")
            return request.result()
        finally:
            request.cancel()  # closes the connection, at which the engine stops sampling for it

    async def _choose_engine(self, ticket: Ticket, shunned: Mapping[str, float]) -> EnginePeer:
        """Return the least loaded engine among those allowed to sample this ticket; wait for the first.

        P10 (a ticket is sampled only by an engine with version `min_version` or newer). The attempt's timeout ends the
        wait.
        """
        started = time.monotonic()
        wanted = f"version {ticket.policy or f'{ticket.min_version} or newer'}"
        self._waits_for[ticket.ordinal] = f": no engine{' but those that failed' if shunned else ''} serves {wanted}"
        while True:  # the timeout of `_attempt` ends it
            now = time.monotonic()
            fit = [e for e in self._peers.engines if may_sample(e, ticket) and now >= shunned.get(e.boot_id, 0.0)]
            if fit:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - started, cause="engine_choice")
                # loads in State are a second old: without this rollout's own requests all tickets that come together
                # would go to the same engine
                return min(fit, key=lambda engine: engine.load + self._asked[engine.boot_id])
            await asyncio.sleep(RETRY_SECONDS)

    # --- sending -------------------------------------------------------------------------------------------------

    def _send_groups(self) -> None:
        """Send each group without a living receiver, and again each group not reported for a long time (P13).

        A draining reward actor keeps the groups already sent there. So does a reward actor not heard yet by a just
        started packer. Both outboxes stay open, since closing drops messages still on the way.
        """
        rewards = {f"{peer.name}/{peer.boot_id}": peer for peer in self._peers.rewards}
        for identity in [i for i in self._outboxes if self._is_gone(i)]:
            self._outboxes.pop(identity).close()
            self._arrivals.forget(identity)
        now, full = time.monotonic(), False
        named = set(map(tuple, self._state.scoring.tolist())) if self._state else set()
        # even when no reward actor has room, `_is_to_send` runs for each group: it notes arrivals and timeouts
        for hold, held in self._held.items():
            if held.group is None or held.failure is not None or not self._is_to_send(held, hold in named, now) or full:
                continue
            try:
                held.sent_to = self._send(held.group, rewards, avoid=held.sent_to)
            except MessageTooLargeError as error:
                held.group = None
                self._fail(held, "too_large", str(error))
                continue
            if held.sent_to is None:
                full = True  # no reward actor has room, so none has it for the next group
                continue
            if not held.sent_at:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - held.sampled_at, cause="reward_choice")
            point("rollout.sent")
            held.sent_at = now
            # doubles, since a slow reward actor must not get more work because of its slowness
            held.resend_after = max(2 * held.resend_after, self._config.bus.resend_after)

    def _is_gone(self, identity: str) -> bool:
        """Return whether a reward actor has been absent for a lease, or another process has taken the name."""
        name, _, boot_id = identity.rpartition("/")
        return self._rewards_there.is_gone(name, boot_id)

    def _is_to_send(self, held: _Held, named: bool, now: float) -> bool:
        """Return whether a sampled group is to be sent, judged by State; record arrivals and losses at the receiver.

        A reward actor reports held groups to the packer, and only State passes the reports on. So both limits below
        count only time through which States have come: without a packer no report can arrive.
        """
        told_for = self._rewards_there.told_for
        if named:
            held.named = True
            if held.sent_to is not None:
                self._arrivals.arrived(held.sent_to)
            return False
        if not held.named and told_for(held.accepted_at) > self._config.rollout.group_timeout:
            self._fail_unnamed(held)
            return False
        # never sent, or the holder is dead: at once; no State has to be waited for
        if held.sent_to is None or self._is_gone(held.sent_to):
            return True
        # a receiver that State does not list as alive reports nothing: `_is_gone` decides about it
        if told_for(held.sent_at) <= held.resend_after or not self._is_live(held.sent_to):
            return False
        self._note_lost(held.ticket, held.sent_to, now)
        return True

    def _is_live(self, identity: str) -> bool:
        """Return whether the newest State lists a reward actor as alive, and so includes the groups held there."""
        return self._state is not None and identity.rpartition("/")[2] in self._state.live_rewards

    def _note_lost(self, ticket: Ticket, identity: str, now: float) -> None:
        log.warning(
            "group not arrived; it is sent again, elsewhere if possible, and this reward actor is avoided for a while",
            ordinal=ticket.ordinal,
            peer=identity.rpartition("/")[0],
            avoided_seconds=self._arrivals.lost(identity, now),
        )

    def _fail_unnamed(self, held: _Held) -> None:
        """Fail an attempt: no reward actor has reported the sampled group within the attempt's time."""
        if held.sent_to is not None:
            where = f"sent to {held.sent_to.rpartition('/')[0]}, which has not confirmed it"
        else:
            names = ", ".join(f"{peer.name} at {peer.address}" for peer in self._peers.rewards)
            where = f"not taken by any reward actor ({names or 'there is none'})"
        seconds = self._config.rollout.group_timeout
        self._fail(held, "timeout", f"sampled, and {where}, within {seconds:g} s (rollout.group_timeout)")

    def _send(self, group: RolloutGroup, rewards: dict[str, RewardPeer], avoid: str | None = None) -> str | None:
        """Send a group to the least loaded reward actor with room. Return the receiver's identity, None without room.

        Args:
            group: the sampled group.
            rewards: reward actors open to new groups, by identity.
            avoid: identity to be tried last: the reward actor at which this group was lost before.

        Raises:
            MessageTooLargeError: no reward actor would take a group of this size.
        """
        on_the_way = Counter(held.sent_to for held in self._held.values() if held.sent_to is not None)
        for identity in self._arrivals.order(rewards, on_the_way, time.monotonic(), avoid):
            outbox = self._outbox_to(identity, rewards[identity])
            if outbox is not None and outbox.try_send(group):
                return identity
        return None

    def _outbox_to(self, identity: str, peer: RewardPeer) -> Outbox | None:
        """Return the socket to a reward actor; None if the address can't be used.

        A bad address is the peer's fault, so the error is logged and the other reward actors are used.
        """
        if identity not in self._outboxes:
            try:
                self._outboxes[identity] = Outbox("groups", peer.address, self._config.bus, self.membership.name)
            except ConfigError as error:
                if time.monotonic() >= self._next_address_log:
                    self._next_address_log = time.monotonic() + ADDRESS_LOG_SECONDS
                    log.warning("reward actor left out", peer=identity, detail=str(error))
        return self._outboxes.get(identity)


def may_sample(engine: EnginePeer, ticket: Ticket) -> bool:
    """Return whether an engine serves exactly the ticket's policy, or at least the ticket's version."""
    if ticket.policy is not None:
        return engine.policy == ticket.policy
    return engine.policy.version >= ticket.min_version


def check_answer(engine: EnginePeer, ticket: Ticket, completions: Sequence[SampledCompletion]) -> None:
    """Check an engine's answer for missing completions or fields: a group is sampled as a whole or not at all (P11).

    Raises:
        EngineError: something is missing; the ticket may be tried again.
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
    """Return the message of a sampled group. Offsets and segments count tokens over all completions, joined."""
    offsets = np.cumsum([0, *(len(c.token_ids) for c in completions)])
    segments = [
        (start + offset, lineage, version)
        for c, offset in zip(completions, offsets.tolist(), strict=False)
        for start, lineage, version in c.segments
        # an engine may name a policy for a position behind the last token, which no token of the group has
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
        # every sampled token may be trained; shaping masks tokens later, in the reward actor
        loss_mask=np.ones(tokens.size, np.uint8),
        logprobs=np.concatenate([np.asarray(c.logprobs, np.float32) for c in completions]),
        segments=np.array(segments, np.int64).reshape(-1, 3),
        segment_temperatures=np.full(len(segments), ticket.temperature, np.float32),
    )
