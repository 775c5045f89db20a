"""Start of a packer: the stored ledger is loaded, if this configuration may continue the run, and forked if ordered."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from actors.datasets.identity import data_changes, identities
from actors.ledger import Machine, Store
from actors.packer.examples import Examples
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved
from schemas.config.resume import as_tree, differences, refusal
from schemas.errors import ConfigError

log = structlog.get_logger("packer")


@dataclass(frozen=True)
class StartOrder:
    """How the packer was started."""

    started_at: float | None
    """Wall-clock time of the `actors up` command; None without `actors up`."""
    fork: bool
    """True to fork the run from its newest checkpoint, also with other identity keys."""
    lacks_checkpoint: Callable[[int], bool]
    """Function of a step; returns True if this process finds no good checkpoint of the step."""


def restore(
    config: RunConfig, store: Store, machine: Machine, examples: Examples, listened: float, order: StartOrder
) -> None:
    """Load the ledger into the machine and commit this start, if the configuration may continue the run.

    Raises:
        ConfigError: identity keys or the data differ, and no fork is ordered (P23: a run is continued under its own
            identity alone).
    """
    values = store.values()
    found = differences(values.get("config", {}), config)
    other_data, more_data = data_changes(values.get("data", {}), examples.train)
    refused = refusal(found) + other_data  # a fork may change anything
    if refused and not order.fork:
        raise ConfigError(*refused)
    for text in more_data:
        log.warning("data has changed", detail=text)
    # in term 1 the ledger is new
    if store.term > 1:
        stored = (store.groups(), store.steps(), values, store.settled_digests())
        machine.restore(time.monotonic(), *stored, listened)
        log.info("ledger restored", steps=machine.steps.last, term=store.term, changed=list(map(str, found)))
    changes: dict[str, Any] = {"config": as_tree(config), "data": identities(examples.train)}
    if order.fork:
        changes |= _fork(store, machine, bool(refused), order.started_at, values.get("forked_at"))
    elif machine.phase == "done" and order.lacks_checkpoint(machine.durable_step):
        log.warning("the last checkpoint is gone or damaged; going back to the newest good one")
        machine.rewind(sample_anew=False)
    changes |= examples.give_back(values, order.started_at, seed=f"{config.seed} {store.term}")
    # one commit for all of it: a crash before leaves the ledger as it was, and the next start does the same again
    taken = replace(machine.take_changes(), pools=examples.take_moved())
    store.commit_patiently(replace(taken, values=taken.values | changes), {})
    try:
        write_resolved(config)
    except OSError as error:  # the file is for people only; the run goes on without it
        log.warning("configuration not written down (output_dir)", detail=str(error))


def _fork(
    store: Store, machine: Machine, is_needed: bool, started_at: float | None, forked_at: float | None
) -> dict[str, Any]:
    """Fork, once for each `actors up --fork`. Return values to store with the ledger.

    A packer restarted by `actors up` gets `--fork` again and must not give up work a second time. So the time of
    the `actors up` command is stored and compared. Without this time (systemd, Kubernetes) a packer forks only if
    the configuration has another identity; the next start then finds the new identity stored.
    """
    if store.term == 1:  # a new run has nothing to give up, but has once this packer is restarted
        return {"forked_at": started_at}
    if not is_needed and started_at is None:
        log.warning("not forked: no identity key differs, and this may be a restart; use actors rewind")
    elif is_needed or started_at != forked_at:
        machine.rewind()
        return {"forked_at": started_at}
    return {}
