"""One episode: an environment and the model, turn by turn, until one of them ends it.

Consumes an example's row and the calls of an environment (`actors.environments.pool.EpisodeCalls`). Emits a
`Trajectory`: exact tokens, messages, rewards of turns and of the whole, and why it ended. Each wait is a call with a
limit of its own. No failure becomes a reward: it is raised, and the attempt decides.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.engines.http.client import RequestRefusedError
from actors.environments.errors import EpisodeError
from actors.rollout.held import AttemptError
from actors.trajectories.bridges import Message
from actors.trajectories.forms import demand_of
from actors.trajectories.images import ImagesError, MessageImages
from actors.trajectories.recorder import RecordedTurn, Recorder, TrajectoryOverError
from actors.trajectories.tree import TrajectoryTree
from schemas.messages import EnvironmentFailure, Prompt, StopCondition

OPTIONS = frozenset({"tools", "max_tokens", "stop", "response_format", "tool_choice"})
"""Options with which an environment that drives may ask for a sample."""

Json = dict[str, Any]
Rewards = dict[str, float | None]


class Episode(Protocol):
    """Calls of an episode. Each raises `EpisodeError` when the environment fails."""

    @property
    def is_driving(self) -> bool:
        """True if the environment drives: `run` in place of `reset` and `step`."""
        ...

    @property
    def is_abandoned(self) -> bool:
        """True once a call was cancelled: the user's function may still run, and further calls stand behind it."""
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

    @property
    def turn_rewards(self) -> list[tuple[int, float]]:
        """Rewards that an environment that drives has given to turns, after `run`, also after one that has failed."""
        ...

    async def run(self, row: Json, seed: int, answer: Any, session: Json | None = None) -> Rewards:
        """Let the environment drive; return its rewards by name. `session`: address and key of an agent's session."""
        ...


class Sessions(Protocol):
    """The session of one trajectory, as its episode sees it."""

    @property
    def access(self) -> Json:
        """Address and key for the agent."""
        ...

    def split(self, rewards: Rewards) -> Rewards:
        """Take rewards of calls out of the agent's rewards; return the others."""
        ...

    def write(self, trajectory: "Trajectory") -> None:
        """Write what the session knows beside the turns into the trajectory."""
        ...


OpenSession = Callable[[Any, Json, MessageImages], AbstractAsyncContextManager[Sessions]]
"""Opens a session, of the function that samples turns, the example's data, and the trajectory's images."""


@dataclass
class Trajectory:
    """One attempt at an example. Filled turn by turn, so that nothing of a turn is lost if a later one fails."""

    recorder: Recorder
    messages: list[Message] = field(default_factory=list)
    """The conversation; of an environment that drives, the longest one."""
    num_prompt: int = 0
    """Messages in front of the model's first answer."""
    stop: StopCondition = "done"
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Turn and reward, where the environment gave one."""
    rewards: Rewards = field(default_factory=dict)
    """The environment's own, by name."""
    num_tool_failures: int = 0
    info: Json = field(default_factory=dict)
    """Numbers and short texts that the environment told with its turns: of each name the newest."""
    failure: str = ""
    """Why the environment failed; empty if it did not."""

    @property
    def tree(self) -> TrajectoryTree:
        """Tokens of all turns."""
        return self.recorder.tree


