"""Calls of callbacks: their wishes, and their exceptions."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.callbacks.events import Told
from actors.callbacks.handler import Callbacks
from actors.callbacks.memory import Memory, keyed, restore_states, states_of
from actors.callbacks.progress import TrainerControl, TrainerState


class Raises:
    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Fail."""
        raise ValueError("mine")


class Wishes:
    """Returns a control of its own, as transformers allows."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> TrainerControl:
        """Wish several things."""
        control.should_save = True
        return TrainerControl(should_training_stop=True)


class Counts:
    """transformers' ExportableState, without transformers."""

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.seen = limit, 0

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        self.seen += 1

    def state(self) -> dict[str, Any]:
        """Export the count."""
        return {"args": {"limit": self.limit}, "attributes": {"seen": self.seen}}


class Odd:
    def state(self) -> dict[str, Any]:
        """Export what is no JSON."""
        return {"args": {}, "attributes": {"seen": object()}}


def test_an_exception_is_handed_over_and_the_next_callback_is_called() -> None:
    """With the callback and the event; without a taker it is raised."""
    raised, counts, errors = Raises(), Counts(), list[Any]()
    handler = Callbacks([raised, counts], None, TrainerState(), lambda *error: errors.append(error))
    handler.call("on_log", logs={})
    assert counts.seen == 1
    assert [(callback, event, str(error)) for callback, event, error in errors] == [(raised, "on_log", "mine")]
    with pytest.raises(ValueError, match="mine"):
        Callbacks([raised], None, TrainerState()).call("on_log", logs={})


def test_of_wishes_the_one_to_stop_is_kept_with_the_name_of_the_callback() -> None:
    """Also when it comes in a control of the callback's own; the others are named as ignored."""
    handler = Callbacks([Counts, Wishes, Counts], None, TrainerState())
    handler.call("on_log", logs={})
    assert handler.control == TrainerControl(should_training_stop=True)
    assert handler.stopped_by == "Wishes"
    assert handler.ignored == {"should_save"}


def test_states_of_callbacks_outlive_their_process_and_odd_ones_are_left_out(tmp_path: Path) -> None:
    """Attributes come back, and arguments are those of the configuration."""
    counts, lost = Counts(limit=3), set[str]()
    counts.seen = 2
    made = keyed(["my.py:Counts", "my.py:Odd"], [counts, Odd()])
    Memory("run", Told(step=4), states_of(made, lost)).save(tmp_path)
    assert lost == {"1 my.py:Odd"}
    memory = Memory.load(tmp_path, "run")
    again = Counts(limit=9)
    restore_states(keyed(["my.py:Counts"], [again]), memory.states)
    assert (memory.told.step, again.seen, again.limit) == (4, 2, 9)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"run": "run", "told": {"what": 1}, "states": {}})])
def test_a_damaged_memory_or_one_of_another_run_is_empty(tmp_path: Path, text: str) -> None:
    """All events are told again then."""
    (tmp_path / "callbacks.json").write_text(text)
    assert Memory.load(tmp_path, "run") == Memory("run")
    Memory("another", Told(step=4)).save(tmp_path)
    assert Memory.load(tmp_path, "run") == Memory("run")
