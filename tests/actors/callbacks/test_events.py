"""Events from the files of a run: order, restarts, lines that are written again, histories that are given up."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.callbacks.events import Best, Events, Told, ends_epoch, starts_epoch
from actors.callbacks.progress import TrainerState


class Run:
    """Files of a run, and what a callback would be told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[tuple[str, int]]()
        self.state = TrainerState()
        self.epochs: list[tuple[str, int, float]] = []
        """Events of epochs, with global_step and epoch."""
        self.notes: list[Told] = []
        (folder / "checkpoints" / "witness").mkdir(parents=True)

    def steps(self, *steps: int, at: float = 0.0, history: str = "a") -> None:
        """Append lines of steps."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step in steps:
                line = {"step": step, "loss": 0.5, "time": at + step, "weights": f"{history}{step}"}
                file.write(json.dumps(line) + "\n")

    def evaluations(self, rewards: Mapping[int, float], label: str = "here") -> None:
        """Append evaluations of versions."""
        with (self.folder / "evals.jsonl").open("a") as file:
            for version, reward in rewards.items():
                results = {label: {"mean_reward": reward}}
                file.write(json.dumps({"version": version, "environments": results}) + "\n")

    def cut(self, name: str, lines: int) -> None:
        """Keep so many lines of a file, as a packer does that starts."""
        path = self.folder / name
        kept = path.read_text().splitlines(keepends=True)[:lines]
        path.write_text("".join(kept))

    def save(self, *steps: int) -> None:
        """Save checkpoints, of which only the witness is left."""
        for step in steps:
            (self.folder / "checkpoints" / "witness" / f"step_{step}.json").touch()

    def events(self, told: Told | None = None, **options: Any) -> Events:
        """A follower of these files."""
        return Events(
            self.folder,
            self.state,
            self._call,
            **{"updates": 2, "epochs_per_step": 0.25, "evaluated": {"here": "eval"}, "told": told or Told()}
            | {"note": self.notes.append, "best": Best("eval_reward")}
            | options,
        )

    def _call(self, event: str, **values: Any) -> None:
        if event.startswith("on_epoch"):
            self.epochs.append((event.removeprefix("on_epoch_"), self.state.global_step, self.state.epoch))
        elif event != "on_step_begin":
            self.told.append((event.removeprefix("on_"), self.state.global_step))


def run(folder: Path) -> Run:
    """A run without any line."""
    return Run(folder)


def test_steps_evaluations_and_checkpoints_are_told_in_order_with_updates_and_epochs(tmp_path: Path) -> None:
    """Two updates a step: global_step counts updates; what is of version 2 is told before step 3."""
    one = run(tmp_path)
    one.steps(1, 2, 3)
    one.evaluations({0: 0.1, 2: 0.4})
    one.save(2)
    one.events().follow()
    assert one.told == [
        ("evaluate", 0), ("step_end", 2), ("log", 2), ("step_end", 4), ("log", 4), ("evaluate", 4), ("save", 4),
        ("step_end", 6), ("log", 6),
    ]  # fmt: skip
    assert one.state.epoch == 0.75
    assert [entry["step"] for entry in one.state.log_history] == [0, 2, 4, 4, 6]
    assert one.notes[-1] == Told(step=3, time=3.0, evaluated=2, saved=2)


def test_epochs_begin_and_end_with_the_steps_that_pass_over_the_data(tmp_path: Path) -> None:
    """A pass and a half: the last step of the run ends the second one; a follower that starts again repeats none."""
    one = run(tmp_path)
    one.state.max_steps = 12
    one.steps(1, 2, 3, 4, 5)
    one.events().follow()
    expected = [("begin", 0, 0.0), ("end", 8, 1.0), ("begin", 8, 1.0)]
    assert one.epochs == expected
    again = Run(tmp_path / "unused")
    again.folder, again.state.max_steps = tmp_path, 12
    one.steps(6)
    again.events(one.notes[-1]).follow(is_over=True)
    assert again.epochs == [("end", 12, 1.5)]


@pytest.mark.parametrize(
    ("share", "begins", "ends"),
    [
        (0.4, [1, 4, 6], [3, 5]),  # 1.2 and 2.0 passes
        (1 / 3, [1, 4], [3, 6]),  # three thirds are one, whatever the sum is rounded to
        (0.1, [1], []),
        (2.5, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        (0.0, [], []),  # the number of rows is not known
    ],
)
def test_the_steps_of_epochs_follow_from_the_share_of_a_step(share: float, begins: list[int], ends: list[int]) -> None:
    """Of six steps, none of which is the last one."""
    steps = range(1, 7)
    assert [step for step in steps if starts_epoch(step, share)] == begins
    assert [step for step in steps if ends_epoch(step, share, is_last=False)] == ends
    assert ends_epoch(6, share, is_last=True) is (share > 0)


def test_a_follower_that_starts_again_rebuilds_the_state_and_tells_only_what_is_new(tmp_path: Path) -> None:
    """All of the log history is there, and the best evaluation; the calls go on where the notes end."""
    one = run(tmp_path)
    one.steps(1, 2)
    one.evaluations({1: 0.4})
    one.save(1)
    one.events().follow()
    history, best = list(one.state.log_history), one.state.best_metric
    again = Run(tmp_path / "unused")
    again.folder = tmp_path
    one.steps(3)
    again.events(one.notes[-1]).follow()
    assert again.told == [("step_end", 6), ("log", 6)]
    assert again.state.log_history[:-1] == history
    assert (again.state.best_metric, again.state.best_global_step) == (best, 2) == (0.4, 2)


def test_a_death_between_call_and_note_tells_the_step_again(tmp_path: Path) -> None:
    """At least once: the note before counts."""
    one = run(tmp_path)
    one.steps(1, 2)
    one.events().follow()
    before_the_last = [note for note in one.notes if note.step == 1][-1]
    again = Run(tmp_path / "unused")
    again.folder = tmp_path
    again.events(before_the_last).follow()
    assert again.told == [("step_end", 4), ("log", 4)]


def test_lines_that_a_packer_writes_again_are_not_told_again(tmp_path: Path) -> None:
    """With the same weights a step is the same, though it was recorded later."""
    one = run(tmp_path)
    one.steps(1, 2, 3)
    events = one.events()
    events.follow()
    one.told.clear()
    one.cut("metrics.jsonl", 2)
    one.steps(3, 4, at=50.0)
    events.follow()
    assert one.told == [("step_end", 8), ("log", 8)]
    assert [entry["step"] for entry in one.state.log_history] == [2, 4, 6, 8]


def test_steps_of_a_new_history_are_told_again_with_their_evaluations_and_checkpoints(tmp_path: Path) -> None:
    """The run went back to step 1, while the follower was there, and while it was not."""
    for is_there in (True, False):
        one = run(tmp_path / str(is_there))
        one.steps(1, 2, 3)
        one.evaluations({2: 0.9})
        one.save(1, 2)
        events = one.events()
        events.follow()
        one.told.clear()
        one.cut("metrics.jsonl", 1)
        one.cut("evals.jsonl", 0)
        one.steps(2, 3, at=100.0, history="b")
        one.evaluations({2: 0.2})
        events = events if is_there else one.events(one.notes[-1])
        events.follow()
        assert one.told == [
            ("step_end", 4), ("log", 4), ("evaluate", 4), ("save", 4), ("step_end", 6), ("log", 6)
        ]  # fmt: skip
        assert one.state.best_metric == 0.2


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    """Half a line is no step."""
    one = run(tmp_path)
    one.steps(1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    events = one.events()
    events.follow()
    assert one.told[-1] == ("log", 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.5}\n')
    events.follow()
    assert one.told[-1] == ("log", 4)


def test_callbacks_see_the_best_evaluation_before_the_new_one(tmp_path: Path) -> None:
    """As in transformers, whose early stopping compares the two."""
    one, seen = run(tmp_path), []
    one.steps(1, 2, 3)
    one.evaluations({0: 0.5, 1: 0.7, 2: 0.6})

    def call(event: str, **values: Any) -> None:
        if event == "on_evaluate":
            seen.append((values["metrics"]["eval_reward"], one.state.best_metric))

    Events(
        tmp_path, one.state, call, updates=1, epochs_per_step=0.0, evaluated={"here": "eval"}, told=Told(),
        best=Best("reward"),
    ).follow()  # fmt: skip
    assert seen == [(0.5, None), (0.7, 0.5), (0.6, 0.7)]
    assert (one.state.best_metric, one.state.best_global_step) == (0.7, 1)


def test_a_loss_is_better_if_it_is_smaller_unless_told_otherwise() -> None:
    """transformers' rule for `greater_is_better`."""
    loss, reward, turned = Best.of("eval_loss", None), Best.of("reward", None), Best.of("eval_loss", True)
    assert loss is not None
    assert reward is not None
    assert turned is not None
    assert loss.is_better(0.1, 0.2)
    assert reward.is_better(0.2, 0.1)
    assert not turned.is_better(0.1, 0.2)
    assert Best.of(None, None) is None


