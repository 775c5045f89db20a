"""What a step and an evaluation are summed up to, by hand; and what becomes of a record that can't be written."""

import contextlib
import json
import math
import os
import re
import time
from unittest.mock import Mock

import numpy as np
import pytest

from actors.ledger import Changes, Machine, Step, Store
from actors.packer import record as record_module
from actors.packer.record import RunRecord
from actors.packer.results import evaluate, pass_at, step_values
from actors.packer.settings import settings_of
from actors.process.output_dir import take
from actors.telemetry import retrying_writer
from actors.telemetry import writer as writer_module
from actors.telemetry.metrics import TRAJECTORY_GAUGES, Metrics
from actors.telemetry.reporter import Reporter
from schemas.errors import RunFailedError
from schemas.messages import InferenceHeartbeat, PolicyVersion, ScoredGroup, StepReport, TrainerHeartbeat
from tests.actors.reward.test_loop import group
from tests.ring.harness import check_promise, ring, ring_config, summary_of, wait_until, watching

NAN = math.nan
FAILURES = "grpo_packer_record_failures_total"


def scored(rewards: list[float], advantages: list[float], version: int = 0, last: list[float] | None = None):
    """The group of completions `a` (1 token) and `bb` (2 tokens) with these rewards."""
    values = np.array([rewards, last or rewards], np.float64)
    return ScoredGroup(
        **group().__dict__ | {"segments": np.array([[0, 1, version, 0, 0], [1, 1, version, 0, 0]])},
        scorer="reward-0", reward_names=["f", "g"], rewards_FG=values, rewards_G=np.array(rewards, np.float64),
        advantages_G=np.array(advantages, np.float32),
    )  # fmt: skip


def test_step_values_are_those_of_its_completions():
    """Step 3 of groups with rewards (0, 1) of version 2 and (1, none) of version 1: lags 0 and 1, 3 scored."""
    values = step_values(3, [scored([0.0, 1.0], [-1, 1], 2), scored([1.0, NAN], [0, 0], 1)])
    assert values["reward_mean"] == 2 / 3
    assert values["reward_unscorable"] == 0.25
    assert values["groups_without_variance"] == 0.5
    assert (values["advantage_mean"], values["advantage_std"]) == (0.0, 0.5**0.5)
    assert values["completion_tokens_mean"] == 1.5
    assert values["completion_tokens_max"] == 2.0
    assert values["truncated_fraction"] == 0.0
    assert (values["lag_mean"], values["lag_max"]) == (0.5, 1.0)
    assert values["num_completions"] == 4.0
    assert values["reward/f"] == values["reward/g"] == 2 / 3


def trajectories(**changes):
    """Trajectories of 2 and 4 turns; the second has a branch, and so two samples, and its environment failed."""
    fields = {
        "transcripts": ["[[], [], {}]"] * 2,
        "counts": np.array([[2, 1, 0], [4, 0, 1]]),
        "failures": ["", "env_step: the board is broken"],
        "sample_offsets": np.array([0, 1, 2, 3]),
        "sample_completions": np.array([0, 1, 1]),
        "sample_prompts": np.array([0, 0, 0]),
    }
    return scored([1.0, NAN], [1, 0]).model_copy(update=fields | changes)


def test_a_step_with_trajectories_has_their_means():
    """Completions of single turns do not count; without trajectories there is none of the columns."""
    values = step_values(3, [scored([0.0, 1.0], [-1, 1]), trajectories(), trajectories(failures=[])])
    assert (values["turns_mean"], values["tool_calls_mean"]) == (3.0, 0.5)
    assert (values["samples_per_completion"], values["failed_fraction"]) == (1.5, 0.25)
    assert not step_values(3, [scored([0.0, 1.0], [-1, 1])]).keys() & set(TRAJECTORY_GAUGES)


def test_advantages_of_tokens_are_counted_by_token():
    """The second group's tokens have 0, 1 and −1, in two completions of the mean 0."""
    tokens = np.array([0, 1, -1], np.float32)
    groups = [scored([1.0, 1.0], [0, 0]).model_copy(update={"token_advantages": advantages})
              for advantages in (np.zeros(3, np.float32), tokens)]  # fmt: skip
    values = step_values(1, groups)
    assert (values["groups_without_variance"], values["advantage_std"]) == (0.5, (2 / 6) ** 0.5)


