"""Several runs on one machine, as real processes: at the same time without mixing, and one after the other."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.ledger import LedgerReader
from bus.run_folder import folders_of
from bus.topology import Addresses
from schemas.config import RunConfig, dump_config, load_config
from tests.conftest import ModelFolder
from tests.ports import free_port
from tests.ring.harness import (
    PATIENCE_SECONDS,
    Process,
    Processes,
    check_promise,
    children,
    go_on,
    held_reward,
    own_reward,
    processes,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow

SHORT = {"trainer": {"max_steps": 3, "checkpoint": {"interval": 2}}, "eval": {"num_prompts": 0}}
ALL_BUT_ONE = 8
"""Groups of a run that reaches a step, whichever of its nine groups come first, and does not end."""


def run_id(config: RunConfig) -> str:
    """The random id that a run's ledger has."""
    ledger = LedgerReader.of(config.ledger_path)
    try:
        return str(ledger.value("run"))
    finally:
        ledger.close()


def term(config: RunConfig) -> int:
    """How often a run's packer was started."""
    ledger = LedgerReader.of(config.ledger_path)
    try:
        return int(ledger.value("term"))
    finally:
        ledger.close()


def targets(config: RunConfig) -> set[str]:
    """Addresses of /metrics that a run has listed; none before its start."""
    path = config.output / "metrics_targets.json"
    return {entry["targets"][0] for entry in json.loads(path.read_text())} if path.exists() else set()


def up_in(started: Processes, run: RunConfig) -> Process:
    """`actors up` of the test's run.yaml with the run's output_dir."""
    return started.spawn(run.output.name, "up", str(started.config_path), f"output_dir={run.output}")


