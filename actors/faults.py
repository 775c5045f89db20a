"""Places where a test may kill or stop this very process, exactly there: `point("packer.committed")`.

Without GRPO_FAULTS in the environment a point is one comparison. With it, GRPO_FAULTS names a folder, and a file in it,
`ACTOR@POINT` (`packer-0@packer.committed`), that holds the name of a signal arms a point: the process that comes by
renames the file to `….hit` and sends itself the signal. So a suite decides in what state its victim dies, while the run
goes on.
"""

import os
import signal
from pathlib import Path

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
    "packer.committed": "between commit and State",
    "packer.between_ranks": "between two ranks' batches",
    "packer.told": "has sent States and batches",
    "trainer.batch": "has its batch and has not begun the step",
    "trainer.gradients": "inside a step, gradients computed and not yet summed over the ranks",
    "trainer.updated": "inside a step, weights updated and not published",
    "trainer.published": "version published and not yet told",
    "checkpoint.written": "inside a checkpoint write: files there, checksums not",
    "checkpoint.complete": "checkpoint whole and not renamed",
    "checkpoint.renamed": "checkpoint named and not yet told",
    "inference.request": "has taken a request",
    "inference.receiving": "inside a weight update of the rendezvous channel",
    "inference.received": "inside a weight load: weights received and not switched",
    "inference.loaded": "weights switched and not yet told",
}
"""All points and what state a process is in there."""


def name_process(actor: str) -> None:
    """From now on this process is the actor of that name."""
    global _actor
    _actor = actor


def point(name: str) -> None:
    """Die or stop here if a test has asked for it."""
    if _folder is None:
        return
    armed = _folder / f"{_actor}@{name}"
    try:
        number = signal.Signals[armed.read_text(encoding="utf-8").strip()]
        armed.rename(armed.with_name(f"{armed.name}.hit"))
    except (FileNotFoundError, KeyError):
        return
    os.kill(os.getpid(), number)