def test_evaluation_counts_matches_of_the_last_function_over_all_completions():
    """exact_match (1, 0) and (1, none): 2 of 4; rewards (0.5, 0.5) and (1, none): mean 2/3 of those scored."""
    results = evaluate([scored([0.5, 0.5], [0, 0], last=[1.0, 0.0]), scored([1.0, NAN], [0, 0], last=[1.0, NAN])])
    assert results == {
        "e": {
            "exact_match": 0.5, "mean_reward": 2 / 3, "reward_std": pytest.approx((1 / 18) ** 0.5), "num_prompts": 2,
            "num_completions": 4, "reward/f": 2 / 3, "pass@2": 1.0,
        }
    }  # fmt: skip


def test_evaluation_finds_rewards_by_name():
    """A group whose environment gave up without a reward has exact_match alone, whichever group is the first."""
    given = scored([0.0, 1.0], [0, 0], last=[0.0, 0.0])
    none = given.model_copy(update={"reward_names": ["g"], "rewards_FG": given.rewards_FG[1:]})
    for groups in ([given, none], [none, given]):
        assert evaluate(groups)["e"]["reward/f"] == 0.5


def test_pass_at_k_is_the_unbiased_estimate():
    """One of four correct: two draws have it with 3/6, all four always; without a match there is none to pass."""
    assert [pass_at(k, 4, 1) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert (pass_at(2, 4, 0), pass_at(2, 4, 3)) == (0.0, 1.0)
    unmeasured = evaluate([scored([0.5, 0.5], [0, 0], last=[NAN, NAN])])
    assert unmeasured["e"]["exact_match"] is None
    assert "pass@2" not in unmeasured["e"]


def test_progress_tells_the_pace_and_the_first_and_newest_evaluation(told):
    """Of three evaluations two are shown."""
    told.turn(evals=[(version, [scored([0.5, 0.5], [0, 0], last=[1.0, 0.0])]) for version in (0, 1, 2)])
    told.train(1, 2)
    told.turn()
    progress = told.record.progress()
    assert progress["evals"] == {v: {"e": {"exact_match": 0.5, "mean_reward": 0.5}} for v in ("0", "2")}
    assert progress["seconds_per_step"] >= 0


def heartbeat(tokens: int, boot_id: str = "b") -> InferenceHeartbeat:
    """An engine that has generated so many tokens since its start."""
    return InferenceHeartbeat(
        run="r", name="inference-0", boot_id=boot_id, sequence=1, phase="running", url="http://x",
        engine_state="clean", policy=PolicyVersion(lineage=1, version=0), load=0, generated_tokens=tokens,
        holds_two_versions=False, update_seconds={},
    )  # fmt: skip


def test_generated_tokens_are_counted_once_over_restarts_of_engine_and_packer(tmp_path):
    """100, then 150; the packer restarts and hears 180; the engine restarts and has 20: 200 in all."""
    config, store = ring_config(tmp_path, "inproc"), Store(":memory:")

    def record() -> RunRecord:
        machine = Machine(settings_of(config), store.run, store.term, 0.0, draw=lambda excluded=(): None)
        return RunRecord(config, store, machine, Metrics("packer"), Reporter(config.output), lambda o: None, None)

    first = record()
    first.heard("inference-0/b", heartbeat(100))
    first.heard("inference-0/b", heartbeat(150))
    store.commit(Changes(values=first.take_values()), {})
    second = record()
    second.heard("inference-0/b", heartbeat(180))
    second.heard("inference-0/c", heartbeat(20, "c"))
    assert second.take_values(is_last=True)["generated"] == 200
    store.close()


class Told:
    """A record of a run of three steps, one group each, and the machine and folder that it is about."""

    def __init__(self, folder, store=None):
        config = ring_config(folder, "inproc", trainer={"max_steps": 3}, telemetry={"sample_groups_per_step": 1})
        self.output, self.store = config.output, store or Store(":memory:")
        self.machine = Machine(settings_of(config), self.store.run, self.store.term, 0.0, draw=lambda excluded=(): None)
        self.machine.steps.composed = {step: Step(step, (step,), (), ("",), "") for step in (1, 2, 3)}
        self.machine.groups.num_issued["train"] = 3
        values = self.store.values()
        self.machine.recorded_step = values.get("recorded_step", 0)
        self.metrics = Metrics("packer")
        self.groups = {}
        """Groups other than those of `load`, by ordinal."""
        reporter = Reporter(self.output)
        self.record = RunRecord(config, self.store, self.machine, self.metrics, reporter, self.load, 0.0)

    def load(self, ordinal):
        """A group whose rewards are 0 and the ordinal."""
        return self.groups.get(ordinal) or scored([0.0, float(ordinal)], [-1, 1])

    def train(self, *steps, **values):
        """Rank 0 has trained and reported these steps."""
        self.report(*steps, **values)
        self.machine.trained_step = steps[-1]

    def report(self, *steps, incarnation=0, weights="", **values):
        """Rank 0 says what it measured."""
        reports = [StepReport(step=step, values={"tokens": 3.0} | values, weights=weights) for step in steps]
        self.record.heard("trainer-0/t", trainer(incarnation, reports))

    def turn(self, evals=()):
        """One round of the packer."""
        self.record.follow(evals)
        self.store.commit(Changes(values=self.machine.take_changes().values | self.record.take_values()), {})
        self.record.conclude()

    def finish(self):
        """All is done but the record."""
        self.machine.durable_step = 3

    def lines(self, name="metrics.jsonl"):
        """What stands in a file."""
        path = self.output / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    @contextlib.contextmanager
    def full(self, *names):
        """These files are on a disk without room."""
        for name in names:
            path = self.output / name
            if path.exists():
                path.rename(path.with_suffix(".aside"))
            path.symlink_to("/dev/full")
        yield
        for name in names:
            path = self.output / name
            path.unlink()
            if path.with_suffix(".aside").exists():
                path.with_suffix(".aside").rename(path)

    @property
    def num_failures(self):
        """As Prometheus sees it."""
        return self.metrics.registry.get_sample_value(FAILURES)


def trainer(incarnation, reports):
    """A heartbeat of rank 0."""
    return TrainerHeartbeat(
        run="r", name="trainer-0", boot_id="t", sequence=1, phase="running", rank=0, num_ranks=1, address="",
        incarnation=incarnation, next_step=1, checkpoints=[], published=[], reports=reports,
        received=np.zeros(0, np.int64),
    )  # fmt: skip


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A record that tries again at once."""
    monkeypatch.setattr(retrying_writer, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(record_module, "RETRY_SECONDS", 0.0)
    # a writer's thread that is held up is no file system that hangs
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 60.0)
    made = Told(tmp_path)
    yield made
    made.store.close()


def test_step_that_can_t_be_written_is_written_later_once(told):
    """No room for steps 1 and 2, in three rounds; then there is, and step 3 comes: three lines, in order."""
    with told.full("metrics.jsonl"):
        told.train(1, 2)
        for _ in range(3):
            told.turn()
        assert told.machine.recorded_step == 0
        assert told.num_failures == 3
    told.train(2, 3)  # said again until the directive confirms it
    told.turn()
    told.turn()
    assert [line["step"] for line in told.lines()] == [1, 2, 3]
    assert [line["step"] for line in told.lines("samples.jsonl")] == [1, 2, 3]
    assert told.machine.recorded_step == 3
    assert told.record.progress()["reward"] == 1.5


def test_line_carries_the_time_at_which_its_step_was_reported(told):
    """Not that at which there was room: the times of an hour without room would all be the same."""
    told.record.clock = Clock(1000.0)
    with told.full("metrics.jsonl"):
        told.train(1)
        told.turn()
    told.record.clock = Clock(5000.0)
    told.train(1)
    told.turn()
    assert told.lines()[0]["time"] == 1000.0


class Clock:
    """Stands still."""

    def __init__(self, at):
        self._at = at

    def now(self):
        """The time."""
        return self._at


def test_a_step_of_the_machines_clock_changes_no_time_of_the_run(told, monkeypatch):
    """An hour back in the middle of a run, as a time server may set it: rates stay positive, times go on."""
    told.machine.groups.num_issued["train"] = 3
    told.train(1)
    told.turn()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    told.train(2, 3)
    told.finish()
    told.turn()
    summary = json.loads((told.output / "summary.json").read_text())
    assert summary["train_seconds"] > 0
    assert summary["tokens_per_second"] > 0
    times = [line["time"] for line in told.lines()]
    assert times == sorted(times)


def test_a_packer_that_starts_after_the_clock_went_back_goes_on_from_the_time_of_the_run(told, tmp_path, monkeypatch):
    """No time of the next term is before one of the term before."""
    told.train(1)
    told.turn()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    again = Told(tmp_path, told.store)
    again.train(2, 3)
    again.turn()
    times = [line["time"] for line in again.lines()]
    assert times == sorted(times)


def test_the_time_in_which_a_run_was_stopped_is_no_time_of_the_run(told, tmp_path, monkeypatch):
    """Stopped after step 1 and continued a week later: no duration and no pace has the week in it."""
    told.machine.groups.num_issued["train"] = 3
    told.train(1)
    told.turn()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7 * 24 * 3600.0)
    again = Told(tmp_path, told.store)
    assert 0 < again.record.progress()["seconds"] < 3600
    again.train(2)
    again.turn()
    assert again.record.progress()["seconds_per_step"] is None
    again.train(3)
    again.turn()
    assert again.record.progress()["seconds_per_step"] < 3600
    again.finish()
    again.turn()
    summary = json.loads((told.output / "summary.json").read_text())
    assert 0 < summary["train_seconds"] < summary["wall_seconds"] < 3600
    times = [line["time"] for line in again.lines()]
    assert times[1] - times[0] > 24 * 3600


def test_a_run_of_one_moment_has_no_rate(told):
    """All stamps are the same: the summary is written, without the rates that can't be told."""
    told.record.clock = Clock(1000.0)
    told.train(1, 2, 3)
    told.finish()
    told.turn()
    summary = json.loads((told.output / "summary.json").read_text())
    assert (summary["tokens_per_second"], summary["completions_per_second"]) == (None, None)
    assert summary["steps"] == 3


def test_a_file_system_that_hangs_holds_no_round_up_and_its_lines_come_later(told, monkeypatch):
    """metrics.jsonl is a pipe that nobody reads, whose opening waits: rounds go on, its lines are there in the end."""
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 0.25)
    path = told.output / "metrics.jsonl"
    os.mkfifo(path)
    told.train(1, 2)
    for _ in range(20):
        told.turn()
    assert told.machine.recorded_step == 0
    assert re.search(
        r"metrics.jsonl: the file system has not answered for \d+ s", told.record.progress()["unwritten"][0]
    )
    path.rename(path.with_suffix(".pipe"))
    os.close(os.open(path.with_suffix(".pipe"), os.O_RDONLY | os.O_NONBLOCK))  # the hanging call comes back
    wait_until(lambda: told.turn() or told.machine.recorded_step == 2, "both steps are recorded")
    assert [line["step"] for line in told.lines()] == [1, 2]


