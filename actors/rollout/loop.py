"""The rollout actor: tickets in, sampled groups out.

Consumes tickets, releases and addresses from the directive. Emits RolloutGroups to reward actors, and holds and
failures in its heartbeats. Waits on an engine with the ticket's version, on the engine's answer, and on a reward actor
with room. Each wait ends with the group's deadline, a release, or a directive with a new peer. P13 (senders keep a
group until its release): after the death of any process the group can be sent again.
"""

import asyncio
import contextlib
import time
from typing import Any

import numpy as np
import structlog

from actors.process.fault_points import point
from actors.process.membership import Drain, Membership
from actors.rollout.delivery import Delivery
from actors.rollout.group import GroupSampler
from actors.rollout.held import AttemptError, HeldTicket, Hold, failures_to_report
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import in_lane, record, span
from bus.counts import EdgeCounts
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutDirective, RolloutHeartbeat

log = structlog.get_logger("rollout")

COALESCE_SECONDS = 0.003
"""Seconds between a wake-up and the next turn of the loop: all events of this time share a heartbeat."""
IDLE_SECONDS = 0.5
"""Longest pause of the loop. The directive is looked at this often, even without any event."""
RETRY_SECONDS = 0.05
"""Longest pause of the loop while a group waits for a reward actor with room."""


