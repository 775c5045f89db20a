"""A ticket held by a rollout actor from arrival to release, with attempt, group and failure."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import Lane
from schemas import limits
from schemas.messages import AttemptFailure, RolloutGroup, Ticket

log = structlog.get_logger("rollout")

Hold = tuple[int, int]
"""Pair (ordinal, attempt): the key of a ticket, and of the group sampled for the ticket."""


class AttemptError(Exception):
    """Error at the end of an attempt. `reason` is an element of telemetry's ATTEMPT_FAILURES."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class HeldTicket:
    """State of a ticket. All times are monotonic, in seconds; 0.0: not yet."""

    ticket: Ticket
    # kept here also because asyncio itself holds only a weak reference to a running task
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

    @property
    def lane(self) -> Lane:
        """Place of the attempt's spans in the timeline."""
        return "groups", f"{self.ticket.ordinal}.{self.ticket.attempt}"

    @property
    def waits_for_room(self) -> bool:
        """True if the group is sampled and no reward actor has taken it yet."""
        return self.group is not None and self.sent_to is None and self.failure is None

    def fail(self, reason: str, detail: str, metrics: Metrics) -> None:
        """End the attempt with a failure, to be reported to the packer until the ticket's release."""
        ordinal, attempt = self.ticket.ordinal, self.ticket.attempt
        log.warning("attempt failed", ordinal=ordinal, attempt=attempt, reason=reason, detail=detail)
        metrics.count("grpo_rollout_failures_total", reason=reason)
        # cut, since the text goes into every heartbeat until the release
        self.failure = AttemptFailure(ordinal=ordinal, attempt=attempt, reason=reason, detail=limits.cut(detail))


def failures_to_report(held: Iterable[HeldTicket]) -> list[AttemptFailure]:
    """Return the failures of tickets, as many as a heartbeat may carry; the others follow after a release."""
    return [one.failure for one in held if one.failure][: limits.HEARTBEAT_FAILURES]
