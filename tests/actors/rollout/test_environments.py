"""Groups of environments side by side on one worker, with a double of the engines."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from actors.datasets import Example
from actors.engines import fake
from actors.engines.http.client import SampledCompletion
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.held import AttemptError
from actors.rollout.trajectory_group import build_trajectory_group
from actors.telemetry.metrics import Metrics
from actors.trajectories.bridges import Bridges
from tests.actors import environments
from tests.actors.rollout.doubles import ticket
from tests.ring.harness import ring_config

WORLDS = Path(__file__).parents[2] / "ring" / "worlds.py"
WAIT = 60.0


class Engines:
    """Answers each turn with two tokens; to other tickets than the first once `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def ask(
        self, one: Any, prompt_ids: list[int], stop: Any = (), affinity: Any = None, form: Any = None, images: Any = ()
    ) -> list[Any]:
        """Two tokens, the last of which ends the turn."""
        if one.ordinal:
            await self.go_on.wait()
        return [SampledCompletion([5, 0], [-1.0, -0.5], [(0, 1, 3)], "stop", "d")]


def player(folder: Path, world: str, engines: Engines, **environment: Any) -> EnvironmentPlayer:
    """A player of an environment of tests/ring/worlds.py, called `letters`, and of another one, `fast`."""
    one = {"type": "python", "name": "letters", "path": f"{WORLDS}:{world}"} | environment
    fast = {"type": "python", "name": "fast", "path": f"{WORLDS}:Letters"}
    config = ring_config(folder, environments=[one, fast], reward={"functions": []}, packer={"sequence_len": 512})
    chats = {label: fake.chat(64) for label in ("letters", "fast")}
    return EnvironmentPlayer(config, "rollout-0", chats, cast(EngineChoice, engines), Metrics("rollout"), 512)


def example(index: int) -> Example:
    """A numbered example."""
    return Example("", {"index": index, "split": "train"}, is_known_by_columns=True)


@pytest.mark.slow
async def test_an_example_that_hangs_costs_the_groups_beside_it_no_attempt(tmp_path: Path) -> None:
    """Their worker is killed with that of the hanging step; they are played again from their start."""
    engines = Engines()
    options = {"folder": str(tmp_path)}
    playing = player(tmp_path, "Hangs", engines, options=options, limits={"step": 2.0})
    async with playing, asyncio.timeout(WAIT):
        hanging = asyncio.create_task(playing.play(ticket(0, environment="letters", index=13), example(13)))
        others = [
            asyncio.create_task(playing.play(ticket(i, environment="letters", index=i), example(i))) for i in (1, 2, 3)
        ]
        with pytest.raises(AttemptError, match="a step took more than 2 s") as failure:
            await hanging
        engines.go_on.set()
        for trajectories, _ in await asyncio.gather(*others):
            assert [one.rewards for one in trajectories] == [{"turns_taken": 3.0}] * 2
            assert [one.recorder.tree.num_turns for one in trajectories] == [3, 3]
    assert failure.value.reason == "env_timeout"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "expected"),
    [
        ("PaidInGroup", [[(0, 0.5), (1, 2.0), (2, 0.0)], [(0, 0.5), (1, 2.0), (2, 1.0)]]),
        ("TakesBackInGroup", [[(0, 0.5), (1, 2.0)], []]),
    ],
)
async def test_turns_have_the_rewards_that_stand_after_the_score_of_the_group(
    tmp_path: Path, world: str, expected: list[Any]
) -> None:
    """Also where the score has taken all of them back."""
    path = f"{Path(environments.__file__).parent}/worlds.py:{world}"
    shown = Example("", {"way": ""}, is_known_by_columns=True)
    async with player(tmp_path, "Letters", Engines(), path=path) as playing, asyncio.timeout(WAIT):
        trajectories, _ = await playing.play(ticket(0, environment="letters"), shown)
    assert [one.turn_rewards for one in trajectories] == expected


@pytest.mark.slow
async def test_a_slow_environment_does_not_slow_a_fast_one(tmp_path: Path) -> None:
    """Ten groups of the fast one are played while all steps of the slow one wait."""
    gate = tmp_path / "gate"
    gate.touch()
    playing = player(tmp_path, "Gated", Engines(), options={"gate": str(gate)})
    async with playing, asyncio.timeout(WAIT):
        slow = asyncio.create_task(playing.play(ticket(0, environment="letters"), example(0)))
        while not gate.with_name("gate.entered").exists():
            await asyncio.sleep(0.01)
        for _ in range(10):
            trajectories, _ = await playing.play(ticket(0, environment="fast"), example(0))
            assert [one.stop for one in trajectories] == ["done", "done"]
        assert not slow.done()
        gate.unlink()
        trajectories, _ = await slow
        assert [one.stop for one in trajectories] == ["done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reason", "words"),
    [
        ("number", "env_score", "the name of a reward is 1, but must be a text"),
        ("turns", "env_score", "a reward is called 'turns', as is the sum of the rewards of turns; rename it"),
        ("huge", "env_reset", "first messages leave no room for a turn in packer.sequence_len"),
    ],
)
async def test_what_can_not_be_trained_is_told_in_words(tmp_path: Path, way: str, reason: str, words: str) -> None:
    """Names that are none or are taken, and nine million characters, which are never made into tokens."""
    encoded: list[int] = []
    chat = fake.chat(64)
    playing = player(tmp_path, "Odd", Engines(), options={"way": way})
    counted = replace(chat, bridges=Bridges(chat.bridges._render, noting(chat.encode, encoded), [0], [0]))
    playing._chats = {"letters": counted, "fast": counted}
    one = ticket(0, environment="letters")
    async with playing, asyncio.timeout(WAIT):
        with pytest.raises(AttemptError, match=words) as failure:
            build_trajectory_group("run", "rollout-0", one, {}, (await playing.play(one, example(0)))[0])
    assert failure.value.reason == reason
    assert max(encoded, default=0) < 1_000_000


def noting(encode: Callable[[str], list[int]], sizes: list[int]) -> Callable[[str], list[int]]:
    """The same function; the sizes of its texts are noted."""

    def noted(text: str) -> list[int]:
        sizes.append(len(text))
        return encode(text)

    return noted