class RolloutActor:
    """Sampler of groups: asks engines for completions and sends each group to a reward actor.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_rollout_*` metrics.
        sampler: sampler of groups, with the engines that this actor asks.
    """

    def __init__(self, config: RunConfig, name: str, metrics: Metrics, sampler: GroupSampler) -> None:
        self._config, self._metrics = config, metrics
        self.held: dict[Hold, HeldTicket] = {}
        """Tickets from arrival to release."""
        self._sampler, self.engines = sampler, sampler.engines
        self.delivery = Delivery(config, name, metrics, self.held)
        self._drain = Drain()
        self._directive: RolloutDirective | None = None
        self._unusable: ConfigError | None = None
        """Configuration error found while sampling; raised by the main loop, which ends the process."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._idle_since: float | None = None
        """Monotonic time since which no ticket is sampled; None while one is."""
        self._slots_said = -1  # below any number of slots: the first report counts as an increase
        self.membership = Membership(config, RolloutHeartbeat, name, on_directive=lambda _: self._wake_up())
        self.name, self.liveness = name, self.membership.liveness
        self._moves = 0
        """Moves of the network (`Membership.num_moves`) after which connections have been made again."""

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        # a copy of the values, since the reporter's thread reads this while the loop adds outboxes
        return [self.membership.counts, *(outbox.counts for outbox in list(self.delivery.outboxes.values()))]

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
        self._wake_up()

    async def _main(self, metrics_url: str) -> None:
        self._loop = asyncio.get_running_loop()
        # closed last, so that the last heartbeat follows the last group
        with contextlib.closing(self.membership):
            async with self._sampler:
                self._report(starting={"phase": "running", "metrics_url": metrics_url})
                try:
                    while not self.follow():
                        await self._pause()
                finally:
                    for held in self.held.values():
                        if held.task is not None:
                            held.task.cancel()

    async def _pause(self) -> None:
        """Wait for the next event: a directive, the end of an attempt, or the drain."""
        waiting_to_send = any(held.waits_for_room for held in self.held.values())
        try:
            await asyncio.wait_for(self._wake.wait(), RETRY_SECONDS if waiting_to_send else IDLE_SECONDS)
        except TimeoutError:
            return
        # the event stays set meanwhile, so that all events of this time end in the same turn
        await asyncio.sleep(COALESCE_SECONDS)
        self._wake.clear()

    def _wake_up(self) -> None:
        if self._loop is not None:
            # an asyncio.Event is not thread-safe, and the control client calls this from its own thread. RuntimeError:
            # the loop has just been closed, so nothing waits for the event
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    def follow(self) -> bool:
        """Follow the newest directive: one iteration of the main loop. Return True when the actor shall exit.

        Raises:
            ConfigError: an attempt has shown that the configuration can't work.
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        if self._unusable is not None:
            raise self._unusable
        directive = self.membership.latest()
        if isinstance(directive, RolloutDirective):
            # each directive counts once: absence is measured by directives, not by looks
            if directive is not self._directive:
                self._directive, now = directive, time.monotonic()
                self.engines.note(now, directive)
                self.delivery.note(now, directive)
            for ordinal, attempt in directive.release.tolist():
                released = self.held.pop((ordinal, attempt), None)
                # still sampling: a copy elsewhere was faster, or the run needs the group no more
                if released is not None and released.task is not None:
                    released.task.cancel()
            for ticket in directive.tickets:
                # the directive repeats a ticket until a heartbeat has named it
                if (key := (ticket.ordinal, ticket.attempt)) not in self.held:
                    held = self.held[key] = HeldTicket(ticket)
                    point("rollout.ticket")
                    held.task = asyncio.create_task(self.attempt(directive.run, held))
        if self.membership.num_moves != self._moves:
            self._moves = self.membership.num_moves
            self.delivery.connect_again()
        self.delivery.send()
        self._note_idle()
        self._report()
        done = directive is not None and directive.phase == "done"
        return done or self._drain.may_leave(holds_work=bool(self.held))

    def _note_idle(self) -> None:
        """Record the time without a ticket to sample: the rollout then waits for the packer's admission."""
        now, samples = time.monotonic(), any(held.task is not None for held in self.held.values())
        if samples and self._idle_since is not None:
            record("wait for tickets", self._idle_since, now, waits=True)
        self._idle_since = None if samples else self._idle_since or now

    async def attempt(self, run: str, held: HeldTicket) -> None:
        """Sample a ticket. Every outcome becomes a group or a failure reported to the packer.

        A ConfigError is left to the main loop instead, which ends the process.
        """
        ticket, timeout = held.ticket, self._config.rollout.group_timeout
        facts: dict[str, Any] = {
            "ordinal": ticket.ordinal,
            "purpose": ticket.purpose,
            "environment": ticket.environment,
        }
        try:
            with in_lane(*held.lane), span("group", **facts):
                async with asyncio.timeout(timeout):
                    held.group = await self._sampler.sample(run, ticket)
            point("rollout.sampled")
            held.sampled_at = time.monotonic()
            self._metrics.count("grpo_rollout_groups_total", purpose=ticket.purpose)
            self._metrics.count("grpo_rollout_generated_tokens_total", held.group.num_sampled)
        except TimeoutError:
            waited = self.engines.take_wait(ticket.ordinal)
            held.fail("timeout", f"not sampled within {timeout:g} s (rollout.group_timeout){waited}", self._metrics)
        except AttemptError as error:
            held.fail(error.reason, str(error), self._metrics)
        except ConfigError as error:
            self._unusable = error
        except Exception as error:
            log.exception("attempt failed", ordinal=ticket.ordinal)
            held.fail("internal", f"{type(error).__name__}: {error}", self._metrics)
        finally:
            held.task = None
            self.engines.take_wait(ticket.ordinal)
            # the group leaves, or the failure is told, in the next turn
            self._wake.set()

    def _report(self, starting: dict[str, str] | None = None) -> None:
        sampling = sum(held.task is not None for held in self.held.values())
        slots = 0 if self._drain else max(0, self._config.rollout.max_concurrent_groups - sampling)
        fields = {
            "free_slots": slots,
            # tickets that have failed are named too, until the packer releases them
            "holds": np.array(sorted(self.held), np.int64).reshape(-1, 2),
            "failures": failures_to_report(self.held.values()),
        }
        self._metrics.set("grpo_rollout_held_groups", len(self.held))
        self._sampler.note_workers()
        if starting is not None:
            self.membership.start(**fields, **starting)
            return
        # a heartbeat at once for news that the packer can use now: more slots, the drain, a failure
        draining = bool(self._drain) and self._slots_said > 0
        urgent = slots > self._slots_said or draining or bool(fields["failures"])
        self._slots_said = slots
        self.membership.report(urgent=urgent, phase=self._drain.phase, **fields)
