"""Runs of a queue as processes: each is an `actors up` of its own, started when an earlier one has ended.

    actors up a.yaml b.yaml ──▶ actors up a.yaml ──▶ actors     one after the other, or `--at-once` N

A failed run does not end the queue. The first signal stops the runs under way in order and starts no further one; a
second one is passed on too, and ends these runs at once. The queue keeps no state: what a run has reached is in its
output_dir, so the same command continues stopped and failed runs, and finds the finished ones done. If the queue dies,
the kernel ends its runs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from types import FrameType
from typing import IO

from actors.ops.compare.figures import figures_of
from actors.ops.compare.words import results
from actors.ops.queue.collisions import collisions
from actors.ops.queue.plan import QueuedRun
from actors.ops.up.child import PROGRAM, how_it_ended
from actors.process.devices import ORDER, VISIBLE, Gpu, visible_gpus
from actors.process.exits import EXIT_CONFIG, EXIT_DONE
from actors.process.hangup import let_go_of_terminal, stop_at_hangup
from bus import threads
from schemas.errors import ConfigError

EXIT_FAILED = 1
POLL_SECONDS = 0.1
READ_SECONDS = 1.0
"""Time for the last lines of a run that has ended; a process left behind could keep the pipe open."""
MOST_ERRORS = 50
"""Number of last lines of stderr that are kept for the reason of a failure."""
FAILED = "run failed: "
"""Start of the line on stderr with the reason of a failure; a refused configuration has its problems alone."""
NO_REASON = ("warning:", "stopping", "waiting")
"""Starts of lines on stderr that tell no reason of a failure."""


@dataclass
class Started:
    """Run under way, as a process.

    Args:
        number: number of the run in the queue, from 1.
        run: the run.
        slot: place among the runs at the same time.
        process: its `actors up`.
    """

    number: int
    run: QueuedRun
    slot: int
    process: "subprocess.Popen[str]"
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    """Last lines of stderr."""
    readers: list[Thread] = field(default_factory=list)
    num_told: int = 0
    """Number of signals of the queue that it has been sent."""

    @property
    def prefix(self) -> str:
        """Start of each line of a run that shares the terminal with others."""
        return f"[{self.number} {self.run.config.output.name}] "

    def reason(self) -> str:
        """Return the line on stderr that tells why the run has failed; empty without one."""
        lines = [line.strip() for line in self.errors]
        lines = [line for line in lines if line and not line.startswith(NO_REASON)]
        return next((line for line in lines if line.startswith(FAILED)), lines[0] if lines else "").removeprefix(FAILED)


def run_queue(runs: Sequence[QueuedRun], at_once: int, *, fork: bool = False) -> int:
    """Run a queue, print the results side by side, and return the exit code.

    The code is 0 if all runs are done, 1 if one has failed, 128 + signal if a signal has stopped the queue.

    Args:
        runs: runs, in order.
        at_once: number of runs at the same time.
        fork: True to pass `--fork` to each run.

    Raises:
        ConfigError: two runs would collide, or a run at a time has no GPU.
    """
    if problems := collisions(runs, at_once):
        raise ConfigError(*problems)
    queue = Queue(runs, slots_of(runs, at_once), fork=fork)
    code = queue.run()
    found = [figures_of(run.config.output, queue.outcomes.get(number)) for number, run in enumerate(runs, 1)]
    print("\n".join(["", *results(found)]), flush=True)
    return code


def slots_of(runs: Sequence[QueuedRun], at_once: int) -> list[dict[str, str]]:
    """Return the variables of each place for a run: with several places, an equal share of this machine's GPUs each.

    Raises:
        ConfigError: there are fewer GPUs than places.
    """
    slots = min(at_once, len(runs))
    computing = [run for run in runs if run.config.model.device != "cpu" and run.config.inference.engine.loads_model]
    gpus = visible_gpus() if slots > 1 and computing else []
    if not gpus:  # none, or this machine can't count them: each process chooses by itself
        return [{}] * slots
    if len(gpus) < slots:
        raise ConfigError(
            f"--at-once: {slots} runs need a GPU each, and this machine has {len(gpus)}; lower it, or set model.device "
            "to cpu"
        )
    return [_variables(share) for share in shares(gpus, slots)]


def shares(gpus: Sequence[Gpu], slots: int) -> list[Sequence[Gpu]]:
    """Return an equal share of GPUs for each place; GPUs that do not divide evenly are left over."""
    each = len(gpus) // slots
    return [gpus[slot * each : (slot + 1) * each] for slot in range(slots)]


def _variables(gpus: Sequence[Gpu]) -> dict[str, str]:
    found = {VISIBLE: ",".join(gpu.entry for gpu in gpus)}
    # else the entries are indices in the order that holds already
    return found if VISIBLE in os.environ else found | {ORDER: "PCI_BUS_ID"}


class Queue:
    """Processes of a queue.

    Args:
        runs: runs, in order.
        slots: variables of the environment of each place; as many runs go on at the same time.
        fork: True to pass `--fork` to each run.
    """

    def __init__(self, runs: Sequence[QueuedRun], slots: Sequence[Mapping[str, str]], *, fork: bool = False) -> None:
        self._runs, self._slots, self._fork = runs, slots, fork
        self._under: list[Started] = []
        self._signals: list[int] = []
        """Signals that have come, to be sent on to each run."""
        self.outcomes: dict[int, str] = {}
        """Outcomes in words, of runs that have not ended well; by number."""

    def run(self) -> int:
        """Run until all runs have ended, or a signal has stopped the queue. Return the exit code."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        stop_at_hangup(self._on_signal)
        waiting = deque(enumerate(self._runs, 1))
        while waiting or self._under:
            if self._signals:
                self.outcomes |= dict.fromkeys((number for number, _ in waiting), "not started")
                waiting.clear()
            for one in self._under:
                for number in self._signals[one.num_told :]:
                    one.process.send_signal(number)
                    one.num_told += 1
            free = [slot for slot in range(len(self._slots)) if slot not in {one.slot for one in self._under}]
            for slot in free[: len(waiting)]:
                self._start(*waiting.popleft(), slot)
            for one in [one for one in self._under if one.process.poll() is not None]:
                self._under.remove(one)
                self._ended(one, len(waiting))
            time.sleep(POLL_SECONDS)
        if self._signals:
            return 128 + self._signals[0]
        return EXIT_FAILED if self.outcomes else EXIT_DONE

    def _start(self, number: int, run: QueuedRun, slot: int) -> None:
        print(f"run {number} of {len(self._runs)}: {run.title}", flush=True)
        words = ["up", str(run.path), *run.overrides, "--parent", str(os.getpid()), *(["--fork"] if self._fork else [])]
        alone = len(self._slots) == 1
        process = subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            # alone it has the terminal, for its screen
            stdout=None if alone else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | self._slots[slot],
            # Ctrl-C of a terminal reaches the queue alone, which passes it on once
            start_new_session=True,
        )
        one = Started(number, run, slot, process)
        prefix = "" if alone else one.prefix
        for stream, target, kept in ((process.stdout, sys.stdout, None), (process.stderr, sys.stderr, one.errors)):
            if stream is not None:
                one.readers.append(threads.start_helper("queue-output", _pass_on, stream, target, prefix, kept))
        self._under.append(one)

    def _ended(self, one: Started, num_left: int) -> None:
        for reader in one.readers:
            reader.join(READ_SECONDS)
        code = one.process.returncode
        if code == EXIT_DONE:
            return
        if self._signals and code in {128 + number for number in self._signals}:
            self.outcomes[one.number] = "stopped"
            return
        how = "refused" if code == EXIT_CONFIG else "failed" if code == EXIT_FAILED else f"ended {how_it_ended(code)}"
        reason = one.reason()
        self.outcomes[one.number] = f"{how}: {reason}" if reason else how
        further = f"; {num_left} more to start" if num_left and not self._signals else ""
        print(f"run {one.number} of {len(self._runs)}: {one.run.title}: {how}{further}", file=sys.stderr, flush=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        # sent on by the loop, so that a run that starts in this very moment gets it once
        self._signals.append(number)


def _pass_on(stream: IO[str], target: IO[str], prefix: str, kept: deque[str] | None) -> None:
    """Pass the lines of a run on, until its end; keep the last ones in `kept`."""
    try:
        for line in stream:
            if kept is not None:
                kept.append(line)
            # a closed terminal, or a pipe without a reader, must not end a run
            with contextlib.suppress(OSError):
                target.write(f"{prefix}{line}")
                target.flush()
    except Exception as error:  # noqa: BLE001 - the run goes on; what it writes is missing here
        print(f"{prefix}output can't be read any more: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # a pipe that nobody reads would stop the run once it is full; a closed one does not
        stream.close()
