"""One episode: an environment and the model, turn by turn, until one of them ends it. Not part of a group yet.

Consumes an example's row and the calls of an environment (`actors.environments.pool.EpisodeCalls`). Emits a
`Trajectory`: exact tokens, messages, rewards of turns and of the whole, and why it ended. Each wait is a call with a
limit of its own. No failure becomes a reward: it is raised, and the attempt decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.trajectories.bridges import Message
from actors.trajectories.recorder import Recorder, Stop, TrajectoryOverError
from actors.trajectories.tree import TrajectoryTree
from schemas.messages import Prompt

Json = dict[str, Any]
Rewards = dict[str, float | None]


class Episode(Protocol):
    """Calls of an episode. Each raises `EpisodeError` when the environment fails."""

    @property
    def is_driving(self) -> bool:
        """True if the environment drives: `run` in place of `reset` and `step`."""
        ...

    async def reset(self, row: Json, seed: int) -> Json:
        """Begin; return a turn with the first messages, and with the tools."""
        ...

    async def step(self, message: Json) -> Json:
        """Return the environment's answer to the model's message."""
        ...

    async def score(self) -> Rewards:
        """Return the environment's own rewards by name; None where it can't say."""
        ...

    async def run(self, row: Json, seed: int, answer: Any) -> Rewards:
        """Let the environment drive; return its rewards by name."""
        ...


@dataclass
class Trajectory:
    """One attempt at an example."""

    tree: TrajectoryTree
    messages: list[Message]
    """The conversation; of an environment that drives, the longest one."""
    stop: Stop
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Turn and reward, where the environment gave one."""
    rewards: Rewards = field(default_factory=dict)
    """The environment's own, by name."""
    num_calls: int = 0
    num_tool_failures: int = 0
    num_malformed: int = 0


async def play(episode: Episode, recorder: Recorder, prompt: Prompt, row: Json) -> Trajectory:
    """Play an episode to its end.

    Args:
        episode: the environment.
        recorder: the model, with the limits.
        prompt: the example's; the environment's first messages follow it.
        row: further columns of the example.

    Raises:
        EpisodeError: the environment fails.
        BridgeError: the chat template can't render the environment's messages.
    """
    try:
        return await (_driven if episode.is_driving else _stepped)(episode, recorder, prompt, row)
    finally:
        # tasks that the environment has left behind change nothing any more
        recorder.close()


async def _stepped(episode: Episode, recorder: Recorder, prompt: Prompt, row: Json) -> Trajectory:
    """Show the environment each answer until one of both ends."""
    # TRL's environments get the prompt as a column too
    opening = await episode.reset(row | {"prompt": prompt}, recorder.seed)
    tools = opening["tools"] or None
    messages = opened(prompt, [recorder.cut(message) for message in opening["messages"]])
    turn_rewards: list[tuple[int, float]] = []
    num_tool_failures = 0
    stop: Stop | None = None
    while stop is None:
        try:
            message = await recorder.ask(messages, tools)
        except TrajectoryOverError as over:
            stop = over.stop
            break
        messages.append(message)
        if recorder.cut_off:
            # half a message is no move: a bridge behind it would show the model an answer that it never gave
            stop = "length"
            break
        turn = await episode.step(message)
        if turn["reward"] is not None:
            turn_rewards.append((recorder.tree.num_turns - 1, turn["reward"]))
        num_tool_failures += len(turn["tool_failures"])
        messages += turn["messages"]
        if turn["done"]:
            stop = "env_truncated" if turn["truncated"] else "done"
        elif not turn["messages"]:
            # nothing new to answer
            stop = "done"
    rewards = await episode.score()
    return Trajectory(
        recorder.tree,
        messages,
        stop,
        turn_rewards,
        rewards,
        recorder.num_calls,
        num_tool_failures,
        recorder.num_malformed,
    )


async def _driven(episode: Episode, recorder: Recorder, prompt: Prompt, row: Json) -> Trajectory:
    """Let an environment ask for samples until it returns."""
    longest: list[Message] = []
    over: list[Stop] = []
    is_cut = False

    async def answer(messages: list[Message], options: Json) -> Message:
        nonlocal longest, is_cut
        if unknown := sorted(options.keys() - {"tools", "max_tokens", "stop"}):
            raise ValueError(f"{unknown[0]}: is no option of a sample; tools, max_tokens and stop are")
        stops = options.get("stop") or ()
        try:
            message = await recorder.ask(
                messages, options.get("tools"), options.get("max_tokens"), [stops] if isinstance(stops, str) else stops
            )
        except TrajectoryOverError as error:
            over.append(error.stop)
            raise
        if len(messages) >= len(longest):
            # nothing else has run since the turn came
            longest, is_cut = [*messages, message], recorder.cut_off
        return message

    rewards = await episode.run(row | {"prompt": prompt}, recorder.seed, answer)
    stop: Stop = over[0] if over else "length" if is_cut else "done"
    return Trajectory(
        recorder.tree,
        longest,
        stop,
        rewards=rewards,
        num_calls=recorder.num_calls,
        num_malformed=recorder.num_malformed,
    )


def opened(prompt: Prompt, messages: Sequence[Message]) -> list[Message]:
    """Return the first messages: the prompt, and the environment's behind it.

    A user's message behind a user's message is joined with it, as TRL appends what `reset` returns: most chat templates
    know no two in a row. Contents in parts stay in parts.
    """
    first: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    rest = list(messages)
    if isinstance(prompt, str) and not prompt:
        first = []
    if first and rest and first[-1].get("role") == rest[0].get("role") == "user":
        before, behind = first[-1].get("content"), rest[0].get("content")
        joined: str | list[Any] | None = None
        if isinstance(before, str) and isinstance(behind, str):
            joined = before + behind
        elif isinstance(before, str | list) and isinstance(behind, str | list):
            joined = [*_parts(before), *_parts(behind)]
        if joined is not None:
            return [*first[:-1], first[-1] | {"content": joined}, *rest[1:]]
    return [*first, *rest]


def _parts(content: str | list[Any]) -> list[Any]:
    """Return a content as parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
