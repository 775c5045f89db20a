"""Runs that are stopped, killed, rewound, forked and replayed (P18, P19, P22, P23): nothing lost, the same bits."""

import json
import re
import shutil
from pathlib import Path

import pytest

from actors.assembly import make_learner
from actors.learner.checkpoints import CheckpointFolder, Writer
from actors.ledger import LedgerReader
from actors.ops.replay import replay
from actors.ops.resume import compare, rewind
from schemas.config import RunConfig, dump_config
from schemas.config.data import JsonlConfig
from schemas.errors import ConfigError
from tests.ring.harness import (
    ALL,
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    REWARDS,
    SHORT_LEASE,
    check_promise,
    ring,
    ring_config,
    steps_recorded,
    summary_of,
    wait_until,
    watching,
)
from tests.ring.witness_checker import check_witnesses

pytestmark = pytest.mark.slow

TWO_RANKS = ("packer-0", "trainer-0", "trainer-1", "inference-0", "reward-0", "rollout-0")


def level_0(folder: Path, steps: int = 9, **sections) -> RunConfig:
    """A run whose result is a function of its configuration: tokens depend on the weights' digest, lag is 0."""
    sections.setdefault("bus", SHORT_LEASE)  # a packer that starts again waits for one
    sections["trainer"] = {"max_steps": steps, "checkpoint": {"interval": 3}} | sections.get("trainer", {})
    return ring_config(
        folder, "ipc", packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0},
        eval={"num_prompts": 0}, **sections,
    )  # fmt: skip


