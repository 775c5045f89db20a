"""Processes that follow a run and on which training does not depend: callbacks of the user, and uploads to the hub."""

import os
import signal
import time
from collections.abc import Sequence

from actors.ops.up.child import Child, plan, wait_for
from actors.uploader.choice import due
from actors.uploader.files import run_of, saved_by
from actors.uploader.record import Uploads, lines_of, read_uploads
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved

FOLLOWERS = ("callbacks", "uploader")
CALLBACKS_END_SECONDS = 60.0
"""Longest wait for callbacks at the end of a run."""
FAREWELL_SECONDS = 5.0
"""Time beyond `push_to_hub.end_timeout` for the process to end by itself."""


def end_seconds(config: RunConfig, kind: str) -> float:
    """Return the longest wait for a follower at the end of a run."""
    if kind == "uploader" and config.push_to_hub is not None:
        return config.push_to_hub.end_timeout + FAREWELL_SECONDS
    return CALLBACKS_END_SECONDS


def lines_of_hub(config: RunConfig) -> list[str]:
    """Return the result of the uploads as lines for people; none without uploads."""
    return [] if config.push_to_hub is None else lines_of(read_uploads(config.output))


def push_rest(config: RunConfig, inherited: Sequence[int]) -> None:
    """Push what a run that is done has not pushed, and print the result.

    Args:
        config: configuration of the run, which may have other keys of `push_to_hub` than before.
        inherited: file descriptors that the process inherits.
    """
    run = run_of(config.output)
    if config.push_to_hub is None or not run:
        return
    pushed = Uploads.load(config.output, run).chains
    if not due(saved_by(config.output), pushed, config.push_to_hub, is_end=True):
        return
    child = next(child for child in plan(config, None) if child.kind == "uploader")
    child.start(command_of(config, child), inherited)
    print(f"pushing what is not on the hub yet, for at most {end_seconds(config, child.kind):.0f} s", flush=True)
    deadline = time.monotonic() + config.bus.lease + end_seconds(config, child.kind)
    try:
        while child.running and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        if child.running:
            child.signal(signal.SIGKILL)
            wait_for([child], FAREWELL_SECONDS)
    print("\n".join(lines_of_hub(config)))


def command_of(config: RunConfig, child: Child) -> list[str]:
    """Return the arguments of `actors` for a follower that runs alone, with the configuration written for it."""
    run = ["run", child.kind, "--config", str(write_resolved(config))]
    return [*run, "--name", child.name, "--parent", str(os.getpid())]
