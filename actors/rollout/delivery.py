"""Delivery of sampled groups to reward actors.

Consumes sampled groups, and directives with all reward actors, signs of life and held groups. Emits RolloutGroups.
Waits for nothing: `send` is called in each iteration of the main loop. P13 (senders keep a group until release): a
group is sent again after the receiver's death, or without a report by the receiver. So no copy on the wire is the only
copy.
"""

import time
from collections import Counter
from collections.abc import Mapping

import structlog

from actors.process.fault_points import point
from actors.rollout.held import HeldTicket, Hold
from actors.rollout.presence import Presence
from actors.rollout.reward_choice import RewardChoice
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import record
from bus.data import Outbox
from schemas.config import RunConfig
from schemas.errors import ConfigError, MessageTooLargeError
from schemas.messages import RewardPeer, RolloutDirective, RolloutGroup

log = structlog.get_logger("rollout")

ADDRESS_LOG_SECONDS = 5.0
"""Shortest time between two log lines about unusable addresses."""


class Delivery:
    """Sender of groups.

    Args:
        config: configuration of the run.
        name: name of the actor, the sender of its groups.
        metrics: destination of the `grpo_rollout_*` metrics.
        held: tickets of the actor, with groups; `send` records sendings and failures there.
    """

    def __init__(self, config: RunConfig, name: str, metrics: Metrics, held: Mapping[Hold, HeldTicket]) -> None:
        self._bus, self._group_timeout = config.bus, config.rollout.group_timeout
        self._name, self._metrics, self._held = name, metrics, held
        self.outboxes: dict[str, Outbox] = {}
        """Sockets to reward actors, by identity."""
        self.reward_choice = RewardChoice(config.bus.resend_after)
        """Reward actors at which groups have not arrived."""
        self._presence = Presence(config.bus.lease)
        self._rewards: list[RewardPeer] = []
        """Reward actors that accept new groups, by the newest directive."""
        self._live: set[str] = set()
        """Boot ids of all live reward actors, by the newest directive."""
        self._arrived: set[Hold] = set()
        """Groups that a live reward actor has reported, by the newest directive."""
        self._next_address_log = 0.0

    def note(self, now: float, directive: RolloutDirective) -> None:
        """Take the reward actors of a directive, once for each directive.

        While the packer is gone no directive comes, so no absence grows.
        """
        self._rewards, self._live = directive.rewards, set(directive.live_rewards)
        self._arrived = {(ordinal, attempt) for ordinal, attempt in directive.scoring.tolist()}
        self._presence.note(now, directive.term, self._live, self._rewards)

    def connect_again(self) -> None:
        """Drop all connections, which are dead, and what was on its way: it is sent again at once."""
        for outbox in self.outboxes.values():
            outbox.close()
        self.outboxes.clear()
        for held in self._held.values():
            if not held.named:
                held.sent_to = None

    def send(self) -> None:
        """Send each group without a living receiver, and again each group not reported for a long time (P13).

        A draining reward actor keeps the groups already sent there. So does a reward actor not heard yet by a just
        started packer. Both outboxes stay open, since closing drops messages still on the way.
        """
        rewards = {f"{peer.name}/{peer.boot_id}": peer for peer in self._rewards}
        for identity in [i for i in self.outboxes if self._is_gone(i)]:
            self.outboxes.pop(identity).close()
            self.reward_choice.forget(identity)
        now, full = time.monotonic(), False
        # even when no reward actor has room, `_is_to_send` runs for each group: it notes arrivals and timeouts
        for hold, held in self._held.items():
            if (
                held.group is None
                or held.failure is not None
                or not self._is_to_send(held, hold in self._arrived, now)
                or full
            ):
                continue
            try:
                held.sent_to = self._send(held.group, rewards, avoid=held.sent_to)
            except MessageTooLargeError as error:
                held.group = None
                held.fail("too_large", str(error), self._metrics)
                continue
            if held.sent_to is None:
                # no reward actor has room, so none has it for the next group
                full = True
                continue
            if not held.sent_at:
                self._metrics.count("grpo_rollout_wait_seconds_total", now - held.sampled_at, cause="reward_choice")
                record("wait for a reward actor", held.sampled_at, now, waits=True, lane=held.lane)
            point("rollout.sent")
            held.sent_at = now
            # doubles, since a slow reward actor must not get more work because of its slowness
            held.resend_after = max(2 * held.resend_after, self._bus.resend_after)

    def _is_gone(self, identity: str) -> bool:
        """Return whether a reward actor has been absent for a lease, or another process has taken the name."""
        name, _, boot_id = identity.rpartition("/")
        return self._presence.is_gone(name, boot_id)

    def _is_to_send(self, held: HeldTicket, named: bool, now: float) -> bool:
        """Return whether the directive lets a sampled group be sent; record arrivals and losses at the receiver.

        A reward actor reports held groups to the packer, and only the directive passes the reports on. So both limits
        below count only time through which directives have come: without a packer no report can arrive.
        """
        told_for = self._presence.told_for
        if named:
            held.named = True
            if held.sent_to is not None:
                self.reward_choice.arrived(held.sent_to)
            return False
        if not held.named and told_for(held.accepted_at) > self._group_timeout:
            if held.sent_to is not None:
                where = f"sent to {held.sent_to.rpartition('/')[0]}, which has not confirmed it"
            else:
                names = ", ".join(f"{peer.name} at {peer.address}" for peer in self._rewards)
                where = f"not taken by any reward actor ({names or 'there is none'})"
            text = f"sampled, and {where}, within {self._group_timeout:g} s (rollout.group_timeout)"
            held.fail("timeout", text, self._metrics)
            return False
        # never sent, or the holder is dead: at once; no directive has to be waited for
        if held.sent_to is None or self._is_gone(held.sent_to):
            return True
        # a receiver that the directive does not list as alive reports nothing: `_is_gone` decides about it
        is_live = held.sent_to.rpartition("/")[2] in self._live
        if told_for(held.sent_at) <= held.resend_after or not is_live:
            return False
        log.warning(
            "group not arrived; it is sent again, elsewhere if possible, and this reward actor is avoided for a while",
            ordinal=held.ticket.ordinal,
            peer=held.sent_to.rpartition("/")[0],
            avoided_seconds=self.reward_choice.lost(held.sent_to, now),
        )
        return True

    def _send(self, group: RolloutGroup, rewards: dict[str, RewardPeer], avoid: str | None = None) -> str | None:
        """Send a group to the least loaded reward actor with room. Return the receiver's identity, None without room.

        Args:
            group: the sampled group.
            rewards: reward actors open to new groups, by identity.
            avoid: identity to be tried last: the reward actor at which this group was lost before.

        Raises:
            MessageTooLargeError: no reward actor would take a group of this size.
        """
        # loads in the directive are about a second old: groups sent since count as well
        on_the_way = Counter(held.sent_to for held in self._held.values() if held.sent_to is not None)
        for identity in self.reward_choice.order(rewards, on_the_way, time.monotonic(), avoid):
            if identity not in self.outboxes:
                try:
                    self.outboxes[identity] = Outbox("groups", rewards[identity].address, self._bus, self._name)
                except ConfigError as error:
                    # a bad address is the peer's fault: the error is logged, and the other reward actors are used
                    if time.monotonic() >= self._next_address_log:
                        self._next_address_log = time.monotonic() + ADDRESS_LOG_SECONDS
                        log.warning("reward actor left out", peer=identity, detail=str(error))
                    continue
            if self.outboxes[identity].try_send(group):
                return identity
        return None