async def play(
    episode: Episode,
    recorder: Recorder,
    prompt: Prompt,
    row: Json,
    *,
    seed: int = 0,
    seconds: float | None = None,
    keeps_failed: bool = False,
    keeps_late: bool = True,
    sessions: OpenSession | None = None,
) -> Trajectory:
    """Play an episode to its end.

    Args:
        episode: the environment.
        recorder: the model, with the limits.
        prompt: the example's; the environment's first messages follow it.
        row: further columns of the example.
        seed: of the environment; the same for all attempts at an example.
        seconds: later the trajectory ends as `timeout`, with the turns that it has; None: never.
        keeps_failed: return a trajectory with turns whose environment has failed, as `failed`.
        keeps_late: return a trajectory with turns whose environment still works at the end of its time, as `timeout`
            with a failure: it can't be asked for its rewards.
        sessions: opens the session of an agent, which talks to the model over HTTP; None for other environments.

    Raises:
        EpisodeError: the environment fails, or there is no turn at the end.
        BridgeError: the chat template can't render the environment's messages.
    """
    trajectory = Trajectory(recorder)
    try:
        try:
            async with asyncio.timeout(seconds) as limit:
                if sessions is not None and not episode.is_driving:
                    raise EpisodeError("env_reset", "is no agent; an agent is run(data, base_url, api_key)")
                if episode.is_driving:
                    await _driven(trajectory, episode, prompt, row, seed, sessions)
                else:
                    await _stepped(trajectory, episode, prompt, row, seed)
        except TimeoutError:
            if not limit.expired():
                raise
            trajectory.stop = "timeout"
        if not recorder.tree.num_turns:
            raise _without_a_turn(trajectory.stop, seconds)
        # a score would stand behind a step that still runs, and hold up the group until the step's own limit; an
        # environment that drives gives its rewards at its end alone
        is_late = trajectory.stop == "timeout" and (episode.is_driving or episode.is_abandoned)
        if is_late:
            what = "the environment" if episode.is_driving else "a step"
            words = f"no rewards: {what} was still running after {seconds:g} s (trajectory_timeout)"
            if not keeps_late:
                raise EpisodeError("env_timeout", words)
            trajectory.failure = f"env_timeout: {words}"
        elif not episode.is_driving:
            trajectory.rewards = await episode.score()
    except EpisodeError as error:
        # a bystander has not failed, and may be played again
        if error.is_bystander or not (keeps_failed and recorder.tree.num_turns):
            raise
        trajectory.stop, trajectory.failure = "failed", f"{error.cause}: {error}"
    finally:
        # tasks that the environment has left behind change nothing any more
        recorder.close()
    return trajectory


def _without_a_turn(stop: StopCondition, seconds: float | None) -> EpisodeError:
    if stop == "timeout":
        return EpisodeError("env_timeout", f"no turn within {seconds:g} s (trajectory_timeout)")
    if stop == "context_full":
        return EpisodeError(
            "env_reset",
            "its first messages leave no room for a turn in packer.sequence_len; raise that, or cut the messages "
            "(environments[].max_message_tokens)",
        )
    return EpisodeError("env_reset", f"the episode ended without a turn of the model ({stop})")


async def _stepped(trajectory: Trajectory, episode: Episode, prompt: Prompt, row: Json, seed: int) -> None:
    """Show the environment each answer until one of both ends."""
    recorder = trajectory.recorder
    # TRL's environments get the prompt as a column too
    opening = await episode.reset(row | {"prompt": prompt}, seed)
    tools = opening["tools"] or None
    messages = opened(prompt, [recorder.cut(message) for message in _known(recorder, opening, "env_reset")])
    trajectory.messages, trajectory.num_prompt = messages, len(messages)
    trajectory.info |= opening.get("info", {})
    while True:
        try:
            message = await recorder.ask(messages, tools)
        except TrajectoryOverError as over:
            trajectory.stop = over.stop
            return
        except ImagesError as error:
            raise EpisodeError("env_step" if recorder.tree.num_turns else "env_reset", str(error)) from error
        except AttemptError as error:
            if recorder.tree.num_turns and _is_of_images(error):
                raise EpisodeError("env_step", f"an image can't be shown: {error}") from error
            raise
        messages.append(message)
        if recorder.cut_off:
            # half a message is no move: a bridge behind it would show the model an answer that it never gave
            trajectory.stop = "length"
            return
        turn = await episode.step(message)
        if turn["reward"] is not None:
            trajectory.turn_rewards.append((recorder.tree.num_turns - 1, turn["reward"]))
        trajectory.num_tool_failures += len(turn["tool_failures"])
        trajectory.info |= turn.get("info", {})
        messages += _known(recorder, turn, "env_step")
        # without messages there is nothing new to answer
        if turn["done"] or not turn["messages"]:
            trajectory.stop = "env_truncated" if turn["truncated"] else "done"
            return


