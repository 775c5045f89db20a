"""Collisions of the runs of a queue: files, repositories, ports and servers that two runs would both use.

All that is not listed here is named after the run's `output_dir` or its random id, or is a free port by default: Unix
sockets, folders in /dev/shm, locks, ports of data sockets, of weights and of servers, ids in trackers (decision 47).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.ops.ports import fixed_ports
from actors.ops.queue.plan import QueuedRun
from schemas.config import RunConfig


class Claim(NamedTuple):
    """Something that only one run may use.

    Args:
        key: key that names it.
        what: the file, repository, address or server.
        remedy: advice on a collision.
    """

    key: str
    what: str
    remedy: str


def collisions(runs: Sequence[QueuedRun], at_once: int) -> list[str]:
    """Return an error text for each collision of two runs, as `path.to.key: …`; empty if the queue can start.

    Args:
        runs: runs of the queue.
        at_once: number of runs that go on at the same time.
    """
    problems = []
    users: dict[tuple[str, str], QueuedRun] = {}
    for run in runs:
        claims = [*lasting_claims(run.config), *(claims_of_processes(run.config) if at_once > 1 else ())]
        for claim in claims:
            first = users.setdefault((claim.key, claim.what), run)
            if first is not run:
                problems.append(f"{claim.key}: {_named(first)} and {_named(run)} both use {claim.what}; {claim.remedy}")
    return problems


def lasting_claims(config: RunConfig) -> Iterator[Claim]:
    """Yield what stays a run's own after its end: the next run would continue or overwrite it."""
    yield Claim("output_dir", str(config.output.resolve()), "give each run a folder of its own")
    yield Claim(
        "ledger.path", str(config.ledger_path.resolve()), "give each run a ledger of its own, or leave it empty"
    )
    if (hub := config.push_to_hub) is not None:
        # without a name it follows from the folder, as in the uploader
        name = f"{hub.hub_model_id or config.output.name}@{hub.hub_revision or 'main'}"
        remedy = "set another push_to_hub.hub_model_id or push_to_hub.hub_revision for each run"
        yield Claim("push_to_hub.hub_model_id", f"the repository {name}", remedy)


def claims_of_processes(config: RunConfig) -> Iterator[Claim]:
    """Yield what a run uses until its end: fixed ports, and servers that have one run's weights at a time."""
    for port in dict.fromkeys(fixed_ports(config)):
        remedy = f"set {port.key} for each run, or leave out --at-once"
        if port.key not in ("bus.control", "rollout.sessions.port"):
            remedy = f"set {port.key} to 0 (any free port), or leave out --at-once"
        yield Claim(port.key, f"{port.host}:{port.number}", remedy)
    pool = config.inference.pool
    key, urls = "inference.engine.urls", config.inference.engine.server_urls
    if pool is not None:
        key, urls = "inference.pool.urls", pool.urls
    for url in urls:
        yield Claim(key, f"the server {url}", "give each run servers of its own, or leave out --at-once")


def _named(run: QueuedRun) -> str:
    """Return a run as the user has given it."""
    return f"{run.path.name} with {', '.join(run.values)}" if run.values else str(Path(run.path))