def test_several_evaluations_of_a_version_have_names_of_their_own(tmp_path: Path) -> None:
    """An event each, as in transformers with several data sets."""
    one = run(tmp_path)
    results = {"a": {"mean_reward": 1.0}, "b": {"mean_reward": 2.0}}
    (tmp_path / "evals.jsonl").write_text(json.dumps({"version": 0, "environments": results}) + "\n")
    one.steps(1)
    one.events(evaluated={"a": "eval_a", "b": "eval_b"}).follow()
    evaluated = [entry for entry in one.state.log_history if "loss" not in entry]
    assert evaluated == [{"eval_a_reward": 1.0, "step": 0}, {"eval_b_reward": 2.0, "step": 0}]
    assert one.told[:2] == [("evaluate", 0), ("evaluate", 0)]


def test_a_run_that_continues_from_a_checkpoint_tells_no_step_up_to_it(tmp_path: Path) -> None:
    """The position of the Python interface, which remembers nothing else."""
    one = run(tmp_path)
    one.steps(1, 2, 3)
    one.save(2, 3)
    one.events(Told.of_checkpoint(2)).follow(is_over=True)
    assert one.told == [("step_end", 6), ("log", 6), ("save", 6)]
    assert one.notes[0] == replace(one.notes[0], step=3, saved=2)
