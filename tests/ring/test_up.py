"""`actors up`: a whole run as real processes under the supervisor."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.ops.up.fork_server import SERVER
from actors.process.output_dir import LOCKS, MARKER, WRITTEN
from actors.telemetry.metrics import BUS_SPECS, SPECS
from bus.topology import Addresses
from schemas.config import RunConfig
from tests.ports import free_port
from tests.processes import children as children_of
from tests.processes import has_ended
from tests.ring.harness import (
    ALL,
    PATIENCE_SECONDS,
    SHORT_LEASE,
    check_promise,
    children,
    go_on,
    held_by,
    held_reward,
    own_reward,
    processes,
    ring_config,
    scrape,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

SUMMARY_KEYS = [
    "steps", "reward_first", "reward_last", "eval_before", "eval_after", "wall_seconds", "train_seconds",
    "time_to_first_step_seconds", "completions_per_second", "generated_tokens", "trained_tokens", "goodput",
    "tokens_per_second", "trainer_idle_ratio", "lag_mean", "lag_max", "mismatch_kl", "ledger", "eval_ledger",
    "weight_update_seconds",
]  # fmt: skip
LEDGER_KEYS = ["issued", "trained", "in_flight", "dropped", "copies_dropped", "reissued", "trained_twice"]
NAMES = {f"{kind}-0" for kind in ALL}


def told(config: RunConfig, event: str) -> list[dict[str, Any]]:
    """Lines of up.log about an event."""
    lines = [json.loads(line) for line in (config.output / "logs" / "up.log").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def fork_servers(up: int) -> list[int]:
    """Pids of the fork servers of `actors up` with this pid."""
    return [child.pid for child in children_of(up) if SERVER in child.command]


@pytest.mark.long
def test_a_run_outlives_its_fork_servers(tmp_path):
    """Each is killed and frozen together with an actor, more often than servers are started again."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        trainer={"max_steps": 20, "checkpoint": {"interval": 4}},
        eval={"num_prompts": 0},
        up={"max_restarts": 20},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 1, "step 1")
        assert len(fork_servers(up.pid)) == 2
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL):
            for server in fork_servers(up.pid):
                os.kill(server, number)
            for name in ("trainer-0", "reward-0"):
                old = children(up.pid)[name]
                os.kill(old, signal.SIGKILL)
                wait_until(
                    lambda name=name, old=old: children(up.pid).get(name, old) != old, f"{name} has been started again"
                )
            recorded = steps_recorded(config)
            wait_until(lambda recorded=recorded: steps_recorded(config) > recorded, "a step")
        # they have died too often
        assert not fork_servers(up.pid)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_up_runs_to_the_end_and_leaves_what_it_promises(tmp_path):
    """Exit 0 at max_steps, progress lines, every file of an output_dir, and on the way /metrics of all five actors."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        trainer={"max_steps": 5},
        telemetry={"sample_groups_per_step": 2},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        seen = {}
        for name in sorted(NAMES):
            seen[name] = wait_until(lambda name=name: scrape(config, name), f"/metrics of {name}")
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        lines = started.text("up").splitlines()
        samples = subprocess.run(
            [sys.executable, "-m", "actors", "samples", str(config.output)], capture_output=True, text=True, check=True
        ).stdout
    # callbacks and uploads have tests of their own
    for spec in (spec for spec in SPECS if spec.actor in ALL):
        assert f"# TYPE {spec.name} {spec.kind}" in seen[f"{spec.actor}-0"]
    for spec in BUS_SPECS[:3]:
        assert f"# TYPE {spec.name} {spec.kind}" in seen["rollout-0"]
    check_promise(config)

    assert lines[0] == f"run ring: {config.output}"
    assert "waiting for the packer" in lines[1]
    assert "done  step 5/5" in lines[-4]
    assert lines[-3].startswith("done: 5 steps in ")
    assert lines[-2].startswith("evaluation of reverse_text: exact match ")
    assert lines[-1] == f"checkpoint: {config.output / 'checkpoints' / 'step_5'}"
    assert "\x1b" not in started.text("up"), "no terminal codes where there is no terminal"

    summary = summary_of(config)
    assert list(summary) == SUMMARY_KEYS
    assert list(summary["ledger"]) == list(summary["eval_ledger"]) == LEDGER_KEYS
    assert list(summary["weight_update_seconds"]) == ["pause", "gather", "wire", "load"]
    assert list(summary["eval_after"]["reverse_text"]) == [
        "exact_match", "mean_reward", "reward_std", "num_prompts", "num_completions", "reward/characters_in_place",
    ]  # fmt: skip
    assert summary["steps"] == 5
    assert summary["goodput"] == 1.0
    assert 0 < summary["train_seconds"] < summary["wall_seconds"]

    records = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    evals = [json.loads(line) for line in (config.output / "evals.jsonl").read_text().splitlines()]
    assert [record["version"] for record in evals] == [0, 5]
    groups = [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]
    assert len([g for g in groups if g["purpose"] == "train"]) == 10
    assert "step 5  train ordinal" in samples
    assert {path.name for path in (config.output / "logs").iterdir()} == {f"{name}.log" for name in {*NAMES, "up"}}
    assert not Addresses(config).folder.exists()
    assert not list(Path(config.weights.directory).iterdir())
    assert (config.output / "config.resolved.yaml").exists()
    left = {path.name for path in config.output.iterdir() if not path.name.startswith("ledger.sqlite")}
    assert left - {*WRITTEN, *LOCKS, MARKER} == set(), "each name would be refused if it were somebody else's"
    assert [path.name for path in sorted((config.output / "checkpoints").glob("step_*"))] == ["step_3", "step_5"]


@pytest.mark.slow
def test_up_survives_the_death_of_every_actor(tmp_path):
    """Each actor is killed by the state it is in and started again; the packer also drained; nothing lost or twice."""
    gate = tmp_path / "gate"
    gate.touch()
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.1}},
        reward=own_reward("gated", gate=str(gate)),
        trainer={"max_steps": 10, "checkpoint": {"interval": 4}},
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()

        def kill(name: str, number: int = signal.SIGKILL) -> None:
            old = children(up.pid)[name]
            os.kill(old, number)
            wait_until(lambda: children(up.pid).get(name, old) != old, f"{name} has been started again")

        wait_until((tmp_path / "gate.entered").exists, "a group has been read")
        kill("reward-0")
        wait_until(lambda: held_by(config, "rollout-0"), "tickets are held")
        kill("rollout-0")
        wait_until(lambda: scraped(config, "inference-0", "grpo_inference_running_completions"), "a request runs")
        kill("inference-0")
        gate.unlink()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        kill("trainer-0")
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        kill("packer-0")
        recorded = steps_recorded(config)
        wait_until(lambda: steps_recorded(config) > recorded, "a step of the new packer, which hears signals by then")
        kill("packer-0", signal.SIGTERM)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        text = started.text("up")
    assert check_promise(config).dropped == {}
    assert {f"{name} ended by SIGKILL, started again" for name in NAMES} <= set(text.splitlines())
    assert "packer-0 ended with exit code 0, started again" in text
    assert {(line["child"], line["how"]) for line in told(config, "ended")} >= {(name, "by SIGKILL") for name in NAMES}
    assert len(told(config, "started")) == len(NAMES) + 6


@pytest.mark.slow
def test_sigterm_stops_a_run_softly_and_the_same_command_goes_on(tmp_path):
    """143 (the run is not done), a checkpoint of the last step, no process left; then the run completes, exit 0."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        trainer={"max_steps": 1000, "checkpoint": {"interval": 5000}},  # more steps than end before the signal
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        pids = children(up.pid)
        up.terminate()
        assert up.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert all(map(has_ended, pids.values()))
        assert held_by(config, "rollout-0") == [], "groups under way were finished"
        stopped_at = int(next((config.output / "checkpoints").glob("step_*")).name.removeprefix("step_"))
        assert stopped_at >= 2
        assert not (config.output / "summary.json").exists()
        assert started.text("up").endswith(f"\nsaved step {stopped_at}; the same command continues the run\n")
        assert started.up(f"trainer.max_steps={stopped_at + 4}").wait(PATIENCE_SECONDS) == 0
        assert f"continuing run ring from step {stopped_at}\n" in started.text("up")
    assert check_promise(ring_config(tmp_path, trainer={"max_steps": stopped_at + 4})).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


