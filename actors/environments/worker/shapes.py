"""Environments of several makers behind one interface: an `Episode` that is reset, stepped, scored and closed.

The form is recognised by what the class has, in this order:

    stepped   `reset(**row)` and `step(answer)`                       an environment of one's own
              `reset(seed=, options=)` and an `action_space`          gymnasium
              async `reset(config)` and async `step(messages)`        ms-swift's gym
    tools     `reset(**row)`, every other public method is a tool     TRL's `environment_factory`
              a list of functions                                     TRL's `tools`
    driving   `run(example, policy)`                                  a coroutine that asks for samples itself
    agent     `run(data, base_url, api_key)`                          a program that talks to an LLM's API

A step returns (observation, reward, done), optionally followed by a dictionary; or gymnasium's five values.
"""

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tools import Json, called, described, public_methods

Run = Callable[..., Awaitable[Any]]
"""Coroutine function that runs a function with arguments: async ones on the event loop, others in a thread."""
NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of TRL's class that are no tools."""
OF_THE_CLASS = ("examples", "score_group")
"""Further names that are no tools, where they belong to the class and not to its objects."""
NUMBER = re.compile(r"(?<![\d.])-?\d{1,18}(?!\.?\d)")
"""A whole number: neither a part of a decimal fraction, nor of more digits than an action has."""


class ShapeError(TypeError):
    """Error for an object of no known form, or for a result that the form does not allow; says what to change."""


@dataclass
class Turn:
    """Answer of an environment to a message of the model, or to a reset."""

    messages: list[Json]
    """New messages for the model; empty if the episode is over without a last word."""
    reward: float | None = None
    """Reward of this turn; None if the environment gives none here."""
    done: bool = False
    truncated: bool = False
    """True if the environment has ended the episode for want of turns or time, in gymnasium's sense."""
    info: Json = field(default_factory=dict)
    tool_failures: list[str] = field(default_factory=list)
    """Text of each tool call that failed."""
    tools: list[Json] = field(default_factory=list)
    """Descriptions of the tools, in the answer to a reset."""
    columns: Json = field(default_factory=dict)
    """Further columns of the example for reward functions, in the answer to a reset."""


class Episode(ABC):
    """One attempt at one example. Its methods are called one after the other.

    Args:
        environment: the user's object.
        run: runs the user's functions.
    """

    def __init__(self, environment: Any, run: Run) -> None:
        self._environment, self._run = environment, run

    @property
    def environment(self) -> Any:
        """The user's object."""
        return self._environment

    @abstractmethod
    async def reset(self, row: Json, seed: int) -> Turn:
        """Begin, and return the first messages, which are appended to the example's prompt."""

    @abstractmethod
    async def step(self, message: Json) -> Turn:
        """Return the environment's answer to a message of the model."""

    async def score(self) -> dict[str, float | None]:
        """Return the environment's own rewards by name, beside those of the turns; None: it can't say."""
        return {}

    async def close(self) -> None:
        """Free what the episode holds."""
        if hasattr(self._environment, "close"):
            await self._run(self._environment.close)


class Stepped(Episode):
    """Environment with `reset(**row)` and `step(answer)`. A step gets the text, or as `message` the whole message."""

    async def reset(self, row: Json, seed: int) -> Turn:
        """Call `reset` with the row's columns, and with `seed` where it takes one."""
        reset = self._environment.reset
        observation = await self._run(reset, **accepted(reset, row | {"seed": seed}))
        if isinstance(observation, tuple):
            observation = observation[0]
        return Turn(_messages(observation, "user"))

    async def step(self, message: Json) -> Turn:
        """Call `step` with the text, or with the whole message."""
        step = self._environment.step
        names = list(inspect.signature(step).parameters)
        whole = names[:1] == ["message"]
        return _turn(await self._run(step, message if whole else message.get("content") or ""))

    async def score(self) -> dict[str, float | None]:
        """Return the result of `get_reward`, a number under the name of the class, if there is one."""
        return await _get_reward(self._environment, self._run)


