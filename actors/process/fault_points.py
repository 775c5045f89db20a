"""Fault points: places in the code where a test can harm this process, as in `point("packer.committed")`.

Without GRPO_FAULTS in the environment a point costs a comparison. Otherwise GRPO_FAULTS names a folder, where a file
`ACTOR@POINT` (`packer-0@packer.committed`) arms a point. The next process to reach the point renames the file to
`….hit` and follows the file's text:

    SIGKILL          name of a signal: the process sends the signal to itself
    RuntimeError     name of an exception: raised in the thread at the point
    sleep 3.5        the thread at the point sleeps for so many seconds

So a test chooses the state in which a process is harmed. `POINTS` are states of actors. `THREADS` are points of loops,
passed in each turn (`bus.threads.mark`). `WORK` are points of threads that do a single piece of work.
"""

import builtins
import os
import signal
import time
from pathlib import Path

from bus import threads

_folder = Path(os.environ["GRPO_FAULTS"]) if os.environ.get("GRPO_FAULTS") else None
_actor = ""

POINTS = {
    "rollout.ticket": "holds a ticket and samples nothing yet",
    "rollout.sampled": "has a sampled group and has not sent it",
    "rollout.sent": "has sent a group",
    "reward.taken": "has read a group and not scored it",
    "reward.scored": "between score and send",
    "reward.sent": "has sent a scored group",
    "packer.taken": "has read groups and committed nothing",
    "packer.committed": "between commit and the directive",
    "packer.between_ranks": "between two ranks' batches",
    "packer.told": "has sent directives and batches",
    "trainer.batch": "has its batch and has not begun the step",
    "trainer.gradients": "inside a step, gradients computed and not yet summed over the ranks",
    "trainer.updated": "inside a step, weights updated and not published",
    "trainer.published": "version published and not yet told",
    "trainer.turn_ends": "has given the device back and not yet told: with `up.colocate: turns`",
    "checkpoint.written": "inside a checkpoint write: files there, checksums not",
    "checkpoint.complete": "checkpoint whole and not renamed",
    "checkpoint.renamed": "checkpoint named and not yet told",
    "inference.request": "has taken a request",
    "inference.receiving": "inside a weight update of the rendezvous channel",
    "inference.received": "inside a weight load: weights received and not switched",
    "inference.loaded": "weights switched and not yet told",
    "inference.before_wake": "has told of its turn and not woken: with `up.colocate: turns`",
    "inference.rests": "has given the device back and not yet told: with `up.colocate: turns`",
}
"""All points of actors, and the state of a process there."""

THREADS = {
    "control.client": "sends heartbeats and receives directives: every actor but the packer",
    "control.server": "receives heartbeats and answers them: the packer",
    "name": "resolves the packer's name: every actor but the packer, over tcp where `bus.control` has a name",
    "unfinished": "looks for messages without end: who binds data sockets over tcp",
    "log": "writes log lines: every actor that has had something to say",
    "metrics": "accepts connections to /metrics: every actor",
    "authenticator": "lets peers in by their keys: every actor, over tcp with keys",
    "keys": "looks at the files of keys: every actor, over tcp with keys",
    "packer.inbox": "reads scored groups",
    "packer.payloads": "writes large payloads to files",
    "packer.backup": "copies the ledger",
    "packer.record": "writes the files of output_dir",
    "trainer.inbox": "reads batches",
    "trainer.weights": "broadcasts weights: rank 0, with the rendezvous channel",
    "trainer.ranks": "looks whether another rank is still to be waited for: ranks that share out the weights",
    "reward.loop": "runs async reward functions",
    "inference.http": "serves completions",
    "inference.engine": "decodes: the embedded engine",
    "inference.relay": "talks to a server of others: vLLM and SGLang",
}
"""Points of threads with the lifetime of the actor, and the work of each thread."""
LOOPS = ("reward.loop", "inference.http", "inference.relay")
"""Points of threads with an event loop. Only SystemExit ends such a thread: asyncio logs any other exception of a
callback and goes on."""

WORK = {
    "reward.function": "calls a reward function",
    "trainer.filler": "fills a bucket with weights: rank 0, with the rendezvous channel",
    "trainer.meeting": "meets the other ranks",
    "weights.meeting": "meets trainer and engines for a broadcast, or asks the trainer for a header",
    "weights.left": "holds a group of a broadcast that was left",
}
"""Points of threads that end with a piece of work. Exceptions reach the thread waiting for the work."""


def name_process(actor: str) -> None:
    """Set this process's actor name for fault points."""
    global _actor
    _actor = actor


def point(name: str) -> None:
    """Kill, stop, raise or sleep here if a test has armed the point for this actor."""
    if _folder is None:
        return
    armed = _folder / f"{_actor}@{name}"
    try:
        words = armed.read_text(encoding="utf-8").split()
        if not words:  # still being written: the next process to reach the point takes it
            return
        # renamed before the harm: a point strikes once, and a restarted process passes
        armed.rename(armed.with_name(f"{armed.name}.hit"))
    except FileNotFoundError:  # not armed, or another thread was first
        return
    what, *seconds = words
    if what == "sleep":
        time.sleep(float(*seconds))
    elif what in signal.Signals.__members__:
        os.kill(os.getpid(), signal.Signals[what])
    else:
        # builtins alone: a file's text must not reach any other name
        raise getattr(builtins, what)("asked for by a test")


# threads belong to `bus`, which must not import this package
if _folder is not None:
    threads.on_mark = point
