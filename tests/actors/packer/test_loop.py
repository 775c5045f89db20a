"""The packer around its machine: what it restores, and how it says that it can't go on."""

import contextlib
import errno
import json
import os
import sqlite3
import time

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.assembly import make_packer
from actors.packer.settings import facts_of
from actors.process.membership import Membership
from actors.telemetry.metrics import Metrics
from benchmarks.peers import lone_packer
from benchmarks.soak import config
from schemas.config import load_config
from schemas.config.data import JsonlConfig
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError, ProtocolError
from schemas.messages import PolicyVersion, RewardHeartbeat, ScoredGroup, StepReport
from tests.actors.packer.test_record import heartbeat as engine
from tests.actors.packer.test_record import trainer
from tests.actors.reward.test_loop import group
from tests.ring.harness import (
    SHORT_LEASE,
    check_promise,
    own_reward,
    ring,
    ring_config,
    steps_recorded,
    summary_of,
    wait_until,
    watching,
)


def test_facts_of_a_group_are_its_oldest_version_and_its_longest_sample():
    """A prompt of 1 token and completions of 1 and 2: longest sample 3; versions 4 and 6: oldest 4."""
    sampled = group().__dict__ | {"segments": np.array([[0, 1, 6, 0, 0], [1, 1, 4, 0, 0]], np.int64)}
    scored = ScoredGroup(
        **sampled, scorer="reward-0", reward_names=["f"], rewards_FG=np.zeros((1, 2)), rewards_G=np.zeros(2),
        advantages_G=np.zeros(2, np.float32),
    )  # fmt: skip
    facts = facts_of(scored, "digest")
    assert (facts.longest_sample, facts.oldest_version, facts.num_completions) == (3, 4, 2)
    assert facts.policies == {PolicyVersion(lineage=1, version=6), PolicyVersion(lineage=1, version=4)}


@pytest.mark.slow
def test_configuration_of_a_run_without_up_lies_in_its_folder(tmp_path):
    """For `actors status`, `top` and `rewind`; one that is refused is not written over it."""
    config = ring_config(tmp_path, "inproc", trainer={"max_steps": 2})
    with ring(config) as run:
        run.start().wait()
    assert load_config(config.output / RESOLVED) == config
    with pytest.raises(ConfigError, match="this makes another run"):
        make_packer(config.model_copy(update={"seed": 1}), "packer-0", Metrics("packer"))
    assert load_config(config.output / RESOLVED) == config


def test_folder_that_can_not_be_written_to_is_said_and_the_run_begins(tmp_path, monkeypatch):
    """The file is for people who look on; the ledger beside it waits for room by itself."""
    monkeypatch.setattr("actors.packer.start.write_resolved", failing)
    config = ring_config(tmp_path, "inproc", trainer={"max_steps": 2})
    with capture_logs() as lines, ring(config) as run:
        run.start().wait()
    [line] = [line for line in lines if "not written down" in line["event"]]
    assert line["detail"] == "[Errno 28] No space left on device"


def failing(config):
    """A full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_evaluation_that_was_not_written_down_before_a_crash_is_so_after_it(tmp_path):
    """The disk is full when the first one ends, and the packer dies: its groups are still there to be read."""
    config = ring_config(tmp_path, "inproc", trainer={"max_steps": 10}, bus=SHORT_LEASE)
    with ring(config) as run:
        run.start("packer-0")
        (config.output / "evals.jsonl").symlink_to("/dev/full")
        run.start("trainer-0", "inference-0", "reward-0", "rollout-0")
        wait_until(lambda: stored(config, "evals_done") == [0], "the first evaluation has ended")
        run["packer-0"].crash()
    assert not stored(config, "evals")
    (config.output / "evals.jsonl").unlink()
    with ring(config) as run:
        run.start().wait()
    assert summary_of(config)["eval_before"]["reverse_text"]["num_prompts"] == 3
    assert summary_of(config)["eval_after"]["reverse_text"]["num_prompts"] == 3
    lines = (config.output / "evals.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [0, 10]


def stored(config, key):
    """A value of the ledger's file."""
    with contextlib.closing(sqlite3.connect(config.ledger_path)) as ledger:
        row = ledger.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return json.loads(row[0]) if row else None


