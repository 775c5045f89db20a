"""Events of a run for callbacks, read from its files: each training step, evaluation and checkpoint once, in order.

The order of a step is on_step_begin, on_step_end, on_log; on_save and on_evaluate come when their result is there, so
possibly after events of later steps. A callback reads; of its wishes only the one to stop is followed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.api.progress import Tail, TrainerControl, TrainerState, evaluation_log, step_log

Call = Callable[..., None]
OTHER_WISHES = ("should_save", "should_evaluate", "should_log", "should_epoch_stop")


class Events:
    """Follower of a run's files, which fills the state and calls the callbacks.

    Args:
        output: folder of the run.
        state: state to fill; its log history may have earlier steps.
        call: called with the name of an event and its keyword arguments.
        updates: optimizer updates of a step.
        epochs_per_step: share of the data that a step trains on.
        evaluated: name of the environment with held-out rows.
        checkpoint: step of the newest checkpoint, from which the run continues; events of steps up to it are not told.
    """

    def __init__(
        self,
        output: Path,
        state: TrainerState,
        call: Call,
        *,
        updates: int,
        epochs_per_step: float,
        evaluated: str,
        checkpoint: int,
    ) -> None:
        self._output, self._state, self._call = output, state, call
        self._updates, self._epochs_per_step, self._evaluated = updates, epochs_per_step, evaluated
        self._steps, self._evals = Tail(output / "metrics.jsonl"), Tail(output / "evals.jsonl")
        self._told = self._saved = checkpoint
        self._waiting: dict[int, dict[str, Any]] = {}
        """Evaluations whose step has not been told, by version."""
        state.log_history.clear()

    def follow(self, *, is_over: bool = False) -> None:
        """Tell what is new.

        Args:
            is_over: True after the end of the run, when no step can come any more.
        """
        for record in self._evals.new():
            if logs := evaluation_log(record, self._evaluated):
                self._waiting[record["version"]] = logs
        for record in self._steps.new():
            # the step before has everything that belongs to it by now
            self._tell_rest(record["step"] - 1)
            self._tell_step(record)
        self._tell_rest(self._told if not is_over else None)

    def _tell_step(self, record: Mapping[str, Any]) -> None:
        step, logs = int(record["step"]), step_log(record, self._epochs_per_step, self._updates)
        history = self._state.log_history
        if any(entry["step"] == logs["step"] and "loss" in entry for entry in history[-2:]):
            return
        self._state.global_step, self._state.epoch = step * self._updates, logs["epoch"]
        if step > self._told:
            self._call("on_step_begin")
            self._call("on_step_end")
        history.append(logs)
        if step > self._told:
            self._told = step
            self._call("on_log", logs=logs)

    def _tell_rest(self, up_to: int | None) -> None:
        """Tell evaluations and checkpoints of steps up to this one; None: of all."""
        for version in sorted(self._waiting):
            if up_to is None or version <= up_to:
                logs = self._waiting.pop(version)
                self._state.log_history.append(logs | {"step": version * self._updates})
                self._call("on_evaluate", metrics=logs)
        for step in saved_steps(self._output):
            if step > self._saved and (up_to is None or step <= up_to):
                self._saved = step
                self._call("on_save")


def saved_steps(output: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's folder, ascending."""
    names = [path.name.removeprefix("step_") for path in (output / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())


class Callbacks:
    """Callbacks of a trainer, with the methods of transformers' TrainerCallback."""

    def __init__(self, callbacks: Sequence[Any], arguments: Any, state: TrainerState) -> None:
        self._callbacks = [one() if isinstance(one, type) else one for one in callbacks]
        self._arguments, self._state = arguments, state
        self.control = TrainerControl()
        self.ignored: set[str] = set()
        """Wishes of callbacks that were not followed."""

    def add(self, callback: Any) -> None:
        """Add a callback, or a class to make one of."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove(self, callback: Any) -> None:
        """Remove a callback, or all of a class."""
        self._callbacks = [
            one
            for one in self._callbacks
            if not (isinstance(one, callback) if isinstance(callback, type) else one is callback)
        ]

    def call(self, event: str, **values: Any) -> None:
        """Call the method of an event, where a callback has one."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._arguments, self._state, self.control, **values)
        for wish in OTHER_WISHES:
            if getattr(self.control, wish):
                self.ignored.add(wish)
                setattr(self.control, wish, False)
