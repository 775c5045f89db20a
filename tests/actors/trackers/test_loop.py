"""The tracker actor with a tracker in memory: each step once, whatever fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.metrics import Metrics
from actors.trackers import loop
from actors.trackers.journal import Journal
from actors.trackers.loop import MOST_CPU, TrackerActor, has_rest, is_evaluated, labels_of
from schemas.config import RunConfig
from schemas.config.data import EvalConfig
from tests.actors.trackers.doubles import MemoryTracker, Service, step_line, write
from tests.ring.harness import ring_config

RUN = "abcdef"


class Sender:
    """The process of a tracker, which can be started again; no sockets."""

    def __init__(self, folder: Path, service: Service, **tracker: Any) -> None:
        self.config = tracked(folder)
        self.config.output.mkdir(exist_ok=True)
        self.service, self.tracker = service, tracker
        self.start()

    def start(self) -> None:
        """Start, as after a kill -9."""
        self.metrics = Metrics("tracker")
        make = lambda: MemoryTracker(self.service, **self.tracker)  # noqa: E731 - a factory in one line
        self.actor = TrackerActor(self.config, 0, "tracker-0", self.metrics, make)
        self.journal = Journal(self.config.output / "trackers" / "wandb.jsonl", RUN)

    def turns(self, number: int = 6, *, is_over: bool = False) -> bool:
        """Take turns; return the result of the last one."""
        return [self.actor.turn(self.journal, is_over=is_over) for _ in range(number)][-1]

    def lines(self, *steps: int, **values: Any) -> None:
        """Replace metrics.jsonl."""
        write(self.config.output / "metrics.jsonl", [step_line(step, **values) for step in steps])

    def steps(self, run: str = RUN) -> list[int]:
        """Steps that the tracker has, in the order of their arrival."""
        return [entry.step for entry in self.service.runs[run]]


def tracked(folder: Path) -> RunConfig:
    """A run with a tracker and no evaluations."""
    return ring_config(folder, telemetry={"trackers": ["wandb"]}, eval={"num_prompts": 0})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.trackers.history.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "MOST_CPU", 1e9)


@pytest.mark.parametrize("can_tell", [True, False])
@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
def test_a_failure_at_any_step_loses_and_doubles_nothing(tmp_path: Path, can_tell: bool, when: str) -> None:
    """The tracker is opened again, and tells what it has, or is sent the steps that are not sure again."""
    for step in range(1, 6):
        service = Service()
        getattr(service, when).add(step)
        folder = tmp_path / f"{when}{step}"
        folder.mkdir()
        sender = Sender(folder, service, can_tell=can_tell)
        sender.lines(1, 2, 3, 4, 5)
        sender.turns()
        assert sender.steps() == [1, 2, 3, 4, 5]
        assert sender.metrics.registry.get_sample_value("grpo_tracker_failures_total") == 1
        assert sender.metrics.registry.get_sample_value("grpo_tracker_behind_steps") == 0


@pytest.mark.parametrize("can_tell", [True, False])
def test_a_killed_process_goes_on_where_the_tracker_is(tmp_path: Path, can_tell: bool) -> None:
    """Killed between the arrival of a step and its note; the run in the tracker stays the same."""
    service = Service()
    sender = Sender(tmp_path, service, can_tell=can_tell)
    sender.lines(1, 2, 3)
    service.fail_after.add(2)
    sender.turns(1)
    sender.start()
    sender.lines(1, 2, 3, 4)
    sender.turns()
    assert sender.steps() == [1, 2, 3, 4]
    assert list(service.runs) == [RUN]


def test_steps_that_a_buffer_has_lost_are_sent_again(tmp_path: Path) -> None:
    """The tracker knows best: its package may have dropped what was noted as sent."""
    service = Service()
    sender = Sender(tmp_path, service)
    sender.lines(1, 2, 3)
    sender.turns()
    del service.runs[RUN][1:]
    sender.start()
    sender.turns()
    assert sender.steps() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["goes_back", "can_tell", "keeps_first"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_steps_trained_again_replace_the_old_ones(tmp_path: Path, kind: str, is_killed: bool) -> None:
    """In the same run if the tracker can take steps out, else in a new run that has every step once."""
    service = Service()
    goes_back = kind == "goes_back"
    sender = Sender(tmp_path, service, **{"can_tell": not goes_back, kind: True})
    sender.lines(1, 2, 3, 4)
    sender.turns()
    if is_killed:
        sender.start()
    sender.lines(1, 2)
    sender.turns()
    new = [step_line(step, reward_mean=9.0) for step in (3, 4, 5)]
    write(sender.config.output / "metrics.jsonl", [step_line(1), step_line(2), *new])
    sender.turns()
    newest = RUN if goes_back else f"{RUN}-1"
    assert sender.steps(newest) == [1, 2, 3, 4, 5]
    assert [entry.values["reward_mean"] for entry in service.runs[newest]] == [0.1, 0.2, 9.0, 9.0, 9.0]
    assert list(service.runs) == ([RUN] if goes_back else [RUN, f"{RUN}-1"])
    if not goes_back:
        assert service.finished[RUN] == {"replaced_from_step": 3}


def test_a_lost_step_that_was_trained_again_is_sent_to_a_run_of_its_own(tmp_path: Path) -> None:
    """The tracker lost step 4 with its buffer; it was sent once, so a part of it may be there."""
    service = Service()
    sender = Sender(tmp_path, service)
    sender.lines(1, 2, 3, 4)
    sender.turns()
    del service.runs[RUN][3:]
    sender.start()
    sender.lines(1, 2, 3)
    sender.turns()
    write(sender.config.output / "metrics.jsonl", [*map(step_line, (1, 2, 3)), step_line(4, reward_mean=9.0)])
    sender.turns()
    assert sender.steps(f"{RUN}-1") == [1, 2, 3, 4]


def test_the_end_sends_the_rest_and_the_summary_once(tmp_path: Path) -> None:
    """After it a process that is started again has nothing to do."""
    service = Service()
    sender = Sender(tmp_path, service)
    sender.lines(1, 2)
    (sender.config.output / "summary.json").write_text(json.dumps({"steps": 2}))
    assert sender.turns(1, is_over=True) is False
    assert has_rest(sender.config, 0)
    assert sender.turns(1, is_over=True) is True
    assert service.finished == {RUN: {"steps": 2}}
    assert not has_rest(sender.config, 0)
    service.finished.clear()
    sender.start()
    assert sender.turns(2, is_over=True) is True
    assert service.finished == {}


def test_a_failing_tracker_is_tried_again_after_a_pause_that_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is away is not asked in a loop."""
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 1000.0)
    service = Service()
    service.fail_before.add(1)
    sender = Sender(tmp_path, service)
    sender.lines(1)
    sender.turns()
    assert sender.steps() == []
    assert sender.metrics.registry.get_sample_value("grpo_tracker_failures_total") == 1