@pytest.mark.slow
def test_finished_run_that_is_started_again_writes_the_same_summary(tmp_path):
    """Everything but the times of the command is a function of the ledger and of metrics.jsonl."""
    config = ring_config(tmp_path, "inproc", trainer={"max_steps": 2}, bus=SHORT_LEASE)
    with ring(config) as run:
        run.start().wait()
    before = summary_of(config)
    with ring(config) as run:
        run.start().wait()
    after = summary_of(config)
    for summary in (before, after):
        del summary["wall_seconds"]
        del summary["weight_update_seconds"]  # medians of what this process has heard
    assert after == before


def test_ledger_that_has_lost_commits_fails_the_run_for_everybody(tmp_path):
    """A peer names ordinal 99, of which the ledger knows nothing (P5): all are told, with ledger.sync named."""
    config = ring_config(tmp_path, "inproc", bus={"lease": 0.6, "beat_interval": 0.1})
    with ring(config) as run, watching(config) as watcher:
        run.start("packer-0", "rollout-0")
        wait_until(lambda: watcher.progress().get("peers", {}).get("rollout"), "the packer is up")
        liar = Membership(config, RewardHeartbeat, "reward-9")
        liar.start(
            phase="running", address="inproc://nowhere", load=0, failures=[], holds=np.array([[99, 1]], np.int64)
        )
        failure = wait_until(lambda: watcher.progress().get("failure"), "the watcher is told")
        assert "ordinal 99" in failure
        assert "ledger.sync" in failure
        liar.close()
        for name in ("packer-0", "rollout-0"):
            run[name].thread.join(60.0)
            assert str(run[name].error) == failure
        assert isinstance(run["packer-0"].error, ProtocolError)


def test_a_packer_that_was_stopped_when_it_had_failed_tells_its_peers_all_the_same(tmp_path, monkeypatch):
    """Two leases go by before it reads the next heartbeat, and nobody else has had a turn either."""
    config = ring_config(tmp_path, "inproc", bus={"lease": 0.6, "beat_interval": 0.1})
    skipped, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + skipped[0])
    with ring(config) as run, watching(config) as watcher:
        run.start("packer-0", "rollout-0")
        wait_until(lambda: watcher.progress().get("peers", {}).get("rollout"), "the packer is up")
        packer, calls = run.packer, []
        take = packer.inflow.take

        def take_later(wait, gather=0.0):
            calls.append(wait)
            if len(calls) == 1:
                raise ProtocolError("the ledger has lost commits")
            if len(calls) == 2:
                skipped[0] = 20.0
                return []
            return take(wait)

        monkeypatch.setattr(packer.inflow, "take", take_later)
        for name in ("packer-0", "rollout-0"):
            run[name].thread.join(60.0)
            assert str(run[name].error) == "the ledger has lost commits"


def test_the_record_takes_no_figures_from_beats_that_the_machine_refuses(tmp_path):
    """A trainer and an engine of another run, and a late heartbeat: only the engine of this run counts."""
    packer = make_packer(ring_config(tmp_path, "inproc"), "packer-0", Metrics("packer"))
    own = engine(100).model_copy(update={"run": packer.machine.run, "sequence": 5})
    heartbeats = [
        engine(10_000, "other"),
        trainer(0, [StepReport(step=1, values={"loss": 666.0}, weights="")]),
        own,
        own.model_copy(update={"sequence": 4, "generated_tokens": 900}),
    ]
    for heartbeat in heartbeats:
        packer.heard(f"{heartbeat.name}/{heartbeat.boot_id}".encode(), heartbeat)
    packer.run_round(0.0)
    assert packer.record.reported == []
    assert packer.store.value("generated") == 100
    packer.drain()
    packer.run()


@pytest.mark.slow
def test_batches_of_a_gang_that_is_gone_go_with_it(tmp_path):
    """A trainer that dies again and again at one step would leave the batches of each of its gangs in memory."""
    sections = {"trainer": {"max_steps": 1000, "checkpoint": {"interval": 500}}, "eval": {"num_prompts": 0}}
    config = ring_config(tmp_path, "inproc", **sections)
    with ring(config) as run:
        batches = run.start().packer.batches
        wait_until(lambda: steps_recorded(config) >= 20, "20 steps")
        run["trainer-0"].crash()
        run.start("trainer-0")
        machine = run.packer.machine
        wait_until(lambda: machine.gang.incarnation == 2 and steps_recorded(config) >= 25, "the next gang trains")
        assert {incarnation for _, incarnation in batches.built} <= {2}, "it began at step 1: the first gang was later"


