"""Processes that follow a run and on which training does not depend: callbacks, uploads to the hub, trackers."""

import os
import signal
import time
from collections.abc import Sequence

from actors.ops.up.child import Child, plan, wait_for
from actors.trackers.loop import has_rest
from actors.uploader.choice import due
from actors.uploader.files import run_of, saved_by
from actors.uploader.record import Uploads, lines_of, read_uploads
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved

FOLLOWERS = ("callbacks", "uploader", "tracker")
CALLBACKS_END_SECONDS = 60.0
"""Longest wait for callbacks, and for each tracker, at the end of a run."""
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


def do_rest(config: RunConfig, inherited: Sequence[int]) -> None:
    """Push and send what followers of a run that is done have not, and print the result.

    Args:
        config: configuration of the run, which may have other keys of its followers than before.
        inherited: file descriptors that the processes inherit.
    """
    wanted = {f"tracker-{index}" for index in range(len(config.telemetry.trackers)) if has_rest(config, index)}
    wanted |= {"uploader-0"} if _has_uploads(config) else set()
    children = [child for child in plan(config, None) if child.name in wanted]
    if not children:
        return
    for child in children:
        child.start(command_of(config, child), inherited)
        what = "pushing what is not on the hub yet" if child.kind == "uploader" else "sending the rest to the tracker"
        print(f"{child.name}: {what}, for at most {end_seconds(config, child.kind):.0f} s", flush=True)
    began = time.monotonic() + config.bus.lease  # the time for a start
    try:
        while any(c.running and time.monotonic() - began < end_seconds(config, c.kind) for c in children):
            time.sleep(0.1)
    finally:
        for child in children:
            if child.running:
                child.signal(signal.SIGKILL)
        wait_for(children, FAREWELL_SECONDS)
    print("\n".join(lines_of_hub(config)))


def _has_uploads(config: RunConfig) -> bool:
    run = run_of(config.output)
    if config.push_to_hub is None or not run:
        return False
    pushed = Uploads.load(config.output, run).chains
    return bool(due(saved_by(config.output), pushed, config.push_to_hub, is_end=True))


def command_of(config: RunConfig, child: Child) -> list[str]:
    """Return the arguments of `actors` for a follower that runs alone, with the configuration written for it."""
    run = ["run", child.kind, "--config", str(write_resolved(config))]
    return [*run, "--name", child.name, "--parent", str(os.getpid())]