def _known(recorder: Recorder, turn: Json, cause: EnvironmentFailure) -> list[Message]:
    """Return the messages of an environment's turn, with digests in the place of images.

    Raises:
        EpisodeError: an image can't be used; it costs what another failure of the environment costs.
    """
    try:
        return [recorder.images.known(message) for message in turn["messages"]]
    except ImagesError as error:
        raise EpisodeError(cause, str(error)) from error


def _is_of_images(error: Exception) -> bool:
    """Return whether an engine has refused the images of a request, whose pixels it is the first to decode."""
    return isinstance(error.__cause__, RequestRefusedError) and "images: " in str(error)


async def _driven(
    trajectory: Trajectory, episode: Episode, prompt: Prompt, row: Json, seed: int, sessions: OpenSession | None
) -> None:
    """Let an environment ask for samples until it returns."""
    driven, data = _Driven(trajectory), row | {"prompt": prompt}
    try:
        if sessions is None:
            trajectory.rewards = await episode.run(data, seed, driven.answer)
        else:
            session: Sessions | None = None
            try:
                images = trajectory.recorder.images
                async with sessions(driven.turn, data | {"seed": seed}, images) as session:
                    rewards = await episode.run(data, seed, driven.answer, session.access)
                    trajectory.rewards = session.split(rewards)
            finally:
                # once it is closed no answer comes any more
                if session is not None:
                    session.write(trajectory)
    except EpisodeError:
        # an environment that gives up because a limit of ours is reached has not failed; it has no reward but those
        # that it has given to turns
        if not driven.over and not driven.failed:
            raise
    if driven.failed:
        # whatever the user's code has made of it: a failure of the engines is no failure and no reward of its own
        raise driven.failed[0]
    if sessions is None:
        # those of an agent were in its session
        trajectory.turn_rewards = list(episode.turn_rewards)
    trajectory.stop = driven.over[0] if driven.over else "length" if driven.is_cut else "done"


class _Driven:
    """Turns of an environment that drives."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory, self._recorder = trajectory, trajectory.recorder
        self.over: list[StopCondition] = []
        """Limits that were reached."""
        self.failed: list[Exception] = []
        """Failures of the engines."""
        self.is_cut = False
        """Whether the longest conversation ends with a turn that was cut off."""

    async def answer(self, messages: list[Message], options: Json) -> Message:
        """Return the model's next message."""
        return (await self.turn(messages, options)).message

    async def turn(
        self, messages: Sequence[Message], options: Json, prompt_ids: Sequence[int] | None = None
    ) -> RecordedTurn:
        """Ask for the model's next message; the arguments are those of `Recorder.turn`."""
        messages = [self._recorder.images.known(message) for message in messages]
        if unknown := sorted(options.keys() - OPTIONS):
            raise ValueError(f"{unknown[0]}: is no option of a sample; {', '.join(sorted(OPTIONS))} are")
        demand = demand_of(
            options.get("response_format"), options.get("tool_choice"), options.get("tools") or (), once=False
        )
        stops = options.get("stop") or ()
        try:
            turn = await self._recorder.turn(
                messages,
                options.get("tools"),
                options.get("max_tokens"),
                [stops] if isinstance(stops, str) else stops,
                demand,
                prompt_ids,
            )
        except TrajectoryOverError as error:
            # an agent may ask on for ever
            self.over = self.over or [error.stop]
            raise
        except ValueError:
            # what the user's code has asked for can't be asked, which it may mend
            raise
        except Exception as error:
            is_asked = prompt_ids is not None or demand is not None
            if _is_of_images(error) or (is_asked and isinstance(error.__cause__, RequestRefusedError)):
                # tokens that the model does not have, a form that the engine can't sample, or damaged images
                raise ValueError(str(error)) from error
            self.failed = self.failed or [error]
            raise
        trajectory = self._trajectory
        if messages and len(messages) >= len(trajectory.messages):
            # nothing else has run since the turn came
            trajectory.messages, self.is_cut = [*messages, turn.message], self._recorder.cut_off
            roles = [one.get("role") for one in trajectory.messages]
            trajectory.num_prompt = roles.index("assistant")
        return turn


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
