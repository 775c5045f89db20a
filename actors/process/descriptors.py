"""Limits on open files and sockets: raised when a process starts, with a warning if too low for the configuration."""

import contextlib
import resource

import structlog
import zmq

from schemas import limits
from schemas.config import RunConfig

log = structlog.get_logger("descriptors")


def raise_limits(config: RunConfig) -> None:
    """Raise the soft limit of open files to the hard limit, and ZeroMQ's limit of sockets too; warn if still too low.

    Must run before the first socket is made: ZeroMQ ignores later changes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, limits.DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # if the kernel does not allow more, the old limit stays and is judged below
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        allowed = limits.DESCRIPTORS
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    # sockets may exist already, as in tests with several actors in a process; the old limit then stays
    with contextlib.suppress(zmq.ZMQError):
        context.set(zmq.MAX_SOCKETS, max(int(context.get(zmq.MAX_SOCKETS)), min(allowed, limits.SOCKETS)))
    if problem := problem_of(config, allowed):
        log.warning("few descriptors", detail=problem)


def needed(config: RunConfig) -> int:
    """Return the number of open files that an actor of this run may need, own files and connections to all peers.

    A bound socket has one for each peer, and no actor has more than two that all peers of a kind connect to. A socket
    of its own goes to each reward actor (from rollout actors) and to each rank (from the packer). With keys such a
    socket has a monitor too, with both of its ends.
    """
    connected_to = config.trainer.num_ranks + config.up.reward
    peers = connected_to + config.up.inference + config.up.rollout
    per_socket = limits.DESCRIPTORS_PER_SOCKET_WITH_KEYS if config.bus.keys else limits.DESCRIPTORS_PER_SOCKET
    return limits.OWN_DESCRIPTORS + limits.DESCRIPTORS_PER_PEER * peers + per_socket * connected_to


def problem_of(config: RunConfig, allowed: int) -> str:
    """Return an error text with the remedy if the limit is too low; empty if `allowed` open files are enough."""
    if allowed >= needed(config):
        return ""
    return (
        f"a process may have {allowed} open files and sockets (ulimit -n), and an actor of this configuration needs "
        f"up to {needed(config)}: peers beyond that can't connect; raise the hard limit (LimitNOFILE= of systemd, "
        "--ulimit nofile= of a container)"
    )
