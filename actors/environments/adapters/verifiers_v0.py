"""Environments of verifiers 0.1 to 0.3, by id: `actors/environments/adapters/verifiers_v0.py:Env`.

The environment drives: verifiers plays the rollout, and each of its model calls becomes a `policy.sample`. Its dataset
gives the examples, its rubric the rewards. verifiers 0.4 has another interface, and another adapter.
"""

import contextlib
import contextvars
import functools
import inspect
import json
import math
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers import types
from verifiers.clients import OpenAIChatCompletionsClient

Json = dict[str, Any]
Rewards = dict[str, float | None]

MODEL = "policy"
"""Name of the model in requests; there is only one."""
OWN_SAMPLING_KEYS = ("stop", "max_tokens", "max_completion_tokens")
"""Keys of an environment's `sampling_args` that are kept; the run's configuration says the rest."""


class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """Client of verifiers whose model is the policy of one episode."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self._policy = policy
        self.failure: Exception | None = None
        """First sample that failed for another reason than a limit of the trajectory."""

    async def get_native_response(
        self, prompt: list[Json], model: str, sampling_args: Json, tools: list[Json] | None = None, **_: Any
    ) -> Json:
        """Return the policy's next message."""
        options: Json = {}
        if tools:
            options["tools"] = tools
        if stop := sampling_args.get("stop"):
            options["stop"] = stop
        if limit := sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens"):
            options["max_tokens"] = limit
        try:
            message: Json = await self._policy.sample(prompt, **options)
        except Exception as error:
            if str(error).startswith("TrajectoryOverError"):
                # verifiers ends such a rollout as truncated, and scores it
                raise vf.OverlongPromptError(str(error)) from error
            self.failure = self.failure or error
            raise
        return message

    async def raise_from_native_response(self, response: Json) -> None:
        """Take every message: an empty one is a bad answer of the model, which the rubric scores."""

    async def from_native_response(self, response: Json) -> Any:
        """Return verifiers' form of a message."""
        calls = [
            types.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in response.get("tool_calls") or []
        ]
        message = types.ResponseMessage(
            content=response.get("content") or "",
            reasoning_content=response.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        # by the id, steps of verifiers' trajectory are known as turns of ours
        turn = getattr(response, "turn", "")
        return types.Response(id=str(turn), created=0, model=MODEL, message=message)


class Loaded:
    """Environment of this process.

    Args:
        environment: what `load_environment` returned.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.rubrics = list(_rubrics(environment.rubric, set()))
        for rubric in self.rubrics:
            rubric.funcs = [_watched(function) for function in rubric.funcs]
        self.has_group_functions = any(
            # the only place that knows the rule
            rubric._is_group_func(function)
            for rubric in self.rubrics
            for function in rubric.funcs
        )
        own = [rubric for rubric in self.rubrics if not type(rubric).score_rollout.__module__.startswith("verifiers.")]
        self.has_reward = bool(own) or any(weight for rubric in self.rubrics for weight in rubric.weights)
        """False if all weights are 0: the reward is meant to come from elsewhere, a judge say."""
        self._has_empty_rubric = any(
            not rubric.funcs and type(rubric).score_rollout is vf.Rubric.score_rollout for rubric in self.rubrics
        )

    @property
    def scores_groups(self) -> bool:
        """True if the rubric scores groups, of one where it needs none: an empty rubric refuses a rollout."""
        return self.has_group_functions or self._has_empty_rubric

    def scoring(self, states: list[Any]) -> Awaitable[None]:
        """Return the scoring of a group, or of one rollout where the rubric needs no group."""
        rubric = self.environment.rubric
        if self.scores_groups:
            return rubric.score_group(states)  # type: ignore[no-any-return]
        [state] = states
        return rubric.score_rollout(state)  # type: ignore[no-any-return]

    def dataset(self, split: str) -> Any:
        """Return the rows of a split; None if there are none. Without rows to evaluate on, those to train on."""
        environment = self.environment
        is_training_only = environment.eval_dataset is None and environment.eval_dataset_source is None
        if split == "eval" and not is_training_only:
            return environment.get_eval_dataset()
        if environment.dataset is None and environment.dataset_source is None:
            return None
        return environment.get_dataset()

    def row(self, index: int, split: str) -> Json:
        """Return an example as the input of a rollout."""
        row = dict(self.dataset(split)[index])
        if hasattr(types, "flatten_task_input") and isinstance(task := row.get("task"), str) and not _is_object(task):
            # from 0.1.14 on a task is an object, and the name of one an error
            del row["task"]
        return row


_loaded: Loaded | None = None
_loading = threading.Lock()


class Scoring:
    """Record of a scoring: functions of the rubric that raised, and rewards that they gave to steps.

    Args:
        states: the rollouts.
    """

    def __init__(self, states: "list[Any]") -> None:
        self.failures: list[tuple[str, Exception]] = []
        """Functions that raised. Without this verifiers counts them as 0."""
        self._steps = [step for state in states for step in state.get("trajectory") or []]
        self._given = self._seen()

    def _seen(self) -> dict[int, Any]:
        return {id(step): reward for step in self._steps if (reward := step.get("reward")) is not None}

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """Note the rewards of steps that a function gives. At the end verifiers gives all others the whole reward."""
        before = self._seen()
        yield
        self._given |= {step: reward for step, reward in self._seen().items() if before.get(step) != reward}

    def end(self) -> None:
        """Note all rewards of steps: nobody but the user's code has given any."""
        self._given |= self._seen()

    def reward_of(self, step: Any) -> Any:
        """Return the reward that the environment or the rubric has given a step; None if there is none."""
        return self._given.get(id(step))


_scoring: contextvars.ContextVar[Scoring | None] = contextvars.ContextVar("scoring", default=None)
"""The present scoring."""


class Env:
    """One episode of an environment of verifiers.

    Rewards: the rubric's weighted sum under the environment's id, unless all weights are 0, and each function of the
    rubric under its own name. Turns have the rewards of the steps of verifiers' trajectory, where the environment or a
    function of the rubric has set them.

    Args:
        id: environment, as in `verifiers.load_environment`; its package is installed, or is found in `path`.
        args: arguments of its `load_environment`.
        path: folder to search for the environment's module.
    """

    def __init__(self, id: str, args: Json | None = None, path: str = "") -> None:  # noqa: A002 - verifiers' word
        self._id, self._loaded = id, _load(id, args, path)
        self._is_clean = False
        self.state: Any = None
        self._policy: Any = None
        self.columns: Json = {}

    @staticmethod
    def examples(split: str, **options: Any) -> int:
        """Return the number of rows of a split."""
        loaded = Env(**options)._loaded
        if not loaded.has_group_functions:
            # without it, the episodes of a group need not be on one worker
            Env.score_group = None  # type: ignore[assignment, method-assign]
        dataset = loaded.dataset(split)
        return 0 if dataset is None else len(dataset)

    async def run(self, example: Json, policy: Any) -> Rewards:
        """Play a row of the dataset; return the rewards, or none where they need the whole group."""
        loaded, client, self._policy = self._loaded, PolicyClient(policy), policy
        row = loaded.row(example["index"], example.get("split", "train"))
        self.columns = _columns(row)
        own = {key: value for key, value in loaded.environment.sampling_args.items() if key in OWN_SAMPLING_KEYS}
        self.state = state = await loaded.environment.rollout(row, client, MODEL, own)
        if client.failure is not None:
            raise client.failure
        if (error := state.get("error")) is not None:
            raise RuntimeError(f"the rollout failed: {_words(error)}") from error
        if state.get("timed_out"):
            raise TimeoutError("the rollout passed the environment's own limit, timeout_seconds; raise it in args")
        if not loaded.environment.score_rollouts or loaded.has_group_functions:
            self._reward_turns(Scoring([state]))
            return {}
        self._reward_turns(await _scored(loaded, [state]))
        return self._rewards()

    @staticmethod
    async def score_group(environments: "list[Env]") -> list[Rewards | None]:
        """Return the rewards of a group, if the rubric has functions that need the whole group."""
        loaded = environments[0]._loaded
        if not loaded.environment.score_rollouts or not loaded.has_group_functions:
            return [None] * len(environments)
        scoring = await _scored(loaded, [one.state for one in environments])
        for one in environments:
            one._reward_turns(scoring)
        return [one._rewards() for one in environments]

    async def close(self) -> None:
        """Run the rubric's clean-up, which from 0.1.14 on follows the scores."""
        cleanup = getattr(self._loaded.environment.rubric, "cleanup", None)
        if cleanup is not None and self.state is not None and not self._is_clean:
            self._is_clean = True
            await cleanup(self.state)

    def _reward_turns(self, scoring: Scoring) -> None:
        """Give the turns the rewards of their steps. Steps that are no turn of the policy have none to give."""
        for step in self.state.get("trajectory") or []:
            turn = getattr(step.get("response"), "id", "")
            if (reward := scoring.reward_of(step)) is not None and turn.isdecimal():
                self._policy.reward(int(turn), reward)

    def _rewards(self) -> Rewards:
        metrics = {
            str(name): float(value) if math.isfinite(value) else None
            for name, value in (self.state.get("metrics") or {}).items()
            if isinstance(value, (int, float))
        }
        # the total is what is trained on: no metric of the same name may stand in its place
        return metrics | ({self._id: self.state["reward"]} if self._loaded.has_reward else {})


def _load(id: str, args: Json | None, path: str) -> Loaded:  # noqa: A002 - verifiers' word
    """Return this process's environment; load it the first time."""
    global _loaded
    with _loading:
        if _loaded is None:
            if path:
                folder = Path(path).expanduser().resolve()
                if not folder.is_dir():
                    raise ValueError(f"path: {folder} is no folder; it must hold the environment's module")
                sys.path.insert(0, str(folder))
            with _signals_left_alone():
                _loaded = Loaded(vf.load_environment(id, **(args or {})))
        return _loaded


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Let verifiers set no handlers of signals: only the main thread may, and a worker's signals are the worker's."""
    set_handler = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler


def _rubrics(rubric: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a rubric, and those that it combines: its own attributes, or rubrics of environments among them."""
    if id(rubric) in seen:
        return
    seen.add(id(rubric))
    yield rubric
    for value in list(vars(rubric).values()):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            inner = part.rubric if isinstance(part, vf.Environment) else part
            if isinstance(inner, vf.Rubric):
                yield from _rubrics(inner, seen)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a rubric that notes its exceptions. Its signature stays: verifiers calls by its names."""

    @functools.wraps(function)
    async def watched(*arguments: Any, **named: Any) -> Any:
        scoring = _scoring.get()
        try:
            with contextlib.nullcontext() if scoring is None else scoring.function():
                result = function(*arguments, **named)
                result = await result if inspect.isawaitable(result) else result
                return result if isinstance(result, (list, tuple)) else float(result)
        except Exception as error:
            if scoring is not None:
                scoring.failures.append((getattr(function, "__name__", repr(function)), error))
            raise

    return watched


async def _scored(loaded: Loaded, states: "list[Any]") -> Scoring:
    """Score a group, or one rollout; return what the functions have done.

    Raises:
        RuntimeError: a function of the rubric raised.
    """
    scoring = Scoring(states)
    token = _scoring.set(scoring)
    try:
        # in this task, whose context holds the object; tasks within get a copy with the same object
        await loaded.scoring(states)
    finally:
        _scoring.reset(token)
    for name, error in scoring.failures:
        words = f"the rubric's function {name} raised {type(error).__name__}: {error}"
        raise RuntimeError(words) from error
    if not loaded.scores_groups:
        scoring.end()
    return scoring


def _columns(row: Json) -> Json:
    """Return a row's columns for reward functions: all that JSON can hold, but not the prompt."""
    columns = {}
    for name, value in row.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            columns[name] = value
    return {name: value for name, value in columns.items() if name != "prompt"}


def _is_object(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(json.loads(text), dict)
    return False


def _words(error: BaseException) -> str:
    """Return an error with its causes: verifiers' own say little."""
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(f"{type(link).__name__}: {link}" if str(link) else type(link).__name__)
        link = link.__cause__
    return ", caused by ".join(chain)