def test_a_run_whose_files_hang_to_the_end_ends_with_words_after_its_patience(told, monkeypatch):
    """As with a full disk: the path, what is wrong, and what to do."""
    monkeypatch.setattr(record_module, "RECORD_PATIENCE_SECONDS", 0.0)
    os.mkfifo(told.output / ".summary.json")
    told.train(1, 2, 3)
    told.turn()
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 0.25)
    told.finish()
    with pytest.raises(RunFailedError, match=r"summary.json: the file system has not answered for \d+ s"):
        told.turn()


def test_evaluation_that_can_t_be_written_is_kept_until_it_is(told):
    """Neither the ledger's values nor the machine hear of it before; the steps go on."""
    groups = [scored([1.0, 0.0], [0, 0]).model_copy(update={"purpose": "eval"})]
    with told.full("evals.jsonl"):
        told.train(1)
        told.turn([(0, groups)])
        told.turn()
        assert told.store.value("evals") == {}
        assert told.record.evaluated == []
        assert [line["step"] for line in told.lines()] == [1]
    told.turn()
    results = evaluate(groups)
    assert told.lines("evals.jsonl") == [{"version": 0, "environments": results}]
    assert told.store.value("evals") == {"0": results}
    assert told.record.evaluated == [0]


def test_samples_without_room_hold_nothing_up_and_come_later(told):
    """All steps are recorded meanwhile, and the summary is written at the end."""
    with told.full("samples.jsonl"):
        told.train(1, 2, 3)
        told.finish()
        told.turn()
        told.turn()
        assert told.machine.phase == "done"
        assert json.loads((told.output / "summary.json").read_text())["steps"] == 3
        assert told.num_failures >= 1
    told.turn()
    assert [line["step"] for line in told.lines("samples.jsonl")] == [1, 2, 3]