@pytest.mark.slow
def test_a_closed_terminal_stops_a_run_softly(tmp_path):
    """129 and a checkpoint, however often the hangup is told; no process and no weights are left."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        trainer={"max_steps": 200, "checkpoint": {"interval": 150}},
        eval={"num_prompts": 0},
    )
    with processes(config, tmp_path) as started, os.fdopen(os.open(os.devnull, os.O_RDWR)) as nowhere:
        ours, terminal = os.openpty()
        up = subprocess.Popen(
            [sys.executable, "-m", "actors", "up", str(started.config_path)],
            stdin=nowhere,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=_takes_the_terminal,
        )
        started.processes["up"] = up
        os.close(terminal)
        closing = threading.Event()
        reader = threading.Thread(target=_read_until, args=(closing, ours))
        reader.start()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        pids = children(up.pid)
        up.send_signal(signal.SIGHUP)  # what a shell sends to its jobs; then the terminal goes
        closing.set()
        reader.join()
        os.close(ours)
        code = up.wait(PATIENCE_SECONDS)
        assert code == 128 + signal.SIGHUP, (config.output / "logs" / "up.log").read_text()
        assert all(map(has_ended, pids.values()))
    assert list((config.output / "checkpoints").glob("step_*"))
    assert not list(Path(config.weights.directory).iterdir())


def _takes_the_terminal():
    """Make stdout the controlling terminal, and hear SIGHUP even where these tests were started with `nohup`."""
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _read_until(closing, descriptor):
    """Read what a terminal shows, while a process has it open."""
    with contextlib.suppress(OSError):
        while not closing.is_set():
            if select.select([descriptor], [], [], 0.05)[0]:
                os.read(descriptor, 1 << 16)


@pytest.mark.long
def test_a_run_started_with_nohup_does_not_hear_of_a_closed_terminal(tmp_path):
    """It was asked not to."""
    config = ring_config(tmp_path, trainer={"max_steps": 4}, eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        command = ["nohup", sys.executable, "-m", "actors", "up", str(started.config_path)]
        with started.log("up").open("ab") as log:
            up = started.processes["up"] = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: steps_recorded(config) >= 1, "step 1")
        up.send_signal(signal.SIGHUP)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")


@pytest.mark.long
@pytest.mark.slow
def test_files_of_others_outlive_a_run_of_two_in_one_weights_directory(tmp_path):
    """Two runs at once, one of them broadcasting; one is killed and started again; the folder has other files."""
    shared = tmp_path / "shared"
    (shared / "1.0").mkdir(parents=True)
    (shared / "1.0" / "thesis.txt").write_text("mine")
    (shared / "data.jsonl").write_text("mine")
    sections = {
        "inference": {"engine": {"type": "fake", "token_seconds": 0.03}},
        "trainer": {"max_steps": 6, "checkpoint": {"interval": 2}},
        "eval": {"num_prompts": 0},
    }
    one = ring_config(tmp_path / "one", weights={"directory": str(shared)}, bus=SHORT_LEASE, **sections)
    other = ring_config(tmp_path / "other", weights={"directory": str(shared), "channel": "rendezvous"}, **sections)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    with processes(one, tmp_path / "one") as first, processes(other, tmp_path / "other") as second:
        ups = [first.up(), second.up()]
        wait_until(lambda: steps_recorded(one) >= 3, "step 3")
        ups[0].kill()
        ups[0].wait()
        assert second.processes["up"].wait(PATIENCE_SECONDS) == 0, second.text("up")
        assert first.up().wait(PATIENCE_SECONDS) == 0, first.text("up")
    assert sorted(path.name for path in shared.rglob("*")) == ["1.0", "data.jsonl", "thesis.txt"]
    assert check_promise(one).dropped == check_promise(other).dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"weights": {"directory": "/proc/nowhere/weights"}},
            "weights.directory: /proc/nowhere/weights can't be written",
        ),
        ({"ledger": {"path": "/proc/nowhere/l.sqlite"}}, "ledger.path: /proc/nowhere can't be written"),
    ],
)
def test_up_with_a_place_that_can_not_be_written_ends_with_2_and_plain_words(tmp_path, section, words):
    """At once, without a restart and without a traceback; and so does an actor that is started by itself."""
    config = ring_config(tmp_path, **section)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 2
        assert words in started.text("up")
        name = "trainer-0" if "weights" in section else "packer-0"
        assert started.run(name).wait(PATIENCE_SECONDS) == 2
        said = started.text(name)
    assert "can't be made" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_run_that_is_done_starts_nothing_and_goes_on_when_max_steps_is_raised(tmp_path):
    """The same command says that there is nothing to do; with trainer.max_steps=4 it trains two more."""
    config = ring_config(tmp_path, trainer={"max_steps": 2}, eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0
        starts = len(told(config, "started"))
        assert started.up().wait(PATIENCE_SECONDS) == 0
        said = started.text("up").splitlines()
        assert said[-1].startswith("nothing to do: done at step 2 (trainer.max_steps 2). To train on, raise ")
        assert f"actors rewind {config.output} --step N" in said[-1]
        assert len(told(config, "started")) == starts
        assert started.up("trainer.max_steps=4").wait(PATIENCE_SECONDS) == 0
        assert "continuing run ring from step 2\n" in started.text("up")
    check_promise(ring_config(tmp_path, trainer={"max_steps": 4}))


def status_of(config: RunConfig) -> list[str]:
    """What `actors status` prints."""
    command = [sys.executable, "-m", "actors", "status", str(config.output)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.mark.long
def test_a_finished_run_that_was_rewound_and_killed_trains_to_its_end(tmp_path):
    """SIGKILL of `actors up` some steps after the rewind: the same command trains the rest, and all screens agree."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.02}},
        trainer={"max_steps": 12, "checkpoint": {"interval": 2, "keep_last": 9}},
        telemetry={"sample_groups_per_step": 0},
    )
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        rewind = started.spawn("rewind", "rewind", str(config.output), "--step", "4")
        assert rewind.wait(PATIENCE_SECONDS) == 0, started.text("rewind")
        assert "the next `actors up` continues from step 4" in started.text("rewind")
        assert not (config.output / "summary.json").exists()
        status = status_of(config)
        assert status[0] == "not healthy"
        assert status[1].startswith("ring  stopped  step 4/12")
        assert "the same command continues from step 4" in " ".join(" ".join(status).split())
        up = started.up()
        wait_until(lambda: "continuing run ring from step 4;" in started.text("up"), "it continues")
        wait_until(lambda: 6 <= steps_recorded(config) < 12, "step 6 has been trained again")
        assert "done" not in started.text("up").partition("continuing")[2]
        up.kill()
        up.wait()
        assert not (config.output / "summary.json").exists()
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        last = started.text("up").rpartition("continuing run ring")[2]
        assert "nothing to do" not in last
        assert "done  step 12/12" in last
        assert status_of(config)[1].startswith("ring  done  step 12/12")
    said = check_promise(config)
    assert set(said.dropped.values()) == {"forked"}
    evals = [json.loads(line) for line in (config.output / "evals.jsonl").read_text().splitlines()]
    assert [record["version"] for record in evals] == [0, 12]


