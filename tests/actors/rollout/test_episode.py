"""Episodes of real worker processes with a model that writes given texts: what a trajectory holds, and why it ends."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from actors.rollout.episode import Trajectory, opened, play
from actors.rollout.held import AttemptError
from actors.trajectories.recorder import Recorder, TrajectoryOverError, TurnAnswer, TurnLimits, TurnRequest
from tests.actors.environments.test_pool import WAIT, WORLDS
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer, language

RING_WORLDS = Path(__file__).parents[2] / "ring" / "worlds.py"
LIMITS = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)


def call(name: str, **arguments: Any) -> str:
    """What Qwen writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(
    world: str, texts: list[str], row: dict[str, Any], prompt: Any = "", limits: TurnLimits | None = None
) -> tuple[Trajectory, Writer]:
    """An episode of an environment of worlds.py."""
    writer = Writer(Chat("qwen2_5"), texts)
    spec = EnvironmentSpec(world.lower(), f"{WORLDS}:{world}", limits=LIMITS)
    async with WorkerPool(spec) as pool, await pool.episode(WAIT) as episode:
        return await play(episode, writer.recorder(limits), prompt, row), writer


@pytest.mark.slow
async def test_a_game_is_played_to_its_end() -> None:
    """Rewards belong to the turns that earned them; the conversation is whole."""
    trajectory, writer = await played("Guess", ["5", "8", "7"], {"target": 7}, [{"role": "user", "content": "Play. "}])
    assert trajectory.stop == "done"
    assert trajectory.turn_rewards == [(0, 0.0), (1, 0.0), (2, 1.0)]
    assert [message["content"] for message in trajectory.messages] == [
        "Play. Guess a number from 1 to 9.",
        *("5", "Higher.", "8", "Lower.", "7", "Right."),
    ]
    [sample] = trajectory.tree.samples()
    assert sum(sample.loss_mask) == sum(len(answer.token_ids) for answer in writer.answers)


@pytest.mark.slow
async def test_tools_are_called_and_failures_counted() -> None:
    """The model is told its mistakes; the environment's reward is a column of its own."""
    texts = [call("add", number=2) + call("add", number=3), call("explode"), "<tool_call>\n{add}\n</tool_call>"]
    trajectory, _ = await played("Counter", texts, {"start": 1}, "Count.")
    assert (trajectory.stop, trajectory.rewards) == ("done", {"Counter": 6.0})
    assert (trajectory.recorder.num_calls, trajectory.num_tool_failures, trajectory.recorder.num_malformed) == (3, 1, 1)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["3", "6", "{'error': 'boom'}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "limits", "stop", "turns"),
    [
        (["12345"], TurnLimits(1000, 3), "length", 1),
        (["1", "2", "3"], TurnLimits(1000, 9, max_turns=2), "max_turns", 2),
        (["1", "2", "3"], TurnLimits(180, 9), "context_full", 2),
    ],
)
async def test_a_limit_ends_the_trajectory_and_keeps_its_turns(
    texts: list[str], limits: TurnLimits, stop: str, turns: int
) -> None:
    """A message that was cut off never reaches the environment."""
    trajectory, _ = await played("Guess", texts, {"target": 9}, limits=limits)
    assert (trajectory.stop, trajectory.tree.num_turns) == (stop, turns)
    assert len(trajectory.turn_rewards) == (0 if stop == "length" else turns)


@pytest.mark.slow
async def test_the_end_of_the_environments_time_is_no_success() -> None:
    """gymnasium tells both apart."""
    trajectory, _ = await played("Lake", ["3", "3", "3", "3"], {"options": {"start": 1}})
    assert (trajectory.stop, trajectory.turn_rewards[-1]) == ("env_truncated", (2, 0.0))


@pytest.mark.slow
async def test_a_coroutine_drives_through_the_same_recorder() -> None:
    """Its second request continues the first, token by token."""
    trajectory, writer = await played("drive", ["one", "four"], {"question": "Why?"})
    assert (trajectory.stop, trajectory.rewards) == ("done", {"length": 4.0, "none": None})
    first, second = writer.requests
    assert (first.max_tokens, trajectory.tree.num_branches) == (5, 0)
    so_far = first.prompt_ids + writer.answers[0].token_ids
    assert second.prompt_ids[: len(so_far)] == so_far
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.slow
async def test_a_failure_is_raised_and_no_reward() -> None:
    """An answer that the environment can't read is the environment's to handle; here it does not."""
    with pytest.raises(EpisodeError, match="ValueError: invalid literal for int") as failure:
        await played("Guess", ["seven"], {"target": 7})
    assert failure.value.cause == "env_step"


