"""Trajectories of a ticket: episodes of its environment in worker processes, each played with the run's engines.

Consumes a ticket and an example. Emits the trajectories of the group. Waits for a worker with room, for each answer of
an engine, and for each call of the environment; every wait has a limit of its own, and all end with three quarters of
`rollout.group_timeout`, so that a straggler never holds up its group.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, get_args

import structlog

from actors.datasets import Example
from actors.datasets.images import why_not_taken
from actors.datasets.prompts import Expand
from actors.engines.protocol import PromptImage
from actors.environments.errors import EpisodeError
from actors.environments.pool import EpisodeCalls, GroupCalls, WorkerPool
from actors.environments.specs import spec_of
from actors.rollout.agents import Agents, Taken
from actors.rollout.engine_choice import Affinity, EngineChoice
from actors.rollout.episode import Trajectory, play
from actors.rollout.held import AttemptError
from actors.rollout.turn_images import TurnImages
from actors.telemetry.metrics import CALL_OUTCOMES, WORKER_EVENTS, Metrics
from actors.trajectories.bridges import BridgeError
from actors.trajectories.chat import Chat
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from actors.trajectories.tree import TrajectoryTree
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig, PackageConfig, PythonConfig
from schemas.messages import StopCondition, Ticket

log = structlog.get_logger("rollout")

SHARE_OF_TIMEOUT = 0.75
"""Share of `rollout.group_timeout` after which trajectories are cut; the rest is for scores, and for a reward actor."""

REPLAYS = 3
"""Times that a trajectory is played again within an attempt, because its worker has ended through no fault of its own.

