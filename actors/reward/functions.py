"""User functions of rewards, steps and advantages: loaded from a configured `path`, with their arguments and checks.

Only the reward actor loads user code for rewards.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.advantages import StepRewards
from actors.reward.logged import RewardLog, TrainerState
from actors.reward.lookup import (
    ARGUMENTS,
    TRL_ARGUMENTS,
    RewardFunction,
    is_maker,
    load_function,
    make_function,
)
from actors.reward.orm import adapt_orm
from actors.reward.values import check_steps, check_values
from actors.reward.workers import WorkerFunction, WorkerHost
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import RewardFunctionConfig, ShapingConfig, StepRewardConfig
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup

UNSHAPED = ShapingConfig()
REWARD_MODEL = "actors.reward.reward_model:RewardModel"
"""Class that the workers of a reward model load."""


@dataclass(frozen=True)
class NamedReward:
    """Reward function, loaded."""

    name: str
    weight: float
    kwargs: dict[str, Any]
    function: RewardFunction
    shaping: ShapingConfig = UNSHAPED
    log: RewardLog | None = None
    """Destination of what the function logs; None: nowhere."""

    @cached_property
    def takes_token_ids(self) -> bool:
        """True if the function accepts `completion_ids`."""
        if isinstance(self.function, WorkerFunction):
            return self.function.takes_token_ids
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            # a function written in C has no signature
            return False
        return any(p.name == "completion_ids" or p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def is_async(self) -> bool:
        """True for an `async def` function, which runs on the event loop."""
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def _takes(self) -> set[str]:
        """Names among TRL's further arguments that the signature names; in a worker process there are none."""
        if isinstance(self.function, WorkerFunction):
            return set()
        try:
            return set(TRL_ARGUMENTS & inspect.signature(self.function).parameters.keys())
        except (TypeError, ValueError):
            return set()

    def trl_arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Return TRL's `log_extra`, `log_metric` and `trainer_state` as far as the signature names them."""
        if not self._takes:
            return {}
        newest = max((version for _, version in group.policies), default=0)
        given: dict[str, Any] = {"trainer_state": TrainerState(newest), **(self.log or RewardLog()).writers(group)}
        return {name: given[name] for name in self._takes}

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Return keyword arguments as TRL passes them: lists with an item per completion.

        Completions of chat prompts are lists of messages; with an environment, all messages behind the prompt. The
        sampled group's own arguments replace `kwargs` of the same name, and `kwargs` replace columns of the data.
        """
        as_chat, size = not isinstance(group.prompt, str), group.num_completions
        arguments: dict[str, Any] = {name: [value] * size for name, value in group.columns.items()} | self.kwargs
        if group.transcripts:
            transcripts = [group.transcript(g) for g in range(size)]
            arguments["prompts"] = [prompt for prompt, _ in transcripts]
            arguments["completions"] = [behind for _, behind in transcripts]
        else:
            arguments["prompts"] = [group.prompt] * size
            arguments["completions"] = [
                [{"role": "assistant", "content": text}] if as_chat else text for text in group.completions
            ]
        # built on demand: a Python list takes nine times the memory of the array
        if self.takes_token_ids:
            parts = np.split(group.token_ids, group.completion_offsets[1:-1])
            arguments["completion_ids"] = [part.tolist() for part in parts]
        return arguments | self.trl_arguments(group)

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """Return the function's values in the form in which they are used.

        Raises:
            RewardError: the values are invalid.
        """
        return check_values(self.name, values, group.num_completions)


class StepReward(NamedReward):
    """Function of `reward.steps`, loaded: rewards steps inside completions."""

    def check(self, values: Any, group: RolloutGroup) -> list[StepRewards]:
        """Return the steps of each completion, as (end, reward) pairs. Raises RewardError for invalid ones."""
        return check_steps(self.name, values, group.num_tokens_G.tolist())


class AdvantageFunction(NamedReward):
    """Function of `reward.advantage`, loaded: computes advantages from rewards."""

    def on(self, rewards_PG: NDArray[np.float64], lengths_PG: NDArray[np.int64]) -> "AdvantageFunction":
        """Return a copy with the two arrays bound as the first arguments, of shape (P, G)."""
        return replace(self, function=partial(self.function, rewards_PG, lengths_PG))

    def arguments(self, group: RolloutGroup) -> dict[str, Any]:
        """Return the function's `kwargs`; the arrays are bound already."""
        return self.kwargs

    def check(self, values: Any, group: RolloutGroup) -> Any:
        """Return the values unchanged: the caller knows the shape of advantages and checks it."""
        return values


