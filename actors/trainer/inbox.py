"""Batches for a trainer rank, read by a thread of its own: the packer never waits for a long step.

Consumes StepBatches from the packer, whole or in parts. Emits, for the heartbeat, the steps whose batch is here. `take`
waits for the batch of a step, up to a time limit; `close` ends the wait.
"""

import threading
from collections.abc import Callable

import structlog

from bus import threads
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.fence import Fence
from bus.parts import Assembly
from schemas.errors import DecodeError
from schemas.messages import BatchPart, StepBatch

log = structlog.get_logger("trainer")


class BatchInbox:
    """Batches for this rank, read by a thread of its own.

    Only batches of the live incarnation are kept. Batches of another run, or of an older packer term than the
    directive's, are dropped (P2: a term fences the directive and StepBatch): the packer of the newer term sends its
    own.

    Args:
        inbox: socket for StepBatches.
        rank: rank of the batches: the number of this process's group of ranks with the same rows.
        on_arrival: called with the steps whose batch is here, in the reading thread.
    """

    def __init__(self, inbox: Inbox, rank: int, on_arrival: Callable[[list[int]], None]) -> None:
        self._inbox, self._rank, self._on_arrival = inbox, rank, on_arrival
        self._by_step: dict[int, StepBatch] = {}
        self._unfinished: dict[int, Assembly] = {}
        """Parts of batches, by step. For the reading thread alone."""
        self._arrived = threading.Condition()
        self._incarnation, self._fence, self._oldest = -1, Fence(), 0
        """Gang whose batches are kept, fence of run and term, and the step taken last."""
        self._stopping = False
        self._thread = threads.make("batches", self._read)

    def start(self) -> None:
        """Start the thread that reads batches."""
        self._thread.start()

    def accept(self, run: str, incarnation: int) -> None:
        """Keep batches of this incarnation from now on; drop all batches kept so far."""
        with self._arrived:
            self._incarnation = incarnation
            self._fence.follow(run, self._fence.term)  # the term as the directive has told it, which comes by `follow`
            self._by_step.clear()
            self._oldest = 0

    def follow(self, run: str, term: int) -> None:
        """Drop batches of older packer terms from now on. Thread-safe."""
        self._fence.follow(run, term)

    def take(self, step: int, timeout: float) -> StepBatch | None:
        """Return the batch of a step; None after `timeout` seconds without it. Drops batches of earlier steps."""
        with self._arrived:
            self._oldest = step
            self._arrived.wait_for(lambda: step in self._by_step or self._stopping, timeout)
            # a batch sent twice may come after its step: it would stay for ever
            for old in [number for number in self._by_step if number < step]:
                del self._by_step[old]
            return self._by_step.get(step)

    @property
    def counts(self) -> EdgeCounts:
        """Counts of the socket."""
        return self._inbox.counts

    @property
    def steps(self) -> list[int]:
        """Steps whose batch is here, in order."""
        with self._arrived:
            return sorted(self._by_step)

    def close(self) -> None:
        """Stop the thread and close the socket."""
        self._stopping = True
        # joined before the socket is closed: a libzmq socket is for one thread at a time
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._inbox.close()

    def _read(self) -> None:
        while not self._stopping:
            threads.mark("trainer.inbox")
            message = self._inbox.receive(0.2)
            if not isinstance(message, StepBatch | BatchPart):
                continue
            if reason := self._fence.refuses(message.run, message.term):
                self._inbox.drop(message, reason)
            elif message.incarnation != self._incarnation:
                continue
            elif message.rank != self._rank:
                log.warning(
                    "batch of another rank dropped", rank=message.rank, expected=self._rank, step=message.step,
                    why="do packer and trainers have the same context_parallel and tensor_parallel?",
                )  # fmt: skip
            else:
                batch = self._joined(message) if isinstance(message, BatchPart) else message
                if batch is not None:
                    self._keep(batch)

    def _joined(self, part: BatchPart) -> StepBatch | None:
        """Return the batch of a part; None until all parts are here."""
        with self._arrived:
            here, oldest = part.step in self._by_step, self._oldest
        # of a batch sent again after its step, or for an earlier gang, the rest never comes
        self._unfinished = {s: one for s, one in self._unfinished.items() if s >= oldest and one.belongs(part)}
        if here or part.step < oldest:
            return None
        assembly = self._unfinished.get(part.step) or Assembly(part)
        self._unfinished[part.step] = assembly
        try:
            batch = assembly.add(part)
        except DecodeError as error:
            self._inbox.refuse(error)
            del self._unfinished[part.step]
            return None
        if batch is not None:
            del self._unfinished[part.step]
        return batch

    def _keep(self, batch: StepBatch) -> None:
        with self._arrived:
            if batch.incarnation != self._incarnation:  # packed for an older gang; the packer sends again
                return
            self._by_step[batch.step] = batch
            self._arrived.notify_all()
        self._on_arrival(self.steps)