Three failed attempts make a group poison: one example that hangs must not cost the examples beside it an attempt.
"""

SERIES = [
    *(("grpo_rollout_trajectories_total", {"stop": stop}) for stop in get_args(StopCondition)),
    *(("grpo_rollout_worker_events_total", {"event": event}) for event in WORKER_EVENTS),
    *(("grpo_rollout_session_calls_total", {"outcome": outcome}) for outcome in CALL_OUTCOMES),
    ("grpo_rollout_turns_total", {}),
    ("grpo_rollout_branches_total", {}),
    ("grpo_rollout_forced_turns_total", {}),
    *(("grpo_rollout_tool_calls_total", {"outcome": outcome}) for outcome in ("answered", "failed", "malformed")),
    *(("grpo_rollout_trajectory_seconds_total", {"place": place}) for place in ("model", "environment")),
]
"""Counters of an environment that exist from the start, with their further labels."""


class EnvironmentPlayer:
    """Player of the run's environments, as an asynchronous context that holds their workers.

    Args:
        config: configuration of the run.
        name: name of the actor.
        chats: language of the model by label of the environment.
        engines: asker of engines.
        metrics: destination of the `grpo_rollout_*` metrics.
        sequence_len: tokens of the longest sample.
        expand: function that gives images their tokens; None: images are refused.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        chats: Mapping[str, Chat],
        engines: EngineChoice,
        metrics: Metrics,
        sequence_len: int,
        expand: Expand | None = None,
    ) -> None:
        sources = config.environments_by_label.items()
        self._configs = {label: one for label, one in sources if isinstance(one, PythonConfig | PackageConfig)}
        """Environments by label, and by the names of evaluations."""
        self._chats, self._engines, self._metrics, self._sequence_len = chats, engines, metrics, sequence_len
        self._bus, self._name = config.bus, name
        self._groups_per_step = config.packer.groups_per_step
        self._expand, self._why_no_images = expand, why_not_taken(config)
        self._seed, self._group_seconds = config.seed, SHARE_OF_TIMEOUT * config.rollout.group_timeout
        self._agents = Agents(config, chats, sequence_len, self._count_call)
        self._pools: dict[str, WorkerPool] = {}
        self._warned: set[str] = set()
        """Environments whose trajectories had only answers in a demanded form."""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._agents)
        for label, config in self._configs.items():
            self._zero(label)
            if label != config.label:
                continue
            for words in self._chats[label].bridges.deviations():
                log.warning("the chat template changes the past", environment=label, detail=words)
            count = partial(self._count_event, label)
            if isinstance(config, AgentConfig) and config.external:
                continue
            spec = spec_of(config, self._bus, self._name)
            self._pools[label] = await self._stack.enter_async_context(WorkerPool(spec, count))
        return self

    def _zero(self, label: str) -> None:
        for name, labels in SERIES:
            # a series that appears later would look like a jump to Prometheus
            self._metrics.count(name, 0.0, environment=label, **labels)

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def plays(self, label: str) -> bool:
        """Return whether the examples of this label are played with an environment."""
        return label in self._configs

    def note_workers(self) -> None:
        """Show how many workers are ready, and how many sessions are open: 0 where no agent plays."""
        for label, pool in self._pools.items():
            self._metrics.set("grpo_rollout_workers_ready", pool.num_ready, environment=label)
        num_open = self._agents.table.num_open
        for label, config in self._configs.items():
            if label == config.label:
                self._metrics.set("grpo_rollout_sessions_open", num_open.get(label, 0), environment=label)

    async def play(
        self, ticket: Ticket, example: Example, members: Sequence[int] | None = None
    ) -> tuple[list[Trajectory], dict[str, Any]]:
        """Return the trajectories of a ticket, and the columns of the example with those of the environment.

        Args:
            members: numbers of the completions to play; None: all. An environment that scores whole groups plays all.

        Raises:
            AttemptError: the environment or the engines have failed.
        """
        deadline = time.monotonic() + self._group_seconds
        label = self._configs[ticket.environment].label
        members = range(ticket.num_completions) if members is None else members
        try:
            if label in self._pools:
                played = await self._in_workers(ticket, example, members, self._pools[label], deadline)
            else:
                table = self._agents.table
                played = await _all(
                    [self._member(ticket, example, one, Taken(table), None, deadline) for one in members]
                )
        except EpisodeError as error:
            raise AttemptError(error.cause, f"{error}\n{error.trace}".rstrip()) from error
        except BridgeError as error:
            raise AttemptError("environment", f"{ticket.environment}: {error}") from error
        trajectories = [trajectory for trajectory, _ in played]
        columns: dict[str, Any] = next((columns for one, columns in played if not one.failure), {})
        self._measure(ticket.environment, trajectories)
        return trajectories, example.columns | columns

    async def _in_workers(
        self, ticket: Ticket, example: Example, members: Sequence[int], pool: WorkerPool, deadline: float
    ) -> list[tuple[Trajectory, dict[str, Any]]]:
        """Play the trajectories of a ticket in worker processes."""
        async with contextlib.AsyncExitStack() as stack:
            # asked for first: whether there are group scores is known once a worker has loaded the environment
            first = await pool.episode(self._group_seconds)
            group: GroupCalls | None = None
            if pool.has_group_scores:
                members = range(ticket.num_completions)
                group = await stack.enter_async_context(await _group(pool, ticket.num_completions, deadline))
                entered: Sequence[contextlib.AbstractAsyncContextManager[EpisodeCalls]] = [
                    contextlib.nullcontext(episode) for episode in group
                ]
            else:
                entered = [first, *[_entered(pool, deadline) for _ in members[1:]]]
            # of a group with scores all episodes are on one worker, and are lost together
            again = partial(_entered, pool, deadline) if group is None else None
            played = await _all(
                [
                    self._member(ticket, example, member, context, again, deadline)
                    for member, context in zip(members, entered, strict=True)
                ]
            )
            if group is not None:
                # an episode that still works would hold up the scores of all
                pairs = zip(played, group, strict=True)
                whole = [(t, e) for (t, _), e in pairs if not t.failure and not e.is_abandoned]
                scores = await group.score([episode for _, episode in whole]) if whole else []
                # of an environment that is stepped they came with its turns, of an agent with its session
                rewards_turns = not isinstance(self._configs[ticket.environment], AgentConfig)
                for (trajectory, episode), rewards in zip(whole, scores, strict=True):
                    trajectory.rewards |= rewards
                    if episode.is_driving and rewards_turns:
                        trajectory.turn_rewards = list(episode.turn_rewards)
            return played

    async def _member(
        self,
        ticket: Ticket,
        example: Example,
        member: int,
        context: contextlib.AbstractAsyncContextManager[EpisodeCalls | Taken],
        again: Callable[[], contextlib.AbstractAsyncContextManager[EpisodeCalls]] | None,
        deadline: float,
    ) -> tuple[Trajectory, dict[str, Any]]:
        """Play one trajectory of a group, from its start again where its worker has ended because of another one."""
        for replays_left in reversed(range(1 + REPLAYS)):
            try:
                return await self._played(ticket, example, member, context, deadline)
            except EpisodeError as error:
                is_in_time = time.monotonic() < deadline
                if not (again is not None and error.is_bystander and replays_left and is_in_time):
                    raise
                log.warning("trajectory played again", ordinal=ticket.ordinal, member=member, detail=str(error))
                context = again()
        raise AssertionError("the last replay returns or raises")

    async def _played(
        self,
        ticket: Ticket,
        example: Example,
        member: int,
        context: contextlib.AbstractAsyncContextManager[EpisodeCalls | Taken],
        deadline: float,
    ) -> tuple[Trajectory, dict[str, Any]]:
        """Play one trajectory; return it with the columns that the environment has added."""
        config = self._configs[ticket.environment]
        limits = TurnLimits(
            self._sequence_len,
            ticket.max_tokens,
            config.max_turns,
            config.max_total_tokens,
            config.max_message_tokens,
            config.train_cut_turns,
            config.train_forced_turns,
            tuple(ticket.stop),
        )
        seed, affinity = seed_of(ticket.seed, member), Affinity()
        images = TurnImages(
            config.images, self._groups_per_step, ticket.num_completions, self._expand, self._why_no_images
        )
        model_seconds = 0.0

        async def sample(request: TurnRequest) -> TurnAnswer:
            nonlocal model_seconds
            turn = {"num_completions": 1, "max_tokens": request.max_tokens, "seed": request.seed}
            started = time.monotonic()
            try:
                [completion] = await self._engines.ask(
                    ticket.model_copy(update=turn),
                    request.prompt_ids,
                    request.stop,
                    affinity,
                    request.form,
                    [PromptImage(one.start, one.digest, images.data(one.digest)) for one in request.images],
                )
            finally:
                model_seconds += time.monotonic() - started
            return TurnAnswer(
                completion.token_ids,
                completion.logprobs,
                # an engine may name a policy for a position behind the last token
                [one for one in completion.segments if one[0] < len(completion.token_ids)],
                completion.finish_reason,
                ticket.sampling.temperature,
                completion.routed_experts,
            )

        chat, joins = self._chats[config.label], not (isinstance(config, AgentConfig) and config.samples == "calls")
        recorder = Recorder(chat, sample, limits, seed, TrajectoryTree(joins=joins), images)
        async with context as episode:
            started = time.monotonic()
            trajectory = await play(
                episode,
                recorder,
                example.prompt,
                example.columns,
                seed=seed_of(self._seed, ticket.environment, ticket.purpose, ticket.index),
                seconds=min(config.trajectory_timeout or self._group_seconds, _left(deadline)),
                # an evaluation must not contain what was never measured
                keeps_failed=config.on_failure == "unscorable" and ticket.purpose == "train",
                keeps_late=ticket.purpose == "train",
                sessions=self._agents.opener(config, chat),
            )
            seconds = {"model": model_seconds, "environment": time.monotonic() - started - model_seconds}
            count = partial(self._metrics.count, environment=ticket.environment)
            for place, spent in seconds.items():
                count("grpo_rollout_trajectory_seconds_total", max(0.0, spent), place=place)
            return trajectory, episode.columns

    def _measure(self, label: str, trajectories: Sequence[Trajectory]) -> None:
        """Count turns, ends, tool calls and branches."""
        for one in trajectories:
            recorder, count = one.recorder, partial(self._metrics.count, environment=label)
            count("grpo_rollout_trajectories_total", stop=one.stop)
            count("grpo_rollout_turns_total", recorder.tree.num_turns)
            count("grpo_rollout_branches_total", recorder.tree.num_branches)
            count("grpo_rollout_forced_turns_total", recorder.num_forced)
            count("grpo_rollout_tool_calls_total", recorder.num_calls - one.num_tool_failures, outcome="answered")
            count("grpo_rollout_tool_calls_total", one.num_tool_failures, outcome="failed")
            count("grpo_rollout_tool_calls_total", recorder.num_malformed, outcome="malformed")
            if recorder.num_forced == recorder.tree.num_turns and not recorder.limits.train_forced_turns:
                self._warn_forced(label)

    def _warn_forced(self, label: str) -> None:
        if label in self._warned:
            return
        self._warned.add(label)
        log.warning(
            "a trajectory is not trained",
            environment=label,
            detail="all its answers were demanded in a form (response_format, or a tool_choice other than auto), and "
            "such answers are left out of the loss; ask without the demand, or set environments[].train_forced_turns",
        )

    def _count_call(self, label: str, outcome: str) -> None:
        self._metrics.count("grpo_rollout_session_calls_total", environment=label, outcome=outcome)

    def _count_event(self, label: str, event: str) -> None:
        self._metrics.count("grpo_rollout_worker_events_total", environment=label, event=event)


def seed_of(*parts: object) -> int:
    """Return a seed of 31 bits that follows from the parts alone: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


def _left(deadline: float) -> float:
    """Return the seconds to a deadline, at least one."""
    return max(1.0, deadline - time.monotonic())


async def _group(pool: WorkerPool, size: int, deadline: float) -> GroupCalls:
    """Return episodes on one worker, once it has room for all."""
    try:
        return await pool.group(size, _left(deadline))
    except ValueError as error:
        # larger than a worker: the words say what to change
        raise AttemptError("environment", str(error)) from error


@contextlib.asynccontextmanager
async def _entered(pool: WorkerPool, deadline: float) -> AsyncIterator[EpisodeCalls]:
    """Enter an episode once a worker has room."""
    async with await pool.episode(_left(deadline)) as episode:
        yield episode


async def _all(members: Sequence[Any]) -> list[Any]:
    """Run all; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member) for member in members]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
