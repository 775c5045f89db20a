"""Batches for a trainer rank, read by a thread of its own: the packer never waits for a long step.

Consumes StepBatches from the packer. Emits, for the heartbeat, the steps whose batch is here. `take` waits for the
batch of a step, up to a time limit; `close` ends the wait.
"""

import threading
from collections.abc import Callable

from bus import threads
from bus.counts import EdgeCounts
from bus.data import Inbox
from bus.fence import Fence
from schemas.messages import StepBatch


class BatchInbox:
    """Batches for this rank, read by a thread of its own.

    Only batches of the live incarnation are kept. Batches of another run, or of an older packer term than the
    directive's, are dropped (P2: a term fences the directive and StepBatch): the packer of the newer term sends its
    own.

    Args:
        inbox: socket for StepBatches.
        rank: rank of this process.
        on_arrival: called with the steps whose batch is here, in the reading thread.
    """

    def __init__(self, inbox: Inbox, rank: int, on_arrival: Callable[[list[int]], None]) -> None:
        self._inbox, self._rank, self._on_arrival = inbox, rank, on_arrival
        self._by_step: dict[int, StepBatch] = {}
        self._arrived = threading.Condition()
        self._incarnation, self._fence = -1, Fence()
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

    def follow(self, run: str, term: int) -> None:
        """Drop batches of older packer terms from now on. Thread-safe."""
        self._fence.follow(run, term)

    def take(self, step: int, timeout: float) -> StepBatch | None:
        """Return the batch of a step; None after `timeout` seconds without it. Drops batches of earlier steps."""
        with self._arrived:
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
            if isinstance(message, StepBatch) and (reason := self._fence.refuses(message.run, message.term)):
                self._inbox.drop(message, reason)
            elif isinstance(message, StepBatch) and message.rank == self._rank:
                with self._arrived:
                    if message.incarnation != self._incarnation:  # packed for an older gang; the packer sends again
                        continue
                    self._by_step[message.step] = message
                    self._arrived.notify_all()
                self._on_arrival(self.steps)