def test_addresses_of_metrics_without_room_hold_nothing_up(told, monkeypatch):
    """metrics_targets.json is for Prometheus, and is written when there is room."""
    monkeypatch.setattr(record_module, "GAUGE_SECONDS", 0.0)
    monkeypatch.setattr(record_module, "TARGETS_SECONDS", 0.0)
    told.record.metrics_target = ("packer", "packer-0", "http://127.0.0.1:9100/metrics")
    with told.full(".metrics_targets.json"):
        told.train(1)
        told.turn()
        assert told.num_failures == 1
    told.turn()
    assert json.loads((told.output / "metrics_targets.json").read_text())[0]["labels"]["name"] == "packer-0"


def test_run_whose_last_step_finds_no_room_ends_with_words_after_its_patience(told, monkeypatch):
    """Not while training or a checkpoint is still to come; then with the path, the reason, and what to do."""
    monkeypatch.setattr(record_module, "RECORD_PATIENCE_SECONDS", 0.0)
    with told.full("metrics.jsonl"):
        told.train(1, 2, 3)
        told.turn()
        told.finish()
        assert told.machine.phase == "finishing"
        with pytest.raises(
            RunFailedError, match=r"metrics.jsonl: No space left on device. Free space and start the same"
        ):
            told.turn()


def test_summary_waits_for_room_before_anybody_is_told_of_the_end(told, monkeypatch):
    """`conclude` returns when it is written: here there is room after the third attempt."""
    told.train(1, 2, 3)
    told.finish()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            (told.output / ".summary.json").unlink()

    monkeypatch.setattr(record_module, "time", Mock(wraps=time, sleep=nap))  # other threads sleep as ever
    (told.output / ".summary.json").symlink_to("/dev/full")
    told.turn()
    assert len(naps) == 3
    assert json.loads((told.output / "summary.json").read_text())["steps"] == 3