def test_two_runs_of_one_file_train_at_the_same_time_and_share_nothing(
    tmp_path: Path, model_folder: ModelFolder
) -> None:
    """A real tiny model, one run.yaml, two folders: sockets, shared memory, ports, ids, files and metrics."""
    config = ring_config(
        tmp_path,
        model={"path": str(model_folder()), "dtype": "float32", "device": "cpu"},
        inference={"engine": {"type": "embedded"}},
        weights={"directory": ""},
        trainer={"max_steps": 4, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
        reward=own_reward("held_each", go_on=str(tmp_path / "go_on"), calls=4),
        packer={"groups_per_step": 2, "sequence_len": 64},
    )
    runs = [config.model_copy(update={"output_dir": str(tmp_path / name)}) for name in "ab"]
    with processes(config, tmp_path) as started:
        ups = [
            started.spawn(run.output.name, "up", str(started.config_path), f"output_dir={run.output}") for run in runs
        ]
        for run in runs:
            wait_until(lambda run=run: steps_recorded(run) >= 1 and len(targets(run)) == 5, f"a step of {run.output}")
        # both stand still now, in the middle
        assert targets(runs[0]).isdisjoint(targets(runs[1]))
        assert run_id(runs[0]) != run_id(runs[1])
        assert set(children(ups[0].pid)) == set(children(ups[1].pid))
        for run in runs:
            assert {path.name.partition(".")[0] for path in Addresses(run).folder.iterdir()} >= {"control", "trainer-0"}
            assert all(folder.path.is_dir() for folder in folders_of(run))
            assert scraped(run, "packer-0", 'grpo_packer_peers{role="rollout"}') == 1
        assert {folder.path for folder in folders_of(runs[0])}.isdisjoint(folder.path for folder in folders_of(runs[1]))
        go_on(tmp_path)
        for up, run in zip(ups, runs, strict=True):
            assert up.wait(PATIENCE_SECONDS) == 0, started.text(run.output.name)
    for run in runs:
        assert check_promise(run).steps == 4
        lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        # groups of the other run would be dropped, and counted in the logs
        assert all("foreign_run" not in log.read_text() for log in (run.output / "logs").glob("*.log"))
        assert summary_of(run)["ledger"]["issued"] == summary_of(run)["ledger"]["trained"]
        assert not Addresses(run).folder.exists()
        assert not any(folder.path.exists() for folder in folders_of(run))


def test_of_two_runs_with_the_same_ports_one_is_refused_and_the_other_is_whole(tmp_path: Path) -> None:
    """Started in the same moment, with fixed ports: never both, never half of each."""
    port = free_port()
    fixed = {"bus": {"control": f"tcp://127.0.0.1:{port}"}, "telemetry": {"metrics_port": port + 1}}
    config = ring_config(tmp_path, **SHORT, **fixed)
    runs = [config.model_copy(update={"output_dir": str(tmp_path / name)}) for name in "ab"]
    with processes(config, tmp_path) as started:
        ups = [
            started.spawn(run.output.name, "up", str(started.config_path), f"output_dir={run.output}") for run in runs
        ]
        codes = [up.wait(PATIENCE_SECONDS) for up in ups]
        texts = [started.text(run.output.name) for run in runs]
    assert sorted(codes) == [0, 2], texts
    whole, refused = codes.index(0), codes.index(2)
    assert f"bus.control: 127.0.0.1:{port} is in use; another run on this machine has the same value" in texts[refused]
    assert check_promise(runs[whole]).dropped == {}
    assert not runs[refused].ledger_path.exists()


def write(folder: Path, name: str, **sections: Any) -> RunConfig:
    """A run.yaml with the run's own folder."""
    config = ring_config(folder / name, **SHORT | sections, name=name)
    (folder / f"{name}.yaml").write_text(dump_config(config))
    return config


@pytest.mark.long
def test_a_queue_goes_on_after_a_failed_run_and_the_next_start_repeats_that_one_alone(tmp_path: Path) -> None:
    """Three runs, the reward function of the second ends its process; mended, the same command ends well."""
    dies = {"reward": own_reward("ending", unless=str(tmp_path / "mended")), "up": {"max_restarts": 0}}
    runs = [write(tmp_path, "a"), write(tmp_path, "b", **dies), write(tmp_path, "c")]
    words = ["up", *(str(tmp_path / f"{name}.yaml") for name in "abc")]
    with processes(runs[0], tmp_path) as started:
        assert started.spawn("first", *words).wait(PATIENCE_SECONDS) == 1
        text = started.text("first")
        assert "run 2 of 3: " in text
        assert "failed; 1 more to start" in text
        (table,) = [text[text.index("run  outcome") :].splitlines()]
        assert [line.split()[:3] for line in table[1:4]] == [
            ["a", "done", "3"],
            ["b", "failed", "0"],
            ["c", "done", "3"],
        ]
        assert any(line.startswith("b: failed: reward-0 ended 1 times") for line in table)
        terms = [term(run) for run in runs]
        (tmp_path / "mended").touch()
        again = started.spawn("second", *words)
        assert again.wait(PATIENCE_SECONDS) == 0, started.text("second")
        assert started.text("second").count("nothing to do: done at step 3") == 2
    # what was done has not been touched
    assert [term(run) for run in runs] == [terms[0], terms[1] + 1, terms[2]]
    for run in runs:
        assert check_promise(run).steps == 3


@pytest.mark.long
def test_a_stopped_queue_continues_where_it_was(tmp_path: Path) -> None:
    """TERM while the second of three runs: it saves and leaves, the third does not start; again, all three are done."""
    runs = [write(tmp_path, "a"), write(tmp_path, "b", reward=held_reward(tmp_path, ALL_BUT_ONE)), write(tmp_path, "c")]
    words = ["up", *(str(tmp_path / f"{name}.yaml") for name in "abc")]
    with processes(runs[0], tmp_path) as started:
        queue = started.spawn("first", *words)
        wait_until(lambda: steps_recorded(runs[1]) >= 1, "a step of the second run")
        queue.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping; " in started.text("first"), "the run has been told")
        # not before: the run would be done
        go_on(tmp_path)
        assert queue.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        text = started.text("first")
        rows = text[text.index("run  outcome") :].splitlines()[1:4]
        assert [line.split()[1] for line in rows] == ["done", "stopped", "not"]
        assert not runs[2].ledger_path.exists()
        assert started.spawn("second", *words).wait(PATIENCE_SECONDS) == 0, started.text("second")
    assert term(runs[0]) == 1
    for run in runs:
        assert check_promise(run).dropped == {}


@pytest.mark.long
def test_a_sweep_runs_each_combination_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Two keys, two runs at a time; the comparison tells what differs."""
    config = ring_config(tmp_path, **SHORT)
    sweep = ["--sweep", "seed=1,2", "--sweep", "trainer.learning_rate=1e-5,3e-5", "--at-once", "2"]
    with processes(config, tmp_path) as started:
        up = started.up("trainer.max_steps=2", *sweep)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        text = started.text("up")
    folders = sorted(path for path in config.output.iterdir())
    assert [path.name for path in folders] == [
        f"seed-{seed}__learning_rate-{rate}" for seed in (1, 2) for rate in ("1e-5", "3e-5")
    ]
    found = [load_config(path / "config.resolved.yaml") for path in folders]
    assert [(run.seed, run.trainer.learning_rate) for run in found] == [(1, 1e-5), (1, 3e-5), (2, 1e-5), (2, 3e-5)]
    assert len({run_id(run) for run in found}) == 4
    for run in found:
        assert check_promise(run).steps == 2
    assert "[1 seed-1__learning_rate-1e-5] run ring.seed-1__learning_rate-1e-5: " in text
    compared = subprocess.run(
        [sys.executable, "-m", "actors", "compare", *map(str, folders)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in compared[1:3]] == ["seed", "trainer.learning_rate"]


@pytest.mark.long
def test_a_run_dies_with_its_queue(tmp_path: Path) -> None:
    """SIGKILL: no run goes on without anybody, and the same command continues."""
    config = write(tmp_path, "a", reward=held_reward(tmp_path, ALL_BUT_ONE))
    write(tmp_path, "b")
    words = ["up", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    with processes(config, tmp_path) as started:
        queue = started.spawn("first", *words)
        wait_until(lambda: steps_recorded(config) >= 1, "a step")
        queue.kill()
        queue.wait()
        go_on(tmp_path)
        assert started.spawn("second", *words).wait(PATIENCE_SECONDS) == 0, started.text("second")
    assert check_promise(config).dropped == {}


def test_a_second_run_with_the_ledger_of_the_first_is_refused(tmp_path: Path) -> None:
    """One after the other, with `ledger.path` in run.yaml: the second would continue the first run's groups."""
    config = ring_config(tmp_path, **SHORT, ledger={"path": str(tmp_path / "ledger.sqlite")})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        other = started.spawn("other", "up", str(started.config_path), f"output_dir={tmp_path / 'other'}")
        assert other.wait(PATIENCE_SECONDS) == 2
        assert f"ledger.path: {config.ledger_path} is the ledger of the run in {config.output}" in started.text("other")
    assert check_promise(config).dropped == {}