@pytest.mark.parametrize(
    ("prompt", "messages", "expected"),
    [
        ("ab", [], [("user", "ab")]),
        ("", [("user", "cd")], [("user", "cd")]),
        ("ab", [("user", "cd")], [("user", "abcd")]),
        ([("system", "s")], [("user", "cd")], [("system", "s"), ("user", "cd")]),
        ([("user", "ab")], [("system", "s"), ("user", "cd")], [("user", "ab"), ("system", "s"), ("user", "cd")]),
        ([("system", "s"), ("user", "ab")], [("user", "cd")], [("system", "s"), ("user", "abcd")]),
    ],
)
def test_what_reset_says_follows_the_prompt(prompt: Any, messages: Any, expected: Any) -> None:
    """In the last user's message, as in TRL."""
    as_messages = [[{"role": r, "content": c} for r, c in part] for part in (messages, expected)]
    given = prompt if isinstance(prompt, str) else [{"role": r, "content": c} for r, c in prompt]
    assert opened(given, as_messages[0]) == as_messages[1]


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ([{"type": "text", "text": "ab"}], "cd", [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]),
        ("ab", [{"type": "image"}], [{"type": "text", "text": "ab"}, {"type": "image"}]),
        ([{"type": "image"}], [{"type": "text", "text": "cd"}], [{"type": "image"}, {"type": "text", "text": "cd"}]),
    ],
)
def test_contents_in_parts_are_joined_as_parts(prompt: Any, said: Any, expected: Any) -> None:
    """Never written out as Python's text of a list."""
    first, then = {"role": "user", "content": prompt}, {"role": "user", "content": said}
    assert opened([first], [then]) == [{"role": "user", "content": expected}]


def test_a_message_without_a_content_stays_as_it_is() -> None:
    """The chat template says what it thinks of it."""
    bare: list[Any] = [{"role": "user"}]
    then = {"role": "user", "content": "cd"}
    assert opened(bare, [then]) == [*bare, then]
    assert opened([then], bare) == [then, *bare]


class Told:
    """Episode in this process: remembers its row, and asks once more when it is over."""

    def __init__(self, driving: bool, text: str = "Guess.") -> None:
        self.is_driving, self.is_abandoned, self._text = driving, False, text
        self.row: dict[str, Any] = {}
        self.turn_rewards: list[tuple[int, float]] = []
        self.answer: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin."""
        self.row = row
        return {"messages": [{"role": "user", "content": self._text}], "tools": []}

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """End."""
        return {"messages": [], "reward": None, "tool_failures": [], "done": True, "truncated": False}

    async def score(self) -> dict[str, float | None]:
        """Return nothing."""
        return {}

    async def run(self, row: dict[str, Any], seed: int, answer: Any) -> dict[str, float | None]:
        """Ask once, and go on when the turn was cut."""
        self.row, self.answer = row, answer
        messages = [{"role": "user", "content": self._text}]
        message = await answer(messages, {})
        with contextlib.suppress(TrajectoryOverError):
            await answer([*messages, message, *messages], {})
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
async def test_an_environment_that_drives_on_after_its_time_has_no_reward_and_says_so(is_kept: bool) -> None:
    """Its turns are there; a failure makes the trajectory unscorable, also where None counts as 0."""

    class Endless(Told):
        async def run(self, row: dict[str, Any], seed: int, answer: Any) -> dict[str, float | None]:
            await answer([{"role": "user", "content": "Go."}], {})
            await asyncio.Event().wait()
            return {"won": 1.0}

    late = play(
        Endless(driving=True), Writer(Chat("qwen2_5"), ["a"]).recorder(), "", {}, seconds=2.0, keeps_late=is_kept
    )
    if not is_kept:
        with pytest.raises(EpisodeError, match="the environment was still running after 2 s"):
            await late
        return
    trajectory = await late
    assert (trajectory.stop, trajectory.rewards, trajectory.tree.num_turns) == ("timeout", {}, 1)
    assert trajectory.failure.startswith("env_timeout: no rewards: the environment was still running")


async def test_of_each_info_the_newest_value_is_kept() -> None:
    """Those of the reset too; a step may tell only some."""
    infos: list[dict[str, Any]] = [{"level": 1, "invalid_moves": 0}, {"invalid_moves": 1}, {}, {"invalid_moves": 2}]

    class Informed(Told):
        async def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
            return {**await super().reset(row, seed), "info": infos.pop(0)}

        async def step(self, message: dict[str, Any]) -> dict[str, Any]:
            more = {"messages": [{"role": "user", "content": "More."}], "done": len(infos) == 1}
            return {**await super().step(message), **more, "info": infos.pop(0)}

    trajectory = await play(Informed(driving=False), Writer(Chat("qwen2_5"), ["a", "b", "c"]).recorder(), "", {})
    assert trajectory.info == {"level": 1, "invalid_moves": 2}


@pytest.mark.parametrize("driving", [False, True])
async def test_an_environment_gets_the_prompt_as_a_column(driving: bool) -> None:
    """As TRL's do."""
    episode = Told(driving)
    await play(episode, Writer(Chat("qwen2_5"), ["a", "b"]).recorder(), "Play.", {"target": 7})
    assert episode.row == {"target": 7, "prompt": "Play."}


