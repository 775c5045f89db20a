"""Watch over collectives of torch, which can't be told to stop.

A collective waits inside torch. Over gloo a lost rank ends the wait with an error, but a rank that no longer responds
does not; over NCCL neither does. So a thread checks in the background if the gang shall still wait.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from actors.learner.ranks import RanksBrokenError
from bus import threads

WATCH_SECONDS = 0.1
"""Seconds between two checks during a collective."""


class CollectiveWatch:
    """Thread for checks during a collective if the gang shall still wait.

    Args:
        shall_wait: raises if not. The error stops the process, since nothing else ends the collective: see
            `bus.threads`.
        abort: ends the collective before the process stops, with garbage in the place of results; None: not needed.
    """

    def __init__(self, shall_wait: Callable[[], object], abort: Callable[[], object] | None = None) -> None:
        self._shall_wait, self._abort = shall_wait, abort
        self._inside, self._aborted = False, False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs.

        Raises:
            RanksBrokenError: a collective in the block has failed, or was ended because the gang shall not wait.
        """
        if self._thread is None:
            self._thread = threads.start("ranks", self._run)
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            # gloo has no error type; a lost rank shows in the message of the transport
            if not isinstance(error, torch.distributed.DistError) and "gloo/transport" not in str(error):
                raise
            raise RanksBrokenError(f"a collective has failed: {error}") from error
        finally:
            self._inside = False
        # an aborted collective returns like any other
        if self._aborted:
            raise RanksBrokenError("collectives were ended, since the gang shall not wait")

    def _run(self) -> None:
        while True:
            threads.mark("trainer.ranks")
            # only inside: between collectives the main loop follows the packer itself
            if self._inside:
                try:
                    self._shall_wait()
                except BaseException:
                    if self._abort is not None:
                        self._aborted = True  # first: the main thread may be back at once
                        self._abort()
                    raise
            time.sleep(WATCH_SECONDS)
