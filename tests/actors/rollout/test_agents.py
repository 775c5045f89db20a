"""Trajectories of agents, in real worker processes, with a double of the engines."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from actors.engines import fake
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.held import AttemptError
from actors.telemetry.metrics import Metrics
from tests.actors.rollout.doubles import ticket
from tests.actors.rollout.test_environments import WAIT, Engines, example
from tests.ring.harness import ring_config

AGENTS = Path(__file__).parents[2] / "ring" / "agents.py"
pytestmark = pytest.mark.slow
LABELS = {"environment": "helper"}


def player(folder: Path, **environment: Any) -> EnvironmentPlayer:
    """A player of one agent."""
    config = ring_config(
        folder,
        environments=[{"type": "agent", "name": "helper"} | environment],
        reward={"functions": []},
        packer={"sequence_len": 512},
    )
    engines = cast(EngineChoice, Engines())
    return EnvironmentPlayer(config, "rollout-0", {"helper": fake.chat(64)}, engines, Metrics("rollout"), 512)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("never_asks", "the episode ended without a turn of the model"),
        ("fails", "LookupError: no such page"),
        ("no_agent", "no agent; an agent is run"),
    ],
)
async def test_a_failing_agent_gives_no_reward_and_says_why(tmp_path: Path, agent: str, words: str) -> None:
    """The attempt fails with the reason; nothing is scored as 0."""
    async with player(tmp_path, path=f"{AGENTS}:{agent}") as playing, asyncio.timeout(WAIT):
        with pytest.raises(AttemptError, match=words):
            await playing.play(ticket(0, environment="helper"), example(0))


@pytest.mark.parametrize(
    ("script", "options", "cause"),
    [
        ("exit 3", {}, "agent_exit"),
        ("kill -9 $$", {}, "agent_exit"),
        ("sleep 60", {"seconds": 0.2}, "env_timeout"),
        ("echo no >reward.json", {"reward": "file"}, "env_score"),
        ("echo {nothing}", {}, "env_reset"),
    ],
)
async def test_the_end_of_a_program_is_counted_by_its_cause(
    tmp_path: Path, script: str, options: dict[str, Any], cause: str
) -> None:
    """The program's status is not taken for a failure of the environment's step."""
    program = {"command": ["sh", "-c", script], "options": options}
    async with player(tmp_path, **program) as playing, asyncio.timeout(WAIT):
        with pytest.raises(AttemptError) as failure:
            await playing.play(ticket(0, environment="helper"), example(0))
    assert failure.value.reason == cause


async def test_a_score_of_the_group_leaves_rewards_of_calls(tmp_path: Path) -> None:
    """They are in the session, of which the worker knows nothing."""
    async with player(tmp_path, path=f"{AGENTS}:PerCallOfGroup") as playing, asyncio.timeout(WAIT):
        trajectories, _ = await playing.play(ticket(0, environment="helper"), example(0))
    assert [one.turn_rewards for one in trajectories] == [[(0, 0.0), (1, 1.0), (2, 2.0)]] * 2
    assert [one.rewards for one in trajectories] == [{"PerCallOfGroup_group": 0.0}, {"PerCallOfGroup_group": 1.0}]


async def test_a_failed_agent_with_calls_is_unscorable_where_asked_for(tmp_path: Path) -> None:
    """Its calls are kept, with the words of the failure, and without a reward."""
    async with player(tmp_path, path=f"{AGENTS}:fails", on_failure="unscorable") as playing, asyncio.timeout(WAIT):
        trajectories, _ = await playing.play(ticket(0, environment="helper"), example(0))
    assert [(one.stop, one.rewards) for one in trajectories] == [("failed", {})] * 2
    assert all("LookupError: no such page" in one.failure for one in trajectories)
    assert all(one.recorder.tree.num_turns == 1 for one in trajectories)


async def test_a_trajectory_of_demanded_answers_alone_is_warned_of_once(tmp_path: Path) -> None:
    """It would be trained on nothing, and nobody would see why."""
    async with player(tmp_path, path=f"{AGENTS}:demands") as playing, asyncio.timeout(WAIT):
        with capture_logs() as logs:
            trajectories, _ = await playing.play(ticket(0, environment="helper"), example(0))
            await playing.play(ticket(0, environment="helper"), example(0))
    assert not any(sum(sample.loss_mask) for one in trajectories for sample in one.tree.samples())
    [warning] = [one for one in logs if one["event"] == "a trajectory is not trained"]
    assert "set environments[].train_forced_turns" in warning["detail"]


async def test_open_sessions_are_counted_until_their_end(tmp_path: Path) -> None:
    """The gauge returns to 0."""
    playing = player(tmp_path, external=True, trajectory_timeout=5.0)
    shown: list[float | None] = []

    def show() -> None:
        playing.note_workers()
        shown.append(playing._metrics.registry.get_sample_value("grpo_rollout_sessions_open", LABELS))

    async with playing, asyncio.timeout(WAIT):
        show()
        task = asyncio.create_task(playing.play(ticket(0, environment="helper"), example(0)))
        while not playing._agents.table.num_open:
            await asyncio.sleep(0.01)
        show()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        show()
    assert shown == [0.0, 2.0, 0.0]


async def test_a_service_that_never_ends_its_session_is_late(tmp_path: Path) -> None:
    """Without a call there is no trajectory; the attempt fails at the end of its time, and its sessions are closed."""
    playing = player(tmp_path, external=True, trajectory_timeout=0.5)
    async with playing, asyncio.timeout(WAIT):
        with pytest.raises(AttemptError, match="no turn within"):
            await playing.play(ticket(0, environment="helper"), example(0))
        assert playing._agents.table.num_open == {}
