"""`actors node`: a run over two nodes, which are two supervisors on two addresses of this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.ledger import LedgerReader
from actors.ledger.compacted_history import CompactedHistory
from schemas.config import RunConfig, load_config
from tests.marks import first_of
from tests.ports import free_port
from tests.processes import children as children_of
from tests.processes import has_ended
from tests.ring.harness import (
    PATIENCE_SECONDS,
    Processes,
    check_promise,
    children,
    go_on,
    held_reward,
    processes,
    ring_config,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow
HOSTS = "127.0.0.1,127.0.0.2"
FIRST, SECOND = {"packer-0", "trainer-0"}, {"inference-0", "reward-0", "rollout-0"}


def two_nodes(folder: Path, **sections: Any) -> RunConfig:
    """A run whose places follow from the number of nodes."""
    config = ring_config(folder, **sections)
    # the address is each node's own; the port is one that is free
    bus = config.bus.model_copy(update={"control": f"tcp://127.0.0.1:{free_port()}"})
    return config.model_copy(update={"bus": bus})


class Nodes:
    """The two nodes."""

    def __init__(self, started: Processes) -> None:
        self.started = started

    def start(self, *ranks: int, overrides: tuple[str, ...] = ()) -> None:
        """`actors node` for these ranks."""
        for rank in ranks or (0, 1):
            words = ("--rank", str(rank), "--nodes", HOSTS, str(self.started.config_path), *overrides)
            self.started.spawn(f"node-{rank}", "node", *words)

    def pid(self, rank: int) -> int:
        """Of a node."""
        return self.started.processes[f"node-{rank}"].pid

    def actors(self, rank: int) -> dict[str, int]:
        """Pids of a node's actors, by name."""
        return children(self.pid(rank))

    def wait(self) -> list[int]:
        """Exit codes of both."""
        return [self.started.processes[f"node-{rank}"].wait(PATIENCE_SECONDS) for rank in (0, 1)]

    def text(self) -> str:
        """What both have written."""
        return self.started.text("node-0") + self.started.text("node-1")


@contextmanager
def nodes(config: RunConfig, folder: Path) -> Iterator[Nodes]:
    """Two nodes that end with the block."""
    with processes(config, folder) as started:
        yield Nodes(started)


def test_two_nodes_run_their_shares_to_the_end(tmp_path: Path) -> None:
    """Each starts its own actors alone; both exit with 0, the second says nothing of the run's progress."""
    config = two_nodes(tmp_path, reward=held_reward(tmp_path, 4))
    with nodes(config, tmp_path) as run:
        run.start()
        wait_until(lambda: set(run.actors(0)) == FIRST and set(run.actors(1)) == SECOND, "all actors")
        go_on(tmp_path)
        assert run.wait() == [0, 0], run.text()
        assert "done: 8 steps in " in run.started.text("node-0")
        assert "step" not in run.started.text("node-1").replace(str(tmp_path), "")
    check_promise(config)
    assert {path.name for path in (config.output / "logs").iterdir()} == {
        *(f"{name}.log" for name in FIRST | SECOND), "up.log", "node-1.log",
    }  # fmt: skip
    own = load_config(config.output / "nodes" / "1" / "config.resolved.yaml").bus
    assert (own.host, own.control) == ("127.0.0.2", config.bus.control)


@pytest.mark.long
def test_killed_actors_and_killed_nodes_cost_nothing(tmp_path: Path) -> None:
    """An actor of each node, then each node itself with all of its actors; every one is started again."""
    config = two_nodes(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.02}},
        trainer={"max_steps": 16, "checkpoint": {"interval": 4}},
        eval={"num_prompts": 0},
    )
    with nodes(config, tmp_path) as run:
        run.start()

        def step_more() -> None:
            at = steps_recorded(config)
            wait_until(lambda: steps_recorded(config) > at, f"a step after {at}: {run.text()}")

        for rank, name in ((0, "trainer-0"), (1, "rollout-0"), (1, "inference-0"), (0, "packer-0")):
            step_more()
            old = run.actors(rank)[name]
            os.kill(old, signal.SIGKILL)
            wait_until(lambda n=name, r=rank, o=old: run.actors(r).get(n, o) != o, f"{name} is started again")
        for rank in (1, 0):
            step_more()
            actors = run.actors(rank)
            os.kill(run.pid(rank), signal.SIGKILL)
            wait_until(lambda pids=actors: all(map(has_ended, pids.values())), "its actors have ended with it")
            run.started.processes[f"node-{rank}"].wait(PATIENCE_SECONDS)
            run.start(rank)
        assert run.wait() == [0, 0], run.text()
    assert check_promise(config).dropped == {}


