"""A rank's way into the gang: the packer's orders, and the folder of checkpoints.

Consumes orders from the directive. Waits for an order, and for a disk that takes the folder over; a drain ends each
wait, and so does an order to exit or `bus.peer_timeout`.
"""

import time
from collections.abc import Callable

import structlog

from actors.learner.checkpoints import CheckpointFolder, FolderTakenError, Writer
from actors.process.membership import Drain, Membership, StartOverError
from schemas.errors import RunFailedError
from schemas.messages import TrainerDirective

log = structlog.get_logger("trainer")

POLL_SECONDS = 0.5
"""Longest wait for an order before the directive is looked at again."""


def newest_order(membership: Membership) -> TrainerDirective | None:
    """Return the newest directive for trainers; None if there is none.

    Raises:
        StartOverError: the gang was told to exit; also as `Membership.latest`.
        PeerRefusedError, PackerSilentError: as `Membership.latest`.
    """
    directive = membership.latest()
    if not isinstance(directive, TrainerDirective):
        return None
    if directive.order == "exit":
        raise StartOverError("another rank of the gang is gone, so this rank starts over with the new gang")
    return directive


def wait_for_order(
    membership: Membership, drain: Drain, is_wanted: Callable[[TrainerDirective], bool]
) -> TrainerDirective | None:
    """Wait for a directive with the wanted order and return it; None when drained. Raises as `newest_order` does."""
    directive = newest_order(membership)
    while directive is None or not is_wanted(directive):
        if drain:
            return None
        membership.wait(POLL_SECONDS)
        directive = newest_order(membership)
    return directive


def take_folder(
    membership: Membership, drain: Drain, checkpoints: CheckpointFolder, directive: TrainerDirective, timeout: float
) -> bool:
    """Become the only process that writes checkpoints, and move away checkpoints later than the gang's start.

    Args:
        membership: place of this rank in the run.
        drain: wish to leave.
        checkpoints: folder with the run's checkpoints.
        directive: order of the gang.
        timeout: seconds for which a disk error is tried again (`trainer.checkpoint.timeout`).

    Returns:
        True when done, False when drained.

    Raises:
        StartOverError: a later incarnation writes the checkpoints already, so this process was cut off.
        RunFailedError: the disk error has lasted for `timeout`.
    """
    deadline, problem = 0.0, ""
    while not drain:
        newest_order(membership)
        try:
            # not current: the order may be outdated, since loading the model takes long
            if checkpoints.is_current():
                checkpoints.take(Writer(directive.run, directive.incarnation, membership.boot_id))
                checkpoints.begin_at(directive.checkpoint)
                # told anew: later checkpoints have just been moved away, and must not make a step durable
                membership.report(checkpoints=checkpoints.good(directive.run))
                return True
        except FolderTakenError as error:
            raise StartOverError(str(error)) from error
        except OSError as error:
            deadline = deadline or time.monotonic() + timeout  # counts from the first error on
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"checkpoints can't be taken over, tried for {timeout:g} s (trainer.checkpoint.timeout): "
                    f"{error}. Free space or mend the disk, and start the same command again: nothing is lost"
                ) from error
            # once for each kind of error, not twice a second
            if str(error) != problem:
                log.error("checkpoints not taken over; trying again", detail=str(error))
            problem = str(error)
        membership.wait(POLL_SECONDS)
    return False
