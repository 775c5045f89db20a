"""Batches of composed steps on their way to the trainer's ranks.

Consumes composed steps and the heartbeats of ranks, both from the machine. Emits a StepBatch per rank and step. Never
waits: a batch without room in the socket, or not confirmed for `bus.resend_after`, is offered again in a later round
(P18: a batch built again is the same).
"""

import time

import structlog

from actors.algorithms.batches import batches_of_step
from actors.ledger import Machine, Step
from actors.packer.payloads import Payloads
from actors.process.fault_points import point
from actors.telemetry.spans import span
from bus.data import Outbox
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch, TrainerHeartbeat, drop_fields

log = structlog.get_logger("packer")

ADDRESS_LOG_SECONDS = 5.0
"""Shortest time between two log lines about unusable addresses."""


class BatchSender:
    """Builder and sender of batches.

    Args:
        config: configuration of the run.
        machine: machine with the composed steps and the gang.
        payloads: scored groups by ordinal.
    """

    def __init__(self, config: RunConfig, machine: Machine, payloads: Payloads) -> None:
        self._config, self._machine, self._payloads = config, machine, payloads
        self.outboxes: dict[str, Outbox] = {}
        """Sockets to trainer ranks, by identity."""
        self._next_address_log = 0.0
        self._sent: dict[tuple[str, int], float] = {}
        """Time at which a rank (by identity) was last sent the batch of a step."""
        self._built: dict[tuple[int, int], list[StepBatch]] = {}
        """Batches of all ranks, by (step, incarnation)."""

    @property
    def built(self) -> list[tuple[int, int]]:
        """Step and incarnation of all batches in memory."""
        return list(self._built)

    def send(self, now: float) -> int:
        """Offer each rank its batches. Return the number of batches without room."""
        wanted, pending = self._machine.batches_wanted(), 0
        # times of confirmed batches, and of ranks that are gone, are of no more use
        still = {(identity, step.step) for identity, _, step in wanted}
        self._sent = {key: at for key, at in self._sent.items() if key in still}
        for identity, heartbeat, step in wanted:
            sent = self._sent.get((identity, step.step))
            # sent and not confirmed: the batch may have got lost, so it is sent again later
            if sent is not None and now - sent < self._config.bus.resend_after:
                continue
            outbox = self._outbox(identity, heartbeat)
            if outbox is not None and outbox.try_send(self._batch(step, heartbeat.rank)):
                self._sent[identity, step.step] = now
                point("packer.between_ranks")
            else:
                pending += 1
        return pending

    def forget_built(self) -> None:
        """Drop all batches, since a fork composes the steps from other groups."""
        self._built.clear()

    def close(self) -> None:
        """Close all sockets."""
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

    def _batch(self, step: Step, rank: int) -> StepBatch:
        """Return the batch of a rank (P18: batches are a pure function of payloads, ordinals, ranks and settings)."""
        machine = self._machine
        key = (step.step, machine.gang.incarnation)
        if key not in self._built:
            # a rank may still ask for the step before; older batches are built again if ever needed
            self._built = {k: v for k, v in self._built.items() if k[0] >= step.step - 1 and k[1] == key[1]}
            with span("pack", step=step.step):
                self._built[key] = batches_of_step(
                    [self._payloads.load(ordinal) for ordinal in step.ordinals],
                    self._config,
                    run=machine.run,
                    term=machine.term,
                    incarnation=machine.gang.incarnation,
                    step=step.step,
                    **drop_fields(step.dropped),
                    digests=list(step.digests),
                )
        return self._built[key][rank]
