"""The adapter of reasoning_gym with the task out of the row, so that one worker plays all tasks."""

import importlib.util
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[3] / "actors/environments/adapters/reasoning_gym.py"
found = importlib.util.spec_from_file_location("adapter_reasoning_gym", PATH)
assert found is not None
assert found.loader is not None
adapter = importlib.util.module_from_spec(found)
found.loader.exec_module(adapter)


class Env:
    """An episode of the row's task."""

    def reset(self, task: str, index: int) -> Any:
        """Begin."""
        self.inner = adapter.Env(task, run_answers=True)
        messages = self.inner.reset(index)
        self.columns = self.inner.columns
        return messages

    def step(self, answer: str) -> Any:
        """Answer."""
        return self.inner.step(answer)

    def get_reward(self) -> Any:
        """Score."""
        return self.inner.get_reward()
