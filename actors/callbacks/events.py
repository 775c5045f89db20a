"""Events of a run for callbacks, read from its files: each training step, evaluation and checkpoint, in order.

The order of a step is on_step_begin, on_step_end, on_log, between on_epoch_begin and on_epoch_end where an epoch starts
or ends with the step; on_save and on_evaluate come when their result is there, so possibly after events of later steps.
What has been told is a position in the run (`Told`): events up to it rebuild the state and are not told again. Steps of
a history that was given up, and trained again, are told again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.callbacks.progress import TrainerState, evaluation_log, step_log
from actors.telemetry.tail import Tail

Call = Callable[..., None]


@dataclass(frozen=True)
class Told:
    """Position in a run up to which events have been told."""

    step: int = 0
    """Newest step."""
    time: float = 0.0
    """Time at which this step was recorded, in seconds since 1970. A later line of an earlier step is of a new
    history. Infinite: no line is."""
    evaluated: int = -1
    """Version of the newest evaluation; -1: none."""
    saved: int = 0
    """Step of the newest checkpoint."""

    @classmethod
    def of_checkpoint(cls, step: int) -> "Told":
        """Return the position of a run that continues from a checkpoint; evaluations before it are told again."""
        return cls(step, math.inf, -1, step)


@dataclass(frozen=True)
class Best:
    """Rule by which the best evaluation is known."""

    metric: str
    """Name of the metric, with or without `eval_`."""
    greater_is_better: bool = True

    @classmethod
    def of(cls, metric: str | None, greater_is_better: bool | None) -> "Best | None":
        """Return the rule of transformers' arguments: without a direction, a loss is better if it is smaller."""
        if not metric:
            return None
        return cls(metric, not metric.endswith("loss") if greater_is_better is None else greater_is_better)

    @property
    def name(self) -> str:
        """Name of the metric as evaluations have it."""
        return self.metric if self.metric.startswith("eval_") else f"eval_{self.metric}"

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether a value is better than the best so far; None: there is none yet."""
        return than is None or (value > than if self.greater_is_better else value < than)


class Events:
    """Follower of a run's files, which fills the state and calls the callbacks.

    Args:
        output: folder of the run.
        state: state to fill; its log history may have earlier steps.
        call: called with the name of an event and its keyword arguments.
        updates: optimizer updates of a step.
        epochs_per_step: share of the data that a step trains on.
        evaluated: start of the names of an evaluation's metrics, by the name of its results.
        told: position from which on events are told.
        best: rule for the best evaluation; None: none is known.
        note: called with the position after each step, evaluation and checkpoint.
    """

    def __init__(
        self,
        output: Path,
        state: TrainerState,
        call: Call,
        *,
        updates: int,
        epochs_per_step: float,
        evaluated: Mapping[str, str],
        told: Told,
        best: Best | None = None,
        note: Callable[[Told], None] = lambda told: None,
    ) -> None:
        self._output, self._state, self._call, self._note = output, state, call, note
        self._updates, self._epochs_per_step, self._evaluated = updates, epochs_per_step, evaluated
        self._best = best
        self._steps, self._evals = Tail(output / "metrics.jsonl"), Tail(output / "evals.jsonl")
        self.told = told
        self.read = 0
        """Newest step whose line has been read."""
        self._weights: dict[int, str] = {}
        """Digest of the weights of each step that has been read: tells a line written again from a new one."""
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        """Evaluations whose step has not been told, by version."""
        self._forget_state()

    def follow(self, *, is_over: bool = False) -> None:
        """Tell what is new.

        Args:
            is_over: True after the end of the run, when no step can come any more.
        """
        # a packer that starts cuts off lines that the ledger does not know, and writes them again
        if self._steps.was_cut() or self._evals.was_cut():
            self._steps.restart()
            self._evals.restart()
            self._forget_state()
        for record in self._evals.new():
            found = [evaluation_log(record, label, prefix) for label, prefix in self._evaluated.items()]
            if logs := list(filter(None, found)):
                self._waiting[record["version"]] = logs
        saved = recorded_checkpoints(self._output)
        for record in self._steps.new():
            # the step before has everything that belongs to it by now
            self._tell_rest(saved, record["step"] - 1)
            self._tell_step(record)
        self._tell_rest(saved, None if is_over else self.told.step)

    def _forget_state(self) -> None:
        state = self._state
        state.log_history.clear()
        self._waiting.clear()
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _tell_step(self, record: Mapping[str, Any]) -> None:
        step, logs = int(record["step"]), step_log(record, self._epochs_per_step, self._updates)
        is_new = self._is_new(record)
        self._weights[step], self.read = str(record.get("weights", "")), step
        if is_new and starts_epoch(step, self._epochs_per_step):
            self._state.global_step, self._state.epoch = (step - 1) * self._updates, (step - 1) * self._epochs_per_step
            self._call("on_epoch_begin")
        self._state.global_step, self._state.epoch = step * self._updates, logs["epoch"]
        if is_new:
            self._call("on_step_begin")
            self._call("on_step_end")
        self._state.log_history.append(logs)
        if is_new:
            self._call("on_log", logs=logs)
            is_last = 0 < self._state.max_steps <= self._state.global_step
            if ends_epoch(step, self._epochs_per_step, is_last=is_last):
                self._call("on_epoch_end")
            told, time = self.told, float(record.get("time") or 0.0)
            if step <= told.step:  # the run went back: later evaluations and checkpoints come again too
                told = replace(told, evaluated=min(told.evaluated, step - 1), saved=min(told.saved, step - 1))
            self._progress(replace(told, step=step, time=time))

    def _is_new(self, record: Mapping[str, Any]) -> bool:
        """Return whether a line is of a step that has not been told."""
        step, weights = int(record["step"]), str(record.get("weights", ""))
        if step > self.told.step:
            return True
        known = self._weights.get(step, "")
        # equal weights: the line of a step that has been told, written again by a packer that started
        if known and weights:
            return known != weights
        return float(record.get("time") or 0.0) > self.told.time

    def _tell_rest(self, saved: list[int], up_to: int | None) -> None:
        """Tell evaluations and checkpoints of steps up to this one; None: of all."""
        for version in sorted(self._waiting):
            if up_to is not None and version > up_to:
                break
            is_new = version > self.told.evaluated
            for logs in self._waiting.pop(version):
                self._state.log_history.append(logs | {"step": version * self._updates})
                if is_new:
                    self._call("on_evaluate", metrics=logs)
                # after the call, as in transformers: callbacks compare with the best evaluation before
                self._note_best(version, logs)
            if is_new:
                self._progress(replace(self.told, evaluated=version))
        for step in saved:
            if step > self.told.saved and (up_to is None or step <= up_to):
                self._call("on_save")
                self._progress(replace(self.told, saved=step))

    def _note_best(self, version: int, logs: Mapping[str, Any]) -> None:
        value = None if self._best is None else logs.get(self._best.name)
        if self._best is None or value is None or not self._best.is_better(value, self._state.best_metric):
            return
        self._state.best_metric, self._state.best_global_step = value, version * self._updates
        folder = self._output / "checkpoints" / f"step_{version}"
        self._state.best_model_checkpoint = str(folder) if folder.is_dir() else None

    def _progress(self, told: Told) -> None:
        self.told = told
        self._note(told)


def starts_epoch(step: int, epochs_per_step: float) -> bool:
    """Tell whether a step is the first of a pass over the data. False where the number of rows is not known.

    With 0.4 passes per step the steps 1, 4 (from 1.2) and 6 (from 2.0) are.

    Args:
        step: number of the step, from 1.
        epochs_per_step: share of the data that a step trains on; 0: not known.
    """
    return epochs_per_step > 0 and (
        step == 1 or _passes(step - 1, epochs_per_step) > _passes(step - 2, epochs_per_step)
    )


def ends_epoch(step: int, epochs_per_step: float, *, is_last: bool) -> bool:
    """Tell whether a pass over the data ends with a step, or within it; the run's last step ends the pass, as there."""
    known = epochs_per_step > 0
    return known and (is_last or _passes(step, epochs_per_step) > _passes(step - 1, epochs_per_step))


def _passes(steps: int, epochs_per_step: float) -> int:
    """Return the whole passes over the data of a number of steps, whatever their product is rounded to."""
    return math.floor(steps * epochs_per_step + 1e-9)


def recorded_checkpoints(output: Path) -> list[int]:
    """Return the steps of all checkpoints that the run has saved, ascending; older ones may be gone.

    The copies of witnesses outlive their checkpoints, so no checkpoint is missed that was saved and removed between two
    looks.
    """
    names = [path.stem.removeprefix("step_") for path in (output / "checkpoints" / "witness").glob("step_*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def saved_steps(output: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's folder, ascending."""
    names = [path.name.removeprefix("step_") for path in (output / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())