@pytest.mark.slow
def test_a_done_run_whose_last_checkpoint_is_gone_goes_on_from_the_one_before(tmp_path):
    """It is not done, whatever summary and ledger say: the packer waits for the trainers, and all is trained."""
    config = ring_config(tmp_path, trainer={"max_steps": 5, "checkpoint": {"interval": 3}}, eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0
        shutil.rmtree(config.output / "checkpoints" / "step_5")
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert "continuing run ring from step 3\n" in started.text("up")
    assert (config.output / "checkpoints" / "step_5").is_dir()
    assert check_promise(config).dropped == {}


@pytest.mark.long
@pytest.mark.slow
def test_up_with_fork_samples_anew_though_no_identity_key_differs_and_says_so(tmp_path):
    """From the newest checkpoint, once, also when the packer is killed and started again."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        reward=held_reward(tmp_path, calls=12),
        trainer={"max_steps": 8, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
        bus=SHORT_LEASE,
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(
            lambda: (config.output / "checkpoints" / "step_2").is_dir() and steps_recorded(config) >= 3, "step 3"
        )
        up.kill()
        up.wait()
        go_on(tmp_path)
        up = started.up("--fork", "trainer.learning_rate=1e-7")
        wait_until(lambda: "are given up, and their examples sampled again" in started.text("up"), "it says so")
        recorded = steps_recorded(config)
        wait_until(lambda: steps_recorded(config) > recorded, "a step has been sampled again")
        os.kill(children(up.pid)["packer-0"], signal.SIGKILL)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    said = check_promise(config)
    assert set(said.dropped.values()) == {"forked"}
    assert max(said.dropped) - min(said.dropped) + 1 == len(said.dropped), "given up in one go"


@pytest.mark.slow
def test_second_up_on_the_same_output_is_refused_and_does_the_first_no_harm(tmp_path):
    """Exit 2 with the pid of the one that runs; its configuration and its actors stay as they are."""
    gate = tmp_path / "gate"
    gate.touch()
    config = ring_config(tmp_path, reward=own_reward("gated", gate=str(gate)))
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until((tmp_path / "gate.entered").exists, "a group is being scored, and is kept so")
        pids, resolved = children(up.pid), (config.output / "config.resolved.yaml").read_text()
        second = started.spawn("second", "up", str(started.config_path), "trainer.learning_rate=1")
        assert second.wait(PATIENCE_SECONDS) == 2
        assert started.text("second").startswith(
            f"output_dir: {config.output}: a run is going on here (actors up, pid {up.pid}); "
        )
        assert (config.output / "config.resolved.yaml").read_text() == resolved
        assert children(up.pid) == pids
        gate.unlink()
        assert up.wait(PATIENCE_SECONDS) == 0
    assert check_promise(config).dropped == {}
    assert "started again" not in started.text("up")


@pytest.mark.long
def test_up_is_killed_and_started_again_at_once_five_times(tmp_path):
    """Whatever its actors are at: they are waited for, no new one fails, and the run completes as promised."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        trainer={"max_steps": 10, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
        telemetry={"metrics_port": free_port()},
        bus={"lease": 4.0},  # that no import of a busy machine outlasts: a lost lease would start an actor again
    )
    moments = [
        lambda up: children(up.pid),
        lambda up: len(children(up.pid)) == len(NAMES),
        lambda up: held_by(config, "rollout-0"),
        lambda up: steps_recorded(config) >= 3,
        lambda up: steps_recorded(config) >= 6,
    ]
    with processes(config, tmp_path) as started:
        killed = []
        for moment in moments:
            up = started.up()
            wait_until(lambda moment=moment, up=up: moment(up), "the moment to kill")
            up.kill()
            killed.append(up)
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        for up in killed:
            up.wait()
        text = started.text("up")
    assert check_promise(config).dropped == {}
    assert "started again" not in text
    assert "still held" not in text


