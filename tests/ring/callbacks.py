"""Callbacks for ring tests, named in configurations by this file's path."""

import json
import os
import time
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 150.0


class Notes:
    """Writes the name of each event and its global_step as a line of a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def note(args: Any, state: Any, control: Any, **values: Any) -> None:
            with self.file.open("a") as file:
                file.write(json.dumps([name, state.global_step, len(state.log_history)]) + "\n")

        return note


class Raises:
    """Has a bug in on_log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Read a metric that there is not."""
        print(logs["no_such_metric"])


class Kills:
    """Kills its process, once, when a step has ended."""

    def __init__(self, file: str, step: int) -> None:
        self.file, self.step = Path(file), step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Die by a signal, as of a failed library."""
        if state.global_step == self.step and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), 9)


class Hangs:
    """Waits in its first event until the file is there."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


class Stops:
    """Wishes a stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Wish."""
        control.should_training_stop = state.global_step == self.step
        return control