class Gymnasium(Episode):
    """Environment of gymnasium. The last number in the model's text is the action of a discrete space."""

    async def reset(self, row: Json, seed: int) -> Turn:
        """Reset with the seed; the row's column `options`, if there is one, becomes gymnasium's options."""
        observation, info = await self._run(self._environment.reset, seed=seed % 2**31, options=row.get("options"))
        return Turn(_messages(await self._shown(observation), "user"), info=_plain_info(info))

    async def step(self, message: Json) -> Turn:
        """Act. A text without an action costs a turn: its answer says what the actions are."""
        space = self._environment.action_space
        action = _action(space, message.get("content") or "")
        if action is None:
            return Turn(_messages(f"No action was found. Answer with one of: {space}", "user"), info={"invalid": True})
        observation, reward, terminated, truncated, info = await self._run(self._environment.step, action)
        shown = await self._shown(observation)
        over = bool(terminated or truncated)
        return Turn(_messages(shown, "user"), finite(reward), over, bool(truncated), _plain_info(info))

    async def _shown(self, observation: Any) -> str:
        """Return the picture in letters where the environment draws one, otherwise the observation."""
        if getattr(self._environment, "render_mode", None) == "ansi":
            return str(await self._run(self._environment.render))
        return str(observation)


class SwiftConfig(dict[str, Any]):
    """Request of the dataset's row, as ms-swift's `reset` gets it; here also the map of the environment's settings."""

    def __init__(self, row: Json) -> None:
        super().__init__(row.get("env_config") or row)
        self.data_dict = row


class SwiftGym(Episode):
    """Environment of ms-swift: `reset(config)` returns observation, info and a system message; `step` gets messages."""

    async def reset(self, row: Json, seed: int) -> Turn:
        """Reset with the row: as `config.data_dict`, and its column `env_config` (or all of it) as a map."""
        observation, info, system = await self._run(self._environment.reset, SwiftConfig(row))
        self._history = [*_messages(system, "system"), *_messages(observation, "user")]
        return Turn(list(self._history), info=_plain_info(info))

    async def step(self, message: Json) -> Turn:
        """Step with the whole conversation so far."""
        self._history.append(message)
        turn = _turn(await self._run(self._environment.step, list(self._history)))
        self._history += turn.messages
        return turn


class Tools(Episode):
    """Environment whose public methods are tools (TRL). An answer without a call ends the episode.

    Args:
        functions: the tools by name; by default the public methods.
    """

    def __init__(self, environment: Any, run: Run, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__(environment, run)
        kept = [name for name in OF_THE_CLASS if _is_of_the_class(environment, name)]
        self._tools = public_methods(environment, [*NOT_TOOLS, *kept]) if functions is None else functions

    async def reset(self, row: Json, seed: int) -> Turn:
        """Call `reset` with the row's columns, if there is one; name the tools."""
        observation = None
        if reset := getattr(self._environment, "reset", None):
            observation = await self._run(reset, **accepted(reset, row))
        tools = [described(tool, name) for name, tool in self._tools.items()]
        return Turn([] if observation is None else _messages(observation, "user"), tools=tools)

    async def step(self, message: Json) -> Turn:
        """Call each tool that the message names, one after the other."""
        calls = message.get("tool_calls") or []
        answers = [await called(self._tools, call, self._run) for call in calls]
        return Turn(
            [answer for answer, _ in answers],
            done=not calls,
            tool_failures=[failure for _, failure in answers if failure],
        )

    async def score(self) -> dict[str, float | None]:
        """Return the result of `get_reward`, a number under the name of the class, if there is one."""
        return await _get_reward(self._environment, self._run)


def is_driving(target: Any) -> bool:
    """Return whether an object asks for samples itself: a coroutine of example and policy, or an agent."""
    run = runner_of(target)
    if is_agent(target):
        return True
    return inspect.iscoroutinefunction(run) and [*inspect.signature(run).parameters][-2:] == ["example", "policy"]


def is_agent(target: Any) -> bool:
    """Return whether an object is, or has as `run`, a function with `base_url` and `api_key`, or of `data` and others.

    (AReaL's agents are `async def run(self, data, **extra)`.)
    """
    run = runner_of(target)
    if not callable(run):
        return False
    try:
        parameters = inspect.signature(run).parameters
    except (TypeError, ValueError):  # of a class in C, say
        return False
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"base_url", "api_key"} <= parameters.keys() or ("data" in parameters and takes_any)


def runner_of(target: Any) -> Any:
    """Return the function that drives: the target itself, or its `run`; None if it has none."""
    return target if inspect.isfunction(target) else getattr(target, "run", None)