@pytest.mark.slow
def test_kill_9_of_up_takes_all_children_along_and_the_run_can_be_taken_up(tmp_path):
    """2 s after SIGKILL of `actors up` no actor lives; the same command completes the run with nothing lost."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.05}},
        reward=held_reward(tmp_path, calls=12),
        trainer={"max_steps": 8, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
        bus=SHORT_LEASE,
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        pids = children(up.pid)
        assert set(pids) == NAMES
        up.kill()
        go_on(tmp_path)
        wait_until(lambda: all(map(has_ended, pids.values())), "no child lives")
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_second_sigterm_to_up_ends_everything_at_once(tmp_path):
    """Groups that take a minute are not waited for after the second signal."""
    config = ring_config(tmp_path, inference={"engine": {"type": "fake", "token_seconds": 10.0}})
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: held_by(config, "rollout-0"), "tickets are held")
        pids = children(up.pid)
        up.terminate()
        wait_until(lambda: "a second signal kills all" in started.text("up"), "the first signal was taken")
        up.terminate()
        assert up.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        wait_until(lambda: all(map(has_ended, pids.values())), "no child lives")
    assert "step has been saved" not in started.text("up"), "a soft stop ends with this, once all have drained"


@pytest.mark.slow
def test_reward_that_always_raises_fails_the_run_with_its_words(tmp_path):
    """Exit 1 and the function's own message on stderr; no hang, no restart."""
    config = ring_config(tmp_path, reward=own_reward("failing"), eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 1
        assert not list(Path(config.weights.directory).iterdir())
        assert "run failed: 32 groups in a row were dropped as poison" in started.text("up")
        assert "failing raised RuntimeError: the judge is out of order" in started.text("up")


@pytest.mark.slow
def test_actor_in_a_crash_loop_fails_the_run_by_name(tmp_path):
    """A reward function that ends its process: after up.max_restarts the failure names actor, exit code and log."""
    config = ring_config(tmp_path, reward=own_reward("ending"), eval={"num_prompts": 0}, up={"max_restarts": 1})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 1
        text = started.text("up")
    assert "reward-0 ended with exit code 5, started again" in text
    assert "reward-0 ended 2 times within 60 s of its start, last with exit code 5 (up.max_restarts 1)" in text
    assert str(config.output / "logs" / "reward-0.log") in text


@pytest.mark.slow
def test_up_with_a_reward_that_can_not_be_imported_ends_with_2_and_plain_words(tmp_path):
    """What only an actor can find out ends the run at once, with the actor's words, without restarts."""
    config = ring_config(tmp_path, reward={"functions": [{"path": "no_such_package:function"}]})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 2
        lines = started.text("up").splitlines()
    said = lines[lines.index("reward-0: its configuration can't be used") + 1 :]
    assert len(said) == 2
    assert said[0].startswith("reward.functions.0.path: ")
    assert "no_such_package" in said[0]
    assert said[1] == f"log: {config.output / 'logs' / 'reward-0.log'}"