def resolved(config: RunConfig) -> None:
    """What `actors up` leaves for the commands that are given a directory."""
    (config.output / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")


def weights_of(config: RunConfig) -> str:
    """The digest that stands for the weights of the last checkpoint."""
    step = config.trainer.max_steps
    return json.loads((config.output / "checkpoints" / f"step_{step}" / "trainer" / "fake.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    """The weights that a run of this configuration reaches when nothing happens to it."""
    config = level_0(tmp_path_factory.mktemp("undisturbed"))
    with ring(config) as run:
        run.start().wait()
    return weights_of(config)


@pytest.mark.parametrize("checkpoint", [{"interval": 3}, {"interval_share": 0.3, "keep_last": 1}], ids=["many", "one"])
def test_a_run_whose_actors_are_killed_reaches_the_same_weights(tmp_path, undisturbed, checkpoint):
    """Packer, rollout, trainer, reward and engine crash one after the other; bit for bit the same result."""
    slow = {"engine": {"type": "fake", "token_seconds": 0.003}}
    config = level_0(tmp_path, inference=slow, trainer={"checkpoint": checkpoint})
    with ring(config) as run:
        run.start()
        for step, kind in enumerate(("packer", "rollout", "trainer", "reward", "inference"), start=1):
            run.crash(f"{kind}-0", step)
            run.start(f"{kind}-0")
        run.wait(PATIENCE_SECONDS)
    assert check_promise(config).dropped == {}
    assert weights_of(config) == undisturbed
    if "keep_last" in checkpoint:
        assert [path.name for path in (config.output / "checkpoints").glob("step_*")] == ["step_9"]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on_reaches_the_same_weights(tmp_path, undisturbed):
    """All actors drain at step 4, which no interval asks to be saved, and are started again."""
    config = level_0(tmp_path, inference={"engine": {"type": "fake", "token_seconds": 0.003}})
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        for kind in ("rollout", "reward", "trainer", "inference", "packer"):
            run[f"{kind}-0"].actor.drain()
            run[f"{kind}-0"].thread.join(PATIENCE_SECONDS)
    stopped_at = max(int(p.name.removeprefix("step_")) for p in (config.output / "checkpoints").glob("step_*"))
    assert 4 <= stopped_at < 9
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}
    assert weights_of(config) == undisturbed


@pytest.mark.parametrize("victim", ["trainer-0", "trainer-1"])
def test_two_ranks_lose_one_and_both_start_anew(tmp_path, victim):
    """The gang breaks when either rank crashes; the other is told to exit, and the next incarnation trains the rest."""
    slow = {"engine": {"type": "fake", "token_seconds": 0.003}}
    config = level_0(tmp_path, trainer={"num_ranks": 2}, inference=slow, bus={"lease": LEASE_SECONDS})
    other = "trainer-1" if victim == "trainer-0" else "trainer-0"
    with ring(config) as run:
        run.start(*TWO_RANKS).crash(victim, step=4)
        run.start(victim)
        wait_until(lambda: not run[other].thread.is_alive(), "the other rank is told to exit")
        assert type(run[other].error).__name__ == "StartOverError"
        run.start(other).wait(PATIENCE_SECONDS)
    assert check_promise(config).dropped == {}


def test_a_bad_newest_checkpoint_falls_back_to_the_one_before(tmp_path, undisturbed):
    """step_6 is damaged: the run goes on from step_3, by name in the log, and ends with the same weights."""
    config = level_0(tmp_path)
    with ring(config) as run:
        run.start().wait()
    folder = config.output / "checkpoints"
    shutil.rmtree(folder / "step_9")
    (folder / "step_6" / "trainer" / "fake.json").write_text('"damaged"')
    with ring(config) as run:
        run.start().wait()
    assert check_promise(config).dropped == {}
    assert weights_of(config) == undisturbed


def test_a_rewound_run_trains_the_same_steps_again(tmp_path, undisturbed):
    """With --same-groups, back from step 9 to step 6: the result is the same, and nothing is sampled anew."""
    config = level_0(tmp_path)
    with ring(config) as run:
        run.start().wait()
    resolved(config)
    assert rewind(config.output, 6, same_groups=True).splitlines() == [
        "moved step_9 to checkpoints/dead",
        "the next `actors up` continues from step 6, and trains the later steps again on the same groups",
    ]
    with ring(config) as run:
        run.start().wait()
    assert summary_of(config)["ledger"]["issued"] == 27
    assert check_promise(config).dropped == {}
    assert weights_of(config) == undisturbed


def test_a_rewound_run_samples_anew_what_came_after_its_checkpoint(tmp_path):
    """The groups of steps 7 to 9 are given up as forked, and their examples sampled again by the policy of step 6."""
    config = level_0(tmp_path)
    with ring(config) as run:
        run.start().wait()
    resolved(config)
    before = check_witnesses(config.output)
    assert "samples the later steps again" in rewind(config.output, 6)
    with ring(config) as run:
        run.start().wait()
    said = check_promise(config)
    assert set(said.dropped) == set(before.trained[18:])
    assert set(said.dropped.values()) == {"forked"}
    assert said.trained[:18] == before.trained[:18]
    assert summary_of(config)["ledger"]["issued"] == 36
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["lag_max"] for line in lines[6:]] == [0.0, 0.0, 0.0]


def test_a_fork_that_no_identity_key_asks_for_is_done_once_for_each_command(tmp_path):
    """The packer is started again with the same arguments when it crashes, and must not give up work a second time."""
    config = level_0(tmp_path, inference={"engine": {"type": "fake", "token_seconds": 0.003}})
    others = [f"{kind}-0" for kind in ALL if kind != "packer"]
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        for name in (f"{kind}-0" for kind in ALL):
            run[name].crash()
    with ring(config) as run:
        run.start("packer-0", fork=True, started_at=1.0).start(*others)
        wait_until(lambda: steps_recorded(config) >= 5, "step 5, sampled again")
        run["packer-0"].crash()
        run.start("packer-0", fork=True, started_at=1.0).wait()
    said = check_promise(config)
    assert set(said.dropped.values()) == {"forked"}
    kept = [ordinal for ordinal in said.trained if ordinal < min(said.dropped)]
    assert kept == list(range(min(said.dropped)))
    assert len(kept) % 3 == 0, "whole steps"
    assert max(said.dropped) - min(said.dropped) + 1 == len(said.dropped), "given up in one go"


def test_a_new_run_started_with_fork_keeps_its_work_when_its_packer_is_started_again(tmp_path):
    """`actors up --fork` in an empty output_dir: a packer that is told `--fork` a second time gives nothing up."""
    config = level_0(tmp_path, inference={"engine": {"type": "fake", "token_seconds": 0.003}})
    with ring(config) as run:
        run.start("packer-0", fork=True, started_at=1.0).start(*(f"{kind}-0" for kind in ALL if kind != "packer"))
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        run["packer-0"].crash()
        run.start("packer-0", fork=True, started_at=1.0).wait()
    assert check_promise(config).dropped == {}


def test_a_rewind_to_a_checkpoint_of_a_dead_history_is_refused(tmp_path):
    """The gang could not start from it: step 9 of before a rewind was put back in the place of the present one."""
    config = level_0(tmp_path)
    checkpoints = config.output / "checkpoints"
    with ring(config) as run:
        run.start().wait()
    resolved(config)
    rewind(config.output, 6)
    with ring(config) as run:
        run.start().wait()
    shutil.rmtree(checkpoints / "step_9")
    (checkpoints / "dead" / "step_9").rename(checkpoints / "step_9")
    with pytest.raises(ConfigError, match=r"--step 9: .*step_9 is of another history than the ledger"):
        rewind(config.output, 9)
    ledger = LedgerReader.of(config.ledger_path)
    assert ledger.value("going_back") is None
    ledger.close()
    assert "from step 6" in rewind(config.output, 6)


def test_a_rewind_with_an_older_copy_of_the_ledger_is_refused_and_stores_no_order(tmp_path):
    """A later gang than the ledger knows has written checkpoints: nothing is stored or moved."""
    config = level_0(tmp_path)
    with ring(config) as run:
        run.start().wait()
    folder = CheckpointFolder(config.output / "checkpoints", config.trainer.checkpoint)
    ledger = LedgerReader.of(config.ledger_path)
    folder.take(Writer(ledger.value("run"), 4, "of a later gang"))
    with pytest.raises(ConfigError, match=r"incarnation=4.* is an older copy .*actors restore"):
        rewind(config.output, 6)
    assert ledger.value("going_back") is None
    ledger.close()
    assert (config.output / "checkpoints" / "step_9").is_dir()


def test_a_rewind_that_is_not_possible_says_why(tmp_path):
    """No such checkpoint; a packer at work; no run."""
    config = level_0(tmp_path, steps=6)
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 1, "step 1")
        resolved(config)
        with pytest.raises(ConfigError, match="another packer holds"):
            rewind(config.output, 3)
        run.wait()
    with pytest.raises(ConfigError, match=r"--step 4: there is no checkpoint of this step; there are 3, 6$"):
        rewind(config.output, 4)
    with pytest.raises(ConfigError, match=r"there is no run \(config.resolved.yaml is missing\)"):
        rewind(tmp_path / "elsewhere", 3)


def test_another_identity_is_refused_by_key_and_forked_on_request(tmp_path):
    """Refused by key; with fork what came after the newest durable step is given up, and its examples come again."""
    config = level_0(tmp_path, steps=6, inference={"engine": {"type": "fake", "token_seconds": 0.003}})
    with ring(config) as run:
        run.start()
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        for name in (f"{kind}-0" for kind in ALL):
            run[name].crash()
    changed = level_0(tmp_path, steps=6, rollout={"group_size": 4, "max_tokens": 12})
    resolved(config)
    text, allowed = compare(changed, config.output)
    assert not allowed
    assert "identity  rollout.group_size: 2 so far, 4 now" in text
    with ring(changed) as run, pytest.raises(ConfigError, match=r"rollout\.group_size: 2 so far, 4 now; .*--fork"):
        run.start("packer-0")
    with ring(changed) as run:
        run.start("packer-0", fork=True).start(*(f"{kind}-0" for kind in ALL if kind != "packer")).wait()
    said, ledger = check_witnesses(config.output), summary_of(config)["ledger"]
    assert said.steps == 6
    assert set(said.dropped.values()) == {"forked"}
    assert ledger["issued"] == ledger["trained"] + ledger["dropped"]["forked"]
    assert ledger["in_flight"] == ledger["trained_twice"] == 0
    assert len(said.trained) == 18
    kept = [group for group in said.trained if group < 9]
    assert kept == list(range(9)), "the three steps that were durable stand"


def test_data_that_has_changed_is_refused_and_rows_that_are_added_are_not(tmp_path):
    """Before anything is asked of the new rows; with fork their run goes on from the newest checkpoint."""
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{word}=", "answer": word[::-1]} for word in ("abc", "def", "ghi", "jkl", "mno")]

    def write(rows: list[dict[str, str]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run_to(step: int, **packer: bool) -> None:
        config = level_0(tmp_path, steps=step).model_copy(update=environments)
        with ring(config) as run:
            run.start("packer-0", **packer).start(*(f"{kind}-0" for kind in ALL if kind != "packer")).wait()

    write(rows)
    environments = {"environments": [JsonlConfig(type="jsonl", path=str(path))]}
    run_to(3)
    write([*rows, {"prompt": "pqr=", "answer": "rqp"}])
    run_to(6)
    write([*rows[::-1], {"prompt": "pqr=", "answer": "rqp"}])
    config = level_0(tmp_path, steps=9).model_copy(update=environments)
    resolved(config)
    text, allowed = compare(config, config.output)
    assert not allowed
    assert f"identity  environments[].path: {path} is not the data of this run" in text
    with (
        ring(config) as run,
        pytest.raises(ConfigError, match=r"6 rows so far, 6 now, and earlier rows have changed"),
    ):
        run.start("packer-0")
    run_to(9, fork=True)
    check_promise(config)


def test_a_step_is_replayed_to_the_bit(tmp_path):
    """Loss, gradient norm and weights of steps with and without a checkpoint before them; a changed line is seen."""
    config = level_0(tmp_path, trainer={"num_ranks": 2}, ledger={"keep_steps": 100})
    with ring(config) as run:
        run.start(*TWO_RANKS).wait()
    for step, start in ((1, 0), (5, 3), (9, 6)):
        result = replay(config, step, make_learner(config))
        assert (result.start, set(result.same.values())) == (start, {True}), str(result)
    path = config.output / "metrics.jsonl"
    path.write_text(re.sub(r'"grad_norm": [01].0', '"grad_norm": 2.0', path.read_text()))
    result = replay(config, 5, make_learner(config))
    assert result.same == {"loss": True, "grad_norm": False, "weights": True}
    assert f"grad_norm  2.0                      {result.replayed['grad_norm']}                      DIFFERENT" in str(
        result
    )
    learner = make_learner(config)
    learner.inexact = "computed on a GPU without trainer.deterministic"
    rounded = replay(config, 5, learner)
    assert rounded.same == {"loss": True, "grad_norm": False}
    assert "computed on a GPU without trainer.deterministic, so weights are not compared" in str(rounded)
    with pytest.raises(ConfigError, match=r"--step 99: .* has no line of this step; it has 1 to 9"):
        replay(config, 99, make_learner(config))


@pytest.mark.parametrize(
    "reward",
    [
        {"advantage": {"type": "gdpo"}},
        {"advantage": {"type": "batch_std"}, "shaping": {"scale": 3.0}},
        {"advantage": {"type": "process"}, "steps": {"path": f"{REWARDS}:first_and_last"}},
        {"advantage": {"type": "gae", "discount": 0.9, "reward_norm": "mean"}},
        {"advantage": {"type": "custom", "path": f"{REWARDS}:positive_share"}},
    ],
    ids=lambda reward: reward["advantage"]["type"],
)
def test_advantages_of_every_level_are_replayed_to_the_bit(tmp_path, reward):
    """They follow from the payloads of the step's groups and the settings alone (P18), and its line tells of them."""
    functions = [{"path": "length_penalty", "kwargs": {"max_tokens": 12}}, {"path": f"{REWARDS}:constant"}]
    config = level_0(tmp_path, steps=4, reward=reward | {"functions": functions}, ledger={"keep_steps": 100})
    with ring(config) as run:
        run.start().wait()
    result = replay(config, 4, make_learner(config))
    assert set(result.same.values()) == {True}, str(result)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert max(line["advantage_std"] for line in lines) > 0
    if reward["advantage"]["type"] == "gdpo":  # a z-score over the step, unless its groups are all without variance
        assert any(line["advantage_std"] == pytest.approx((5 / 6) ** 0.5, abs=1e-3) for line in lines)


def test_a_step_whose_groups_are_gone_is_not_replayed_but_named(tmp_path):
    """The ledger keeps groups back to the oldest checkpoint; what is before says which key keeps more."""
    config = level_0(tmp_path, steps=12, trainer={"checkpoint": {"interval": 2, "keep_last": 2}})
    with ring(config) as run:
        run.start().wait()
    with pytest.raises(ConfigError, match=r"--step 2: the ledger has the groups of steps from \d+ on.*keep_steps"):
        replay(config, 2, make_learner(config))


def test_a_rank_that_does_not_come_is_named(tmp_path):
    """Screens say whom the run waits for, by the name of the rank, until it is there."""
    config = level_0(tmp_path, trainer={"num_ranks": 2})
    with ring(config) as run:
        run.start(*(name for name in TWO_RANKS if name != "trainer-1"))
        with watching(config) as watcher:
            wait_until(lambda: watcher.progress().get("missing") == ["trainer-1"], "trainer-1 is missed")
            run.start("trainer-1")
            wait_until(lambda: watcher.progress().get("missing") == [], "nobody is missed")
        run.wait(PATIENCE_SECONDS)
