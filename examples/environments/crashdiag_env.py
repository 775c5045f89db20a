"""An environment of one's own: repair a failing application (the package crashdiag), one JSON action per turn.

`reset` and `step` are all that an environment needs. `examples` says how many examples it has, `columns` what reward
functions see besides, `get_reward` what the episode was worth.
"""

import json
from typing import Any

from crashdiag.agents import ACTION_SPACE
from crashdiag.faults import WORKFLOWS
from crashdiag.sandbox_apps.mock import MockSandbox

EVERY = 5
"""One of so many failures is kept for evaluation."""


class Env:
    """One failure of a simulated application.

    Args:
        max_steps: turns until the episode ends.
    """

    def __init__(self, max_steps: int = 12) -> None:
        self.max_steps, self.num_steps, self.num_invalid = max_steps, 0, 0

    @staticmethod
    def examples(split: str) -> int:
        """Return the number of failures of a split."""
        return len(_failures(split))

    def reset(self, index: int, split: str = "train") -> str:
        """Break the application, and show its state."""
        self.failure = _failures(split)[index]
        self.sandbox = MockSandbox()
        self.failure.inject(self.sandbox)
        self.columns = {"failure": self.failure.name, "difficulty": self.failure.difficulty}
        actions = ", ".join(ACTION_SPACE)
        return (
            f"An application fails. Repair it, one action per answer. Actions: {actions}. Answer with one JSON object, "
            f'such as {{"action": "restart_app"}}.\n{self._state()}'
        )

    def step(self, answer: str) -> tuple[str, None, bool, bool, dict[str, Any]]:
        """Carry out an action, and show the state after it."""
        self.num_steps += 1
        action = _action(answer)
        if action is None:
            self.num_invalid += 1
            said = 'No action was found. Answer with one JSON object, such as {"action": "restart_app"}.'
        else:
            self.sandbox.execute_action(action)
            said = self._state()
        done = self.failure.is_resolved(self.sandbox)
        return said, None, done, self.num_steps >= self.max_steps and not done, {"invalid_moves": self.num_invalid}

    def get_reward(self) -> dict[str, float]:
        """Return 1 if the application works again, and otherwise 0."""
        return {"resolved": float(self.failure.is_resolved(self.sandbox))}

    def _state(self) -> str:
        return json.dumps(self.sandbox.observe(), sort_keys=True)


def _failures(split: str) -> list[Any]:
    """Return the failures of a split."""
    return [one for number, one in enumerate(WORKFLOWS.values()) if (number % EVERY == 0) == (split == "eval")]


def _action(answer: str) -> str | None:
    """Return the action in an answer: that of its first JSON object; None if there is none."""
    start = answer.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(answer[start:])
    except (ValueError, RecursionError):
        return None
    action = found.get("action")
    return action if action in ACTION_SPACE else None