def test_run_whose_summary_finds_no_room_ends_with_words_after_its_patience(told, monkeypatch):
    """Nobody has been told of the end, so it is a failed run, and the same command goes on."""
    monkeypatch.setattr(record_module, "RECORD_PATIENCE_SECONDS", 0.0)
    told.train(1, 2, 3)
    told.finish()
    with told.full(".summary.json"), pytest.raises(RunFailedError, match=r"summary.json: No space left on device"):
        told.turn()


def test_restarted_packer_writes_what_was_not_committed_and_the_same_summary(told, tmp_path):
    """The line of step 2 is there, its commit is not: it is cut off, reported again, and stands there once."""
    told.train(1, grad_norm=0.5)
    told.turn()
    told.train(2, grad_norm=0.25)
    told.record.follow([])  # and the process dies before the commit
    again = Told(tmp_path, told.store)
    assert [line["step"] for line in again.lines()] == [1]
    assert again.record.progress()["grad_norm"] == 0.5
    again.train(2, 3, loss=0.25)
    again.finish()
    again.turn()
    before = json.loads((told.output / "summary.json").read_text())
    assert (before["steps"], before["trained_tokens"], before["reward_first"]) == (3, 9, 1.0)
    once_more = Told(tmp_path, told.store)
    assert not (told.output / "summary.json").exists(), "a run under way has no summary"
    once_more.machine.trained_step = 3
    once_more.finish()
    once_more.turn()
    after = json.loads((told.output / "summary.json").read_text())
    assert after | {"wall_seconds": 0} == before | {"wall_seconds": 0}
    assert [line["step"] for line in once_more.lines()] == [1, 2, 3]


def test_reports_of_recorded_steps_are_not_kept(told):
    """The trainer says them until it has heard that they are recorded; a run of weeks has many."""
    told.train(1)
    told.turn()
    told.train(1)
    told.train(1)
    assert told.record.reported == []


def test_reports_of_a_dead_history_are_not_taken_for_those_of_the_next(told):
    """Step 2 is trained again, by a gang that goes on from step 1; its report of it counts, not that of before."""
    told.train(1, loss=1.0)
    told.report(2, loss=2.0)
    told.machine.gang.incarnation, told.machine.gang.checkpoint = 1, 1
    told.turn()
    told.machine.trained_step = 2
    told.turn()
    assert [line["loss"] for line in told.lines()] == [1.0]
    told.report(2, incarnation=1, loss=2.5)
    told.turn()
    assert [line["loss"] for line in told.lines()] == [1.0, 2.5]