def episode_maker(target: Any, options: Json) -> Callable[[Run, Json], Awaitable[Episode]]:
    """Return the coroutine function that makes an episode (for a row) of a class, a factory or a list of functions.

    Args:
        target: what the user's path names.
        options: keyword arguments of the class or factory.

    Raises:
        ShapeError: the episode is made, but has none of the forms.
    """
    if isinstance(target, Sequence):
        functions = {function.__name__: function for function in target}

        async def with_tools(run: Run, row: Json) -> Episode:
            return Tools(None, run, functions)

        return with_tools

    async def made(run: Run, row: Json) -> Episode:
        # ms-swift's constructors take the settings of the row
        settings = {"env_config": row.get("env_config") or {}} if _takes(target, "env_config") else {}
        environment = await run(target, **settings | options)
        return _form_of(environment)(environment, run)

    return made


def _is_of_the_class(environment: Any, name: str) -> bool:
    """Return whether a method is static, or of the class."""
    return isinstance(inspect.getattr_static(type(environment), name, None), (staticmethod, classmethod))


def _takes(function: Any, name: str) -> bool:
    """Return whether a function or class has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a class in C, say
        return False


def _form_of(environment: Any) -> type[Episode]:
    reset, step = getattr(environment, "reset", None), getattr(environment, "step", None)
    if reset is None:
        raise ShapeError(
            f"{type(environment).__name__} has no method reset; an environment has reset(**row), and step(answer) or "
            "public methods as tools; or it is a coroutine of (example, policy)"
        )
    if step is None:
        return Tools
    if hasattr(environment, "action_space"):
        return Gymnasium
    if inspect.iscoroutinefunction(reset) and [*inspect.signature(reset).parameters] == ["config"]:
        return SwiftGym
    return Stepped


def _turn(result: Any) -> Turn:
    """Return the turn in a result of `step`."""
    if not isinstance(result, tuple) or len(result) not in (3, 4, 5):
        raise ShapeError(
            f"step returned {type(result).__name__}, but must return (observation, reward, done), "
            "optionally with a dictionary, or gymnasium's five values"
        )
    observation, reward, done, *rest = result
    truncated = bool(rest[0]) if len(result) == 5 else False
    info = rest[-1] if rest and isinstance(rest[-1], dict) else {}
    return Turn(
        [] if observation is None else _messages(observation, "user"),
        finite(reward),
        bool(done) or truncated,
        truncated,
        _plain_info(info),
    )


def _messages(observation: Any, role: str) -> list[Json]:
    """Return an observation as messages: a list of messages as it stands, anything else as the text of one."""
    if isinstance(observation, list) and all(isinstance(one, dict) and "role" in one for one in observation):
        return observation
    if isinstance(observation, dict) and "role" in observation:
        return [observation]
    return [{"role": role, "content": str(observation)}] if observation not in (None, "") else []


def _plain_info(info: Any) -> Json:
    """Return what can be sent of an `info`: numbers and short texts."""
    kept = info.items() if isinstance(info, Mapping) else ()
    return {str(k): v for k, v in kept if isinstance(v, (bool, int, float)) or (isinstance(v, str) and len(v) < 200)}


def accepted(function: Callable[..., Any], values: Json) -> Json:
    """Return the values that a function has parameters for; all of them if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _action(space: Any, text: str) -> Any:
    """Return the action that a text names; None if it names none of the space."""
    numbers = NUMBER.findall(text)
    if not hasattr(space, "n"):
        raise ShapeError(f"the action space {space} is not discrete; wrap the environment in a class with step(answer)")
    if not numbers:
        return None
    action = int(numbers[-1])
    first = int(getattr(space, "start", 0))
    return action if first <= action < first + int(space.n) else None


async def _get_reward(environment: Any, run: Run) -> dict[str, float | None]:
    if not hasattr(environment, "get_reward"):
        return {}
    return named_rewards(await run(environment.get_reward), type(environment).__name__)


def named_rewards(result: Any, name: str) -> dict[str, float | None]:
    """Return rewards by name: those of a dictionary, or a number (None: it can't say) under a given name.

    Raises:
        ShapeError: one is not finite, or a name is no text.
    """
    rewards = result if isinstance(result, dict) else {name: result}
    for key in rewards:
        if not isinstance(key, str):
            raise ShapeError(f"the name of a reward is {key!r}, but must be a text")
    return {key: finite(value, f"the reward {key!r}") for key, value in rewards.items()}


def finite(reward: Any, what: str = "the reward") -> float | None:
    """Return a reward as a number; None stays None.

    Raises:
        ShapeError: it is not finite: one such reward would spoil the advantages of its whole group.
    """
    if reward is None:
        return None
    number = float(reward)
    if not math.isfinite(number):
        raise ShapeError(f"{what} is {number}, but must be a finite number")
    return number