def load_rewards(configs: Sequence[RewardFunctionConfig], host: WorkerHost | None = None) -> list[NamedReward]:
    """Load the configured reward functions. Names are the last part of each path, with a number where repeated.

    Args:
        configs: the functions.
        host: starts the workers of functions with `python`, which it may still be loading at the return.

    Raises:
        ConfigError: a function can't be found, or its kwargs have the name of an argument.
    """
    problems = [
        problem
        for i, config in enumerate(configs)
        for problem in _taken_names(f"reward.functions.{i}.kwargs", config.kwargs)
    ]
    if problems:
        raise ConfigError(*problems)
    names = [config.title for config in configs]
    # repeated names get their position in the configuration, also in the columns of metrics.jsonl
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    shapings = [ShapingConfig(bias=config.bias, scale=config.scale, clip=config.clip) for config in configs]
    functions = [
        _load_model(name, f"reward.functions.{i}.model", config, host)
        if config.model
        else _load(name, f"reward.functions.{i}.path", config, host)
        for i, (name, config) in enumerate(zip(unique, configs, strict=True))
    ]
    return [
        # what a maker has taken is no argument of the function that it has made
        NamedReward(name, config.weight, {} if is_maker(config.path) else config.kwargs, function, shaping)
        for name, config, function, shaping in zip(unique, configs, functions, shapings, strict=True)
    ]


def load_steps(config: StepRewardConfig, host: WorkerHost | None = None) -> StepReward:
    """Load the function of `reward.steps`.

    Args:
        config: the function.
        host: as for `load_rewards`.

    Raises:
        ConfigError: the function can't be found, or its kwargs have the name of an argument.
    """
    if problems := _taken_names("reward.steps.kwargs", config.kwargs):
        raise ConfigError(*problems)
    name = (config.path or "").rpartition(":")[2]
    return StepReward(name, 0.0, config.kwargs, _load(name, "reward.steps.path", config, host))


def load_advantage(config: CustomAdvantageConfig) -> AdvantageFunction:
    """Load the function of `reward.advantage`.

    Raises:
        ConfigError: the function can't be found.
    """
    name = config.path.rpartition(":")[2]
    return AdvantageFunction(name, 0.0, config.kwargs, load_function(config.path, "reward.advantage.path"))


def _load(
    name: str, key: str, config: RewardFunctionConfig | StepRewardConfig, host: WorkerHost | None
) -> RewardFunction:
    assert config.path is not None
    # a worker process calls the function of the path itself, so a maker is refused there
    if is_maker(config.path) and not config.python and isinstance(config, RewardFunctionConfig):
        return make_function(config.path, key, config.kwargs)
    if not config.python or is_maker(config.path):
        found = load_function(config.path, key)
        return adapt_orm(found, config.kwargs, key) if inspect.isclass(found) else found
    if host is None:
        raise ValueError(f"{key}: a function with python needs a WorkerHost")
    return host.add(name, config.path, key, config, config.kwargs)


def _load_model(name: str, key: str, config: RewardFunctionConfig, host: WorkerHost | None) -> RewardFunction:
    if host is None:
        raise ValueError(f"{key}: a reward model needs a WorkerHost")
    return host.add(name, REWARD_MODEL, key, config, {}, config.model_options)


def _taken_names(key: str, kwargs: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}.{name}: is what functions receive of the sampled group; use another name"
        for name in sorted(kwargs.keys() & set(ARGUMENTS))
    ]
