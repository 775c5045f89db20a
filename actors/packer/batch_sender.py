"""Batches of composed steps on their way to the trainer's ranks.

Consumes composed steps and the heartbeats of ranks, both from the machine. Emits a StepBatch per rank and step. Never
waits: a batch without room in the socket, or not confirmed for `bus.resend_after`, is offered again in a later round
(P18: a batch built again is the same). The batches of a large step are built in a thread, so that the round goes on,
and travel in parts.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog

from actors.algorithms.batches import batches_of_step
from actors.ledger import Machine, Step
from actors.packer.payloads import Payloads
from actors.process.fault_points import point
from actors.telemetry.spans import span
from bus import threads
from bus.data import Outbox
from bus.parts import messages_of
from schemas.config import RunConfig
from schemas.errors import ConfigError, ProtocolError
from schemas.messages import BatchPart, ScoredGroup, StepBatch, TrainerHeartbeat, drop_fields

log = structlog.get_logger("packer")

Messages = list[StepBatch | BatchPart]
"""A batch: one message, or its parts."""
ADDRESS_LOG_SECONDS = 5.0
"""Shortest time between two log lines about unusable addresses."""
INLINE_BYTES = 16 << 20
"""Bytes of a step's groups from which a thread builds the batches; it takes 6 ms for a MB."""


class BatchSender:
    """Builder and sender of batches.

    Args:
        config: configuration of the run.
        machine: machine with the composed steps and the gang.
        payloads: scored groups by ordinal.
        on_built: called in a thread when the batches of a large step are built, so that a round sends them.
    """

    def __init__(
        self, config: RunConfig, machine: Machine, payloads: Payloads, on_built: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._machine, self._payloads, self._on_built = config, machine, payloads, on_built
        self.outboxes: dict[str, Outbox] = {}
        """Sockets to trainer ranks, by identity."""
        self._next_address_log = 0.0
        self._sent: dict[tuple[str, int], float] = {}
        """Time at which a rank (by identity) was last sent the batch of a step."""
        self._parts_sent: dict[tuple[str, int], int] = {}
        """Number of messages of a step's batch that a rank (by identity) was sent, while there are more."""
        self._built: dict[tuple[int, int], list[Messages]] = {}
        """Messages of the batches of all ranks, by (step, incarnation)."""
        self._building: dict[tuple[int, int], Future[list[Messages]]] = {}
        """Batches of large steps that the thread builds, or has built."""
        self._builder: threads.Workers | None = None

    @property
    def built(self) -> list[tuple[int, int]]:
        """Step and incarnation of the batches in memory: those that a rank of the gang does not have yet."""
        return list(self._built)

    def send(self, now: float) -> int:
        """Offer each rank its batches. Return the number of batches without room, or not built yet."""
        wanted, pending = self._machine.batches_wanted(), 0
        # batches that all ranks have are of no more use, nor are times of these, or of ranks that are gone
        self._built = {key: of_ranks for key, of_ranks in self._built.items() if not self._machine.has_arrived(*key)}
        still = {(identity, step.step) for identity, _, step in wanted}
        self._sent = {key: at for key, at in self._sent.items() if key in still}
        self._parts_sent = {key: number for key, number in self._parts_sent.items() if key in still}
        for identity, heartbeat, step in wanted:
            sent = self._sent.get((identity, step.step))
            # sent and not confirmed: the batch may have got lost, so it is sent again later
            if sent is not None and now - sent < self._config.bus.resend_after:
                continue
            outbox = self._outbox(identity, heartbeat)
            messages = self._messages(step, heartbeat.rank) if outbox is not None else None
            if outbox is not None and messages and self._offer(outbox, messages, (identity, step.step)):
                self._sent[identity, step.step] = now
                point("packer.between_ranks")
            else:
                pending += 1
        return pending

    def forget_built(self) -> None:
        """Drop all batches, since a fork composes the steps from other groups."""
        self._built.clear()
        self._building.clear()

    def close(self) -> None:
        """Close all sockets."""
        if self._builder is not None:
            self._builder.shutdown(wait=False, cancel_futures=True)
        for outbox in self.outboxes.values():
            outbox.close()

    def _outbox(self, identity: str, heartbeat: TrainerHeartbeat) -> Outbox | None:
        """Return the socket to a trainer rank; None if the address can't be used.

        A bad address is the rank's fault, so the error is logged and the packer goes on.
        """
        if identity not in self.outboxes:
            # sockets of ranks that have left go when the first rank of the next gang comes
            for gone in [i for i in self.outboxes if i not in self._machine.gang.members.values()]:
                self.outboxes.pop(gone).close()
            try:
                self.outboxes[identity] = Outbox("steps", heartbeat.address, self._config.bus, "packer")
            except ConfigError as error:
                if time.monotonic() >= self._next_address_log:
                    self._next_address_log = time.monotonic() + ADDRESS_LOG_SECONDS
                    log.warning("trainer gets no batches", peer=identity, detail=str(error))
        return self.outboxes.get(identity)

    def _offer(self, outbox: Outbox, messages: Messages, key: tuple[str, int]) -> bool:
        """Send the messages of a batch that are not sent yet, while there is room. Return whether all are sent."""
        number = self._parts_sent.pop(key, 0)
        while number < len(messages) and outbox.try_send(messages[number]):
            number += 1
        if number < len(messages):
            self._parts_sent[key] = number
        return number == len(messages)

    def _messages(self, step: Step, rank: int) -> Messages | None:
        """Return the messages of a rank's batch; None while a thread builds it.

        P18: batches are a pure function of payloads, ordinals, ranks and settings.
        """
        key = (step.step, self._machine.gang.incarnation)
        if key not in self._built:
            batches = self._batches(key, step)
            if batches is None:
                return None
            self._built[key] = batches
        return self._built[key][self._config.trainer.row_group_of(rank)]

    def _batches(self, key: tuple[int, int], step: Step) -> list[Messages] | None:
        """Build the batches of a step, or have them built; None until they are."""
        header = {
            "run": self._machine.run,
            "term": self._machine.term,
            "incarnation": self._machine.gang.incarnation,
            "step": step.step,
            **drop_fields(step.dropped),
            "digests": list(step.digests),
        }
        building = self._building.get(key)
        if building is None and self._payloads.num_bytes_of(step.ordinals) >= INLINE_BYTES:
            self._begin(key, step, header)
            return None
        if building is not None:
            if not building.done():
                return None
            del self._building[key]
            with contextlib.suppress(sqlite3.Error, ConfigError, ProtocolError):
                return building.result()
        # a small step, or one whose groups the thread could not read: the ledger's own connection says what is wrong
        return self._build([self._payloads.load(ordinal) for ordinal in step.ordinals], header)

    def _begin(self, key: tuple[int, int], step: Step, header: dict[str, Any]) -> None:
        """Have the thread build the batches of a step."""
        if self._builder is None:
            self._builder = threads.Workers(1, "step-batches")
        # what an older gang wanted is of no more use
        self._building = {k: v for k, v in self._building.items() if k[1] == key[1]}
        groups = self._payloads.loader(step.ordinals)
        self._building[key] = self._builder.submit(lambda: self._build(groups(), header))
        self._building[key].add_done_callback(lambda _: self._on_built())

    def _build(self, groups: list[ScoredGroup], header: dict[str, Any]) -> list[Messages]:
        with span("pack", step=header["step"]):
            return [messages_of(batch) for batch in batches_of_step(groups, self._config, **header)]
