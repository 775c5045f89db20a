"""`actors samples RUN --follow`: new samples as they come, of a run in any state, until it is done or has failed.

A run that is stopped, dead or not started yet may continue at any time, so the command waits for it, and says so.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actors.ops.compare.figures import outcome_of
from actors.ops.previous_run import read_left
from actors.ops.screens.render import printable
from actors.packer.progress import ALIVE_SECONDS
from actors.telemetry.samples import group_text, newest_groups
from actors.telemetry.samples_tail import SamplesTail
from schemas.config import load_config
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError

POLL_SECONDS = 0.25
"""Seconds between two looks at the samples."""
OUTCOME_SECONDS = 1.0
"""Seconds between two looks at the state of the run."""
EXIT_LEFT, EXIT_FAILED = 0, 1


def follow_samples(output: Path, num_completions: int, characters: int) -> int:
    """Print the newest step's groups, then each group when it is recorded; words about the run go to stderr.

    Args:
        output: folder of the run; it need not be there yet.
        num_completions: completions shown of a group.
        characters: most characters shown of a message of a conversation.

    Returns:
        0 after the end of a run that is done, and after Ctrl-C; 1 if the run has failed.

    Raises:
        ConfigError: there is neither such a folder nor the one above, or the run's files can't be read.
    """
    # the folder of a run that starts later may be missing, but a name without a place for it is mistyped
    if not output.is_dir() and not output.parent.is_dir():
        raise ConfigError(
            f"{output}: is not there, and neither is {output.parent}, so no run is going to start there; give the "
            "output_dir of a run"
        )
    # a shell starts background jobs with SIGINT ignored; `kill -INT` shall end them all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)
    follower = Follower(output)
    is_first = True
    try:
        while True:
            for record in follower.turn():
                text = group_text(record, num_completions, characters)
                print(text if is_first else f"\n{text}", flush=True)
                is_first = False
            if follower.news:
                print(printable(follower.news), file=sys.stderr, flush=True)
            if follower.has_ended:
                return EXIT_FAILED if follower.outcome.startswith("failed") else EXIT_LEFT
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return EXIT_LEFT
    finally:
        follower.close()


class Follower:
    """Reader of a run's samples and state, look by look.

    Args:
        output: folder of the run.
        outcome: function that tells the state of the run in an output_dir; None: `outcome_seen`.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        output: Path,
        outcome: Callable[[Path], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output, self._outcome_of, self._clock = output, outcome or outcome_seen, clock
        self._tail: SamplesTail | None = None
        self._next = clock()
        self.outcome = ""
        """State of the run at the last look, as `outcome_of`."""
        self.news = ""
        """Change of the state that the last turn has found, in words; empty if there is none."""

    @property
    def has_ended(self) -> bool:
        """True if no more samples will come: the run is done or has failed."""
        return self.outcome.startswith(("done", "failed"))

    def turn(self) -> Iterator[dict[str, Any]]:
        """Yield the groups recorded since the last turn; the first turn yields all of the newest step."""
        # before the samples: all lines of a run that has ended are there, and are yielded in this turn
        self._look()
        if self._tail is not None:
            yield from self._tail.new()
            return
        # a line that comes between the two is in both
        self._tail = SamplesTail(self._output)
        newest = newest_groups(self._output)
        yield from newest
        shown = {(record["step"], record["ordinal"]) for record in newest}
        yield from (record for record in self._tail.new() if (record["step"], record["ordinal"]) not in shown)

    def close(self) -> None:
        """Close the files."""
        if self._tail is not None:
            self._tail.close()

    def _look(self) -> None:
        self.news = ""
        if self._clock() < self._next:
            return
        self._next = self._clock() + OUTCOME_SECONDS
        before, self.outcome = self.outcome, self._outcome_of(self._output)
        # a run that is there needs no word at the first look
        if self.outcome != before and (before or self.outcome != "running"):
            self.news = words(self._output, self.outcome)


def outcome_seen(output: Path) -> str:
    """Return the state of a run as `outcome_of`; `running` also if a packer has just written from another machine.

    The lock of such a run may be out of sight here.

    Raises:
        ConfigError: the run's files can't be read.
    """
    outcome = outcome_of(output)
    if outcome != "dead":
        return outcome
    written = read_left(load_config(output / RESOLVED), "progress.json").get("time", 0.0)
    return "running" if time.time() - written < ALIVE_SECONDS else outcome


def words(output: Path, outcome: str) -> str:
    """Return the state of a run as a sentence, with what the command does now."""
    if outcome == "running":
        return f"{output}: the run continues"
    if outcome.startswith(("done", "failed")):
        return f"{output}: {outcome}"
    if outcome == "not started":
        return f"{output}: no run has started here yet; waiting for it (Ctrl-C leaves)"
    return f"{output}: the run is {outcome}; waiting until it continues (Ctrl-C leaves)"
