"""Episodes of verifiers 0.4: a taskset of the registry with its own solutions, and one with tools."""

import json
import subprocess
from pathlib import Path

import pytest

from actors.environments.errors import EpisodeError
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.scripted import THOUGHT, WAIT, call, played, python_of, workers

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
LONG = TurnLimits(100_000, 2000)
SOLUTIONS = """
import itertools, json
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
taskset = load_environment(resolve_env_config({"taskset": {"id": "marble-v1"}})).taskset
print(json.dumps([task.data.solution for task in itertools.islice(taskset, 3)]))
"""


async def test_the_known_solutions_of_a_physics_taskset_earn_its_reward() -> None:
    """An endless taskset of the registry; the layout of another task misses."""
    python = python_of("verifiers-v1")
    done = subprocess.run([python, "-c", SOLUTIONS], capture_output=True, text=True, check=True)
    solutions = [f"```json\n{json.dumps(one)}\n```" for one in json.loads(done.stdout.splitlines()[-1])]
    async with workers("verifiers_v1", python, id="marble-v1") as pool:
        for index, solution in enumerate(solutions):
            async with await pool.episode(WAIT) as episode:
                trajectory = await played(episode, [solution], index=index, limits=LONG)
                assert trajectory.rewards["marble-v1"] == 1.0
                assert (trajectory.rewards["answered_legally"], trajectory.stop) == (1.0, "done")
                assert episode.columns["idx"] == index
        async with await pool.episode(WAIT) as episode:
            trajectory = await played(episode, ["I can't."], limits=LONG)
            assert (trajectory.rewards["marble-v1"], trajectory.rewards["answered_legally"]) == (0.0, 0.0)
        assert pool.examples == {"train": None, "eval": None}


async def test_tools_are_played_scored_and_never_fail_as_zero() -> None:
    """One worker, so that its start is paid once: a whole episode, limits, and each way to fail."""
    name, options = "verifiers-v1-worlds", {"path": str(HERE), "evaluation": {"size": 2}}
    async with workers("verifiers_v1", python_of("verifiers-v1"), id=name, **options) as pool:
        async with await pool.episode(WAIT) as episode:
            texts = [THOUGHT + call("sums_add", a=2, b=1), THOUGHT + "3"]
            trajectory = await played(episode, texts, index=2, family="qwen3")
            assert trajectory.rewards | {name: 0.5, "right": 1.0, "num_letters": 1.0} == trajectory.rewards
            assert (trajectory.stop, trajectory.recorder.num_calls, trajectory.tree.num_branches) == ("done", 1, 0)
            assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
            assert trajectory.messages[3]["content"] == "3"
            assert trajectory.messages[2]["reasoning_content"] == "Well."
            assert episode.columns["answer"] == "3"
        assert pool.examples == {"train": 3, "eval": 2}
        async with await pool.episode(WAIT) as episode:
            assert (await played(episode, [""], split="eval")).rewards[name] == 0.0
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(EpisodeError, match=r"the episode failed: TaskError: .*KeyError: 'no such key'"):
                await played(episode, ["boom"])
        async with await pool.episode(WAIT) as episode:
            limited = await played(
                episode, [call("sums_add", a=1, b=1)] * 9, limits=TurnLimits(10_000, 99, max_turns=2)
            )
            assert (limited.stop, limited.tree.num_turns, limited.rewards[name]) == ("max_turns", 2, 0.0)
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(IndexError, match="list index out of range"):
                # the engine's failure keeps its own name, and is not the environment's
                await played(episode, [])


async def test_a_harness_of_the_users_own_may_ask_for_streams() -> None:
    """With its own limits; the second request continues the first, token by token."""
    name, harness = "verifiers-v1-worlds", {"agent": {"harness": {"id": "verifiers-v1-streaming"}}}
    python = python_of("verifiers-v1")
    pool = workers("verifiers_v1", python, id=name, path=str(HERE), environment=harness)
    async with pool, await pool.episode(WAIT) as episode:
        trajectory = await played(episode, ["5!", "1"])
        assert (trajectory.rewards[name], trajectory.tree.num_turns, trajectory.tree.num_branches) == (0.5, 2, 0)
        assert [message["content"] for message in trajectory.messages[1:]] == ["5", "Again.", "1"]
