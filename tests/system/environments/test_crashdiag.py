"""The example of an environment of one's own, over the package crashdiag."""

import json
from typing import Any

import pytest

from actors.environments.pool import WorkerPool, describe
from tests.system.environments.playing import ROOT, computed, contents, play_one, spec

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PATH = ROOT / "examples/environments/crashdiag_env.py"
REPAIRS = """
import json
from crashdiag.faults import WORKFLOWS
print(json.dumps({name: list(one.actions) for name, one in WORKFLOWS.items()}))
"""


async def test_every_failure_is_repaired_by_its_experts_actions() -> None:
    """No reward before the last of them, and 1 after it."""
    repairs = computed(REPAIRS)
    names = set()

    def expert(seen: str, columns: dict[str, Any]) -> str:
        # one line of the conversation for each answer so far
        done = seen.count("<|im_start|>assistant\n") - 1
        return f"I try {json.dumps({'action': repairs[columns['failure']][done]})}"

    async with WorkerPool(spec(PATH, max_steps=20)) as pool:
        for split, count in (("train", 41), ("eval", 11)):
            for index in range(count):
                trajectory, columns = await play_one(pool, expert, {"index": index, "split": split})
                assert (trajectory.stop, trajectory.rewards) == ("done", {"resolved": 1.0}), columns
                names.add(columns["failure"])
        assert pool.examples == {"train": 41, "eval": 11}
    assert names == set(repairs)


async def test_an_application_that_stays_broken_is_worth_nothing() -> None:
    """An answer without an action is told how actions look, and costs a turn."""
    async with WorkerPool(spec(PATH, max_steps=3)) as pool:
        answers = ["Restart it!", '{"action": "pray"}', '{"action": "wait_and_observe"}']
        trajectory, _ = await play_one(pool, answers, {"index": 0, "split": "train"})
        assert (trajectory.stop, trajectory.rewards) == ("env_truncated", {"resolved": 0.0})
        assert [text.startswith("No action was found.") for text in contents(trajectory)[2::2]] == [True, True, False]


async def test_the_example_says_how_many_examples_it_has() -> None:
    """Without an episode."""
    assert await describe(spec(PATH)) == {"train": 41, "eval": 11}