def test_step_whose_report_died_with_packer_and_trainer_is_recorded_without(told):
    """Both were killed when step 1 was in a checkpoint and not in the ledger's record: nobody will report it again."""
    told.machine.trained_step = 1
    gang = told.machine.gang
    gang.incarnation, gang.checkpoint, gang.members = 2, 1, {0: "trainer-0/t"}
    told.turn()
    assert told.lines() == [], "the gang has not entered yet, and may still tell"
    told.machine.peers.heard(0.0, "trainer-0/t", trainer(2, []))
    told.turn()
    assert [(line["step"], "loss" in line) for line in told.lines()] == [(1, False)]
    told.report(2, incarnation=2, loss=0.5)
    told.machine.trained_step = 2
    told.turn()
    assert told.machine.recorded_step == 2
    assert told.record.summary()["trained_tokens"] == 3


def test_reports_that_a_beat_has_no_room_for_are_waited_for(told):
    """A trainer goes on from a checkpoint with many unwritten reports; the oldest come first, and none is given up."""
    gang = told.machine.gang
    gang.incarnation, gang.checkpoint, gang.members = 2, 3, {0: "trainer-0/t"}
    told.machine.trained_step = 3
    for step in (1, 2, 3):
        reports = [StepReport(step=step, values={"tokens": 3.0, "loss": float(step)})]
        told.machine.peers.heard(0.0, "trainer-0/t", trainer(2, reports))
        told.record.heard("trainer-0/t", trainer(2, reports))
        told.turn()
        told.turn()
        assert told.machine.recorded_step == step
    assert [line["loss"] for line in told.lines()] == [1.0, 2.0, 3.0]


def test_digest_of_the_weights_is_in_the_line_and_in_no_sum(told):
    """What was published after the step."""
    told.train(1, weights="5e5e")
    told.turn()
    assert told.lines()[0]["weights"] == "5e5e"
    assert told.record.progress()["step"] == 1


def test_a_line_has_the_work_of_engines_since_the_line_before(told):
    """Also a line that found no room at first; the next line starts from zero."""
    told.record.heard("inference-0/b", heartbeat(30).model_copy(update={"busy_seconds": 1.5}))
    with told.full("metrics.jsonl"):
        told.train(1)
        told.turn()
    told.turn()
    told.record.heard("inference-0/b", heartbeat(50).model_copy(update={"busy_seconds": 2.0}))
    told.train(2)
    told.turn()
    found = [(line["engine_tokens"], line["engine_busy_seconds"], line["reward_groups"]) for line in told.lines()]
    assert found == [(30.0, 1.5, 0.0), (20.0, 0.5, 0.0)]


def test_backlog_is_written_in_parts_so_that_the_round_goes_on(told, monkeypatch):
    """Three steps, two a round."""
    monkeypatch.setattr(record_module, "STEPS_PER_ROUND", 2)
    told.train(1, 2, 3)
    told.turn()
    assert told.machine.recorded_step == 2
    told.turn()
    assert told.machine.recorded_step == 3


@pytest.mark.slow
def test_training_goes_on_while_the_disk_is_full_and_the_record_is_whole_in_the_end(tmp_path):
    """A run of real actors that has no room for metrics.jsonl and evals.jsonl until all steps are trained."""
    config = ring_config(tmp_path, "inproc")
    take(config)
    files = [config.output / "metrics.jsonl", config.output / "evals.jsonl"]
    for file in files:
        file.symlink_to("/dev/full")
    with ring(config) as run, watching(config) as watcher:
        run.start()
        wait_until(lambda: watcher.progress().get("step") == config.trainer.max_steps, "all steps trained")
        wait_until(lambda: run["packer-0"].value(FAILURES) >= 3, "tried again")
        assert watcher.progress()["phase"] == "finishing"
        for file in files:
            file.unlink()
        run.wait()
    check_promise(config)
    assert summary_of(config)["eval_before"] is not None
    assert [json.loads(line)["version"] for line in files[1].read_text().splitlines()] == [0, 8]


def test_progress_counts_the_newest_steps_that_taught_nothing(told):
    """Steps 1 and 2 have groups of different rewards and gradients of 0; the third has a gradient."""
    told.train(1, 2, grad_norm=0.0)
    told.turn()
    progress = told.record.progress()
    assert (progress["steps_without_variance"], progress["steps_without_gradient"]) == (0, 2)
    told.train(3, grad_norm=0.1)
    told.turn()
    assert told.record.progress()["steps_without_gradient"] == 0