@pytest.mark.parametrize("bad", ["nonsense", "tcp://127.0.0.1", "tcp://192.0.2.1:5000", "tcp://127.0.0.1:5000#abcdef"])
def test_a_trainer_with_an_address_that_can_not_be_used_gets_no_batches_and_ends_no_packer(tmp_path, bad):
    """It is that trainer's fault: it is said, the packer goes on, and batches flow once the address is good."""
    with lone_packer(config(tmp_path, num_steps=2, eval={"num_prompts": 0})) as ring, capture_logs() as logs:
        ring.packer.batches.outboxes.clear()
        said = ring.trainer.fields
        ring.trainer.fields = lambda: said() | {"address": bad}
        said_of = lambda: [line["peer"] for line in logs if line["event"] == "trainer gets no batches"]  # noqa: E731
        wait_until(lambda: ring.turn() or said_of(), "it is said")
        assert ring.num_trained == 0
        ring.packer.batches.outboxes[ring.trainer.identity] = ring.trainer
        wait_until(lambda: ring.turn() or ring.over, "the run ends")
    assert said_of() == [ring.trainer.identity]


# --- group filters and pools -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_whose_rewards_are_all_equal_is_resampled_and_ends(tmp_path):
    """Four steps of three, each place resampled once: 24 ordinals, half of them dropped, in ledger and witness."""
    config = ring_config(
        tmp_path, "inproc", reward=own_reward("constant"), trainer={"max_steps": 4},
        packer={"dynamic_sampling": True, "max_resample_times": 1},
    )  # fmt: skip
    with ring(config) as run:
        run.start().wait()
    assert stored(config, "counters")["resampled_in_vain"] == 12
    check_promise(config)
    assert summary_of(config)["ledger"]["dropped"] == {"zero_variance": 12}


@pytest.mark.slow
def test_pools_survive_a_crash_of_the_packer_and_come_back_with_the_next_start_of_the_run(tmp_path):
    """Every reward is 1, so every example that was drawn is easy; a packer of the same `actors up` gives none back."""
    config = pool_config(tmp_path, rows=60, easy_fraction=0.5)
    with ring(config) as run:
        run.start(started_at=1.0).wait()
    before, drawn = pools_of(config), drawn_by(config)
    assert len(before) == len(drawn) == len(set(drawn)) == 24
    for started_at, expected in ((1.0, 24), (2.0, 12), (2.0, 12), (3.0, 6)):
        with ring(config) as run:
            run.start("packer-0", started_at=started_at)
            wait_until(lambda now=run["packer-0"]: now.turns, "it has restored")
        assert len(pools_of(config)) == expected
    assert pools_of(config).items() <= before.items()


@pytest.mark.slow
def test_run_goes_on_when_all_examples_are_in_pools(tmp_path, capsys):
    """Five examples, all easy after their first group, and 24 groups to train: they come back, and that is said."""
    config = pool_config(tmp_path, rows=5)
    with ring(config) as run:
        run.start().wait()
    check_promise(config)
    assert "all examples of an environment were easy or hard" in capsys.readouterr().out
    assert set(drawn_by(config)) == set(range(5))


def test_column_that_makes_the_key_of_an_example_and_is_not_there_is_named(tmp_path):
    """At the packer's start, before anything is issued."""
    config = pool_config(tmp_path, rows=2, hash_keys=["id"])
    with pytest.raises(ConfigError, match=r"packer\.pools\.hash_keys: not every example of jsonl has a column 'id'"):
        make_packer(config, "packer-0", Metrics("packer"))


def pool_config(folder, rows, **pools):
    """Eight steps of three over so many rows, each of which is easy at once."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "a"}) + "\n" for i in range(rows)))
    return ring_config(
        folder, "inproc", reward=own_reward("constant"), eval={"num_prompts": 0, "exact_match": None},
        packer={"pools": {"easy_threshold": 1.0, **pools}}, ledger={"keep_steps": 100},
    ).model_copy(update={"environments": [JsonlConfig(type="jsonl", path=str(path))]})  # fmt: skip


def pools_of(config):
    """Pool by key, as the ledger has it."""
    with contextlib.closing(sqlite3.connect(config.ledger_path)) as ledger:
        return dict(ledger.execute("SELECT key, pool FROM pools"))


def drawn_by(config):
    """The examples of all train ordinals."""
    with contextlib.closing(sqlite3.connect(config.ledger_path)) as ledger:
        return [example for (example,) in ledger.execute("SELECT example FROM groups WHERE ordinal >= 0")]
