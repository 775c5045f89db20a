"""Callbacks of a trainer: calls of an event's method on each of them, and their wishes."""

from collections.abc import Callable, Sequence
from typing import Any

from actors.callbacks.progress import TrainerControl, TrainerState

OTHER_WISHES = ("should_save", "should_evaluate", "should_log", "should_epoch_stop")
"""Wishes that are not followed: a callback reads, and changes no training."""
OnError = Callable[[Any, str, Exception], None]
"""Function of a callback, an event and the exception that was raised there."""


class Callbacks:
    """Callbacks of a trainer, with the methods of transformers' TrainerCallback.

    Args:
        callbacks: objects, or classes to make one of.
        arguments: arguments of training, passed to each method.
        state: state of training, likewise.
        on_error: takes exceptions of callbacks; None: they are raised, and callbacks behind are not called.
    """

    def __init__(
        self, callbacks: Sequence[Any], arguments: Any, state: TrainerState, on_error: OnError | None = None
    ) -> None:
        self._callbacks = [one() if isinstance(one, type) else one for one in callbacks]
        self._arguments, self._state, self._on_error = arguments, state, on_error
        self.control = TrainerControl()
        self.ignored: set[str] = set()
        """Wishes of callbacks that were not followed."""
        self.stopped_by = ""
        """Class of the callback that wished to stop first; empty: none has."""

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
                self._call(callback, event, method, values)
        for wish in OTHER_WISHES:
            if getattr(self.control, wish):
                self.ignored.add(wish)
                setattr(self.control, wish, False)

    def _call(self, callback: Any, event: str, method: Callable[..., Any], values: dict[str, Any]) -> None:
        try:
            returned = method(self._arguments, self._state, self.control, **values)
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(callback, event, error)
            return
        # a callback may return a control of its own in place of a change of the given one
        if getattr(returned, "should_training_stop", False):
            self.control.should_training_stop = True
        if self.control.should_training_stop and not self.stopped_by:
            self.stopped_by = type(callback).__name__