async def test_no_turn_is_asked_behind_the_end_of_an_episode() -> None:
    """A task that the environment has left behind gets an error, and the trajectory stays as it was."""
    episode, writer = Told(driving=True), Writer(Chat("qwen2_5"), ["a", "b", "c"])
    trajectory = await play(episode, writer.recorder(), "", {})
    with pytest.raises(TrajectoryOverError, match="the episode is over"):
        await episode.answer([{"role": "user", "content": "More."}], {})
    assert (trajectory.stop, trajectory.tree.num_turns, len(writer.requests)) == ("done", 2, 2)


async def test_an_environment_that_drives_can_not_go_on_behind_a_cut_turn() -> None:
    """As with one that is stepped."""
    trajectory = await play(Told(driving=True), Writer(Chat("qwen2_5"), ["abc"]).recorder(TurnLimits(999, 2)), "", {})
    assert (trajectory.stop, trajectory.tree.num_turns) == ("length", 1)


async def test_what_reset_says_is_cut_and_the_prompt_is_not() -> None:
    """max_message_tokens is for the environment's messages."""
    writer = Writer(Chat("qwen2_5"), ["a"])
    recorder = writer.recorder(TurnLimits(9999, 9, max_message_tokens=10))
    trajectory = await play(Told(driving=False, text="y" * 200), recorder, "p" * 200, {})
    content = trajectory.messages[0]["content"]
    assert content == "p" * 200 + "yyyyy\n[190 tokens left out]\nyyyyy"


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_step_that_goes_on_at_the_end_of_the_time_holds_nothing_up(tmp_path: Path, is_kept: bool) -> None:
    """Neither a score nor a close is waited for: both would stand behind the step. There is no reward, not 0."""
    gate = tmp_path / "gate"
    gate.touch()
    writer = Writer(Chat("qwen2_5"), ["a", "b"])
    spec = EnvironmentSpec("gated", f"{RING_WORLDS}:Gated", options={"gate": str(gate)}, limits=LIMITS)
    async with WorkerPool(spec) as pool:
        entered = await pool.episode(WAIT)
        started = time.monotonic()
        expected = contextlib.nullcontext() if is_kept else pytest.raises(EpisodeError, match="trajectory_timeout")
        with expected:
            async with entered as episode:
                trajectory = await play(episode, writer.recorder(), "", {}, seconds=2.0, keeps_late=is_kept)
            assert (trajectory.stop, trajectory.rewards, trajectory.tree.num_turns) == ("timeout", {}, 2)
            assert trajectory.failure.startswith("env_timeout: ")
        assert time.monotonic() - started < WAIT / 2
        assert gate.with_name("gate.entered").exists()
        assert (pool.num_ready, pool.workers[entered._worker.identity].num_episodes) == (1, 1)
        gate.unlink()
        async with asyncio.timeout(WAIT):
            while entered._worker.num_episodes:
                await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_failure_of_the_engines_that_the_environment_swallows_is_no_reward() -> None:
    """It fails the attempt, whatever a coroutine that drives makes of it."""
    answers = Writer(Chat("qwen2_5"), ["a"])

    async def sample(request: TurnRequest) -> TurnAnswer:
        if answers.requests:
            raise AttemptError("engine", "all engines are gone")
        return await answers.sample(request)

    recorder = Recorder(language(Chat("qwen2_5")), sample, TurnLimits(1000, 9), 7)
    spec = EnvironmentSpec("swallows", f"{RING_WORLDS}:Swallows", limits=LIMITS)
    async with WorkerPool(spec) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(AttemptError, match="all engines are gone") as failure:
            await play(episode, recorder, "", {}, keeps_failed=True)
    assert failure.value.reason == "engine"