def everything(pid: int) -> list[int]:
    """A process with all of its descendants."""
    return [pid, *(below for child in children_of(pid) for below in everything(child.pid))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), first_of([(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGUSR1, 75)]), ids=["TERM", "USR1"]
)
def test_a_signal_to_every_process_of_both_nodes_drains_in_order(tmp_path: Path, number: int, code: int) -> None:
    """As a batch system sends them, twice: the packer leaves last, no group is sampled again, the run goes on."""
    config = two_nodes(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        trainer={"max_steps": 1000, "checkpoint": {"interval": 5000}},
        eval={"num_prompts": 0},
    )
    with nodes(config, tmp_path) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        ours = [*everything(run.pid(0)), *everything(run.pid(1))]
        assert len(ours) >= 2 + len(FIRST | SECOND)
        for _ in range(2):
            for pid in ours:
                if not has_ended(pid):
                    os.kill(pid, number)
            time.sleep(0.3)
        assert run.wait() == [code, code], run.text()
        assert all(map(has_ended, ours))
        stopped_at = int(next((config.output / "checkpoints").glob("step_*")).name.removeprefix("step_"))
        assert f"saved step {stopped_at}; the same command continues the run" in run.started.text("node-0")
        run.start(overrides=(f"trainer.max_steps={stopped_at + 4}",))
        assert run.wait() == [0, 0], run.text()
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_steps": stopped_at + 4})})
    assert check_promise(changed).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


@pytest.mark.long
def test_a_node_that_is_started_after_the_end_does_not_wait_for_a_packer(tmp_path: Path) -> None:
    """The packer's node says so at once; the other hears no packer."""
    config = two_nodes(tmp_path, eval={"num_prompts": 0})
    with nodes(config, tmp_path) as run:
        run.start()
        assert run.wait() == [0, 0], run.text()
        run.start()
        assert run.wait() == [0, 0]
        assert "nothing to do: done at step 8" in run.started.text("node-0")
        assert "nothing to do: the run is done, and no packer has been heard" in run.started.text("node-1")
    check_promise(config)


def test_a_rank_that_no_process_is_for_says_so(tmp_path: Path) -> None:
    """More nodes than processes, all of which are named elsewhere."""
    config = two_nodes(
        tmp_path, launch={"place": {kind: [0] for kind in ("trainer", "inference", "reward", "rollout")}}
    )
    with nodes(config, tmp_path) as run:
        run.start(1)
        assert run.started.processes["node-1"].wait(PATIENCE_SECONDS) == 0
        assert "node 1 has no process of this run" in run.started.text("node-1")


def backed_up(carried: Path) -> int:
    """The step up to which a carried backup is compacted; 0 without one."""
    if not carried.exists():
        return 0
    with contextlib.closing(LedgerReader.of(carried)) as ledger:
        return CompactedHistory.of(ledger.value("folded")).step


@pytest.mark.long
def test_a_run_moves_to_a_machine_without_its_ledger_and_back(tmp_path: Path) -> None:
    """Its ledger is on a disk of each machine: the newest backup comes along, and an older ledger is not taken."""
    config = two_nodes(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.02}},
        trainer={"max_steps": 30, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
    )
    carried, moved_at = config.output / "nodes" / "ledger.backup", 0
    with nodes(config, tmp_path) as run:
        for machine in ("a", "b"):
            run.start(overrides=(f"ledger.path={tmp_path / machine / 'ledger.sqlite'}",))
            wait_until(lambda at=moved_at: backed_up(carried) > at, f"a newer backup is carried: {run.text()}")
            for rank in (0, 1):
                os.kill(run.pid(rank), signal.SIGKILL)
            for rank in (0, 1):
                run.started.processes[f"node-{rank}"].wait(PATIENCE_SECONDS)
            moved_at = backed_up(carried)
        assert moved_at < config.trainer.max_steps
        run.start(overrides=(f"ledger.path={tmp_path / 'a' / 'ledger.sqlite'}",))
        assert run.wait() == [0, 0], run.text()
        assert run.text().count("the ledger of this machine is missing or older: the run goes on from step ") == 2
    check_promise(config)
