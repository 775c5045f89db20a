"""Arrival of scored groups at the packer: read, digested, and large ones written to a file, before the round sees them.

One thread reads and digests all groups. A second one writes those of `payload_files.MIN_BYTES` or more, so that neither
waits for the other, and the round for neither. The second has a queue of QUEUE_LENGTH groups: when the disk is slower
than the network, the reader stops, the sockets fill, and the reward actors wait.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from actors.ledger import payload_files
from actors.ledger.payload_files import PayloadFiles
from actors.ledger.store import digest_of
from actors.packer.inflow import GroupArrived
from actors.telemetry.spans import SHORT_SECONDS, span
from bus import codec, threads
from bus.data import Inbox

log = structlog.get_logger("packer")

QUEUE_LENGTH = 2
"""Large groups that wait for the writing thread."""
TELL_SECONDS = 10.0
"""Seconds between two log lines about a disk that holds groups up."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at whether the packer ends."""


class Intake:
    """The threads between the inbox and the queue of events.

    Args:
        inbox: socket of scored groups.
        run: identifier of the run; groups of other runs are dropped.
        files: writer of large payloads; None: the ledger stores all payloads.
        put: takes each group on, in any thread.
    """

    def __init__(self, inbox: Inbox, run: str, files: PayloadFiles | None, put: Callable[[GroupArrived], None]) -> None:
        self._inbox, self._run, self._files, self._put = inbox, run, files, put
        self._large: queue.Queue[GroupArrived] = queue.Queue(QUEUE_LENGTH)
        self._ends = False
        self._threads = [threads.make("scored", self._read), threads.make("payloads", self._write)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads. A group on its way in them is lost here, and is sent again by its reward actor."""
        self._ends = True
        for thread in self._threads:
            thread.join(2.0)

    def _read(self) -> None:
        while not self._ends:
            threads.mark("packer.inbox")
            received = self._inbox.receive_with_frames(LOOK_SECONDS)
            if received is None:
                continue
            message, frames = received
            if message.run != self._run:
                self._inbox.drop(message, "foreign_run")
                continue
            payload = [frame.buffer for frame in frames]
            # digested here: of a large group that takes longer than all else, and the round must go on
            with span("digest", least=SHORT_SECONDS):
                arrived = GroupArrived(message, payload, digest_of(payload))
            if self._files is None or codec.num_bytes(payload) < payload_files.MIN_BYTES:
                self._put(arrived)
            else:
                self._hand_over(arrived)

    def _hand_over(self, arrived: GroupArrived) -> None:
        tell_at = time.monotonic() + TELL_SECONDS
        while not self._ends:
            try:
                self._large.put(arrived, timeout=LOOK_SECONDS)
            except queue.Full:
                if time.monotonic() >= tell_at:
                    tell_at = time.monotonic() + TELL_SECONDS
                    log.warning("large groups wait for the disk of ledger.path, and reward actors for them")
                continue
            return

    def _write(self) -> None:
        while not self._ends:
            threads.mark("packer.payloads")
            try:
                arrived = self._large.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            self._put(self._written(arrived))

    def _written(self, arrived: GroupArrived) -> GroupArrived:
        assert self._files is not None
        try:
            with span("write payload"):
                return replace(arrived, place=self._files.append(arrived.frames))
        except OSError as error:
            # the ledger's commit tries to store the payload itself, and waits for room as it does for any other
            log.warning("payload not written to a file; the ledger tries to store it itself", detail=str(error))
            return arrived