@pytest.mark.parametrize("error", [SystemExit(2), SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()])
def test_no_error_of_a_package_ends_the_process(tmp_path: Path, error: BaseException) -> None:
    """An exit with 2 would be taken for a wrong configuration, and end the run; one with 0 for the end of all work."""
    service = Service()
    service.error = error
    service.fail_before.add(2)
    sender = Sender(tmp_path, service)
    sender.lines(1, 2, 3)
    sender.turns()
    assert sender.steps() == [1, 2, 3]
    assert sender.metrics.registry.get_sample_value("grpo_tracker_failures_total") == 1


def test_a_tracker_that_is_away_for_days_is_tried_again_each_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many failures in a row, and never with much of a processor, which a long run's files take to be read."""
    pauses: list[float] = []
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(loop, "MOST_CPU", MOST_CPU)
    monkeypatch.setattr(loop.log, "error", lambda *_, next_seconds, **__: pauses.append(next_seconds))
    sender = Sender(tmp_path, Service())
    for _ in range(1100):
        sender.actor._fail(ConnectionError("away"), 0.001)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == 60.0
    sender.actor._fail(ConnectionError("away"), 30.0)
    assert pauses[-1] == 30.0 / MOST_CPU == 1500.0


def test_steps_that_the_run_has_no_more_are_taken_out_at_its_end(tmp_path: Path) -> None:
    """It went back and was ended at an earlier step than before: there is no new line that differs."""
    service = Service()
    sender = Sender(tmp_path, service)
    sender.lines(1, 2, 3, 4)
    sender.turns()
    sender.lines(1, 2)
    (sender.config.output / "summary.json").write_text(json.dumps({"steps": 2}))
    assert sender.turns(8, is_over=True) is True
    assert sender.steps(f"{RUN}-1") == [1, 2]
    assert service.finished[f"{RUN}-1"] == {"steps": 2}


def test_trackers_of_one_type_have_files_of_their_own(tmp_path: Path) -> None:
    """Two projects of W&B."""
    trackers: list[Any] = ["wandb", "tensorboard", {"type": "wandb", "project": "b"}]
    assert labels_of(ring_config(tmp_path, telemetry={"trackers": trackers})) == ["wandb", "tensorboard", "wandb-2"]


@pytest.mark.parametrize(("version", "due"), [(0, True), (3, False), (4, True), (8, True), (10, False)])
def test_an_evaluation_is_waited_for_where_the_ledger_has_one(version: int, due: bool) -> None:
    """Every four steps, at the start, and not at the end."""
    assert is_evaluated(EvalConfig(every_steps=4, at_end=False), version, 10) is due
