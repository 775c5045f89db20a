"""One run in virtual time: the packer with its ledger, and models of all other processes.

    ticket ──▶ rollout ──▶ engine ──▶ rollout ──▶ reward actor ──▶ packer: settle, compose ──▶ trainer ──▶ new version
                             ▲                                                                               │
                             └───────────────────────────────────────────────────────────────────────────────┘

Admission, order, lag, drops, attempts, the gang and the versions of the engines are decided by `actors.ledger.Machine`;
micro-batches are made by `actors.algorithms.packing.pack`. Only times are models (`actors.simulate.models`).
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from actors.algorithms.balancing import less_loaded
from actors.algorithms.curriculum import Curriculum
from actors.ledger import ExampleRef, Group, GroupState, Machine, Verdict
from actors.packer.settings import settings_of
from actors.simulate.changes import Change
from actors.simulate.cores import Cores
from actors.simulate.engine import Engine
from actors.simulate.events import Events
from actors.simulate.inference import Inference
from actors.simulate.meter import Meter
from actors.simulate.models import lognormal
from actors.simulate.packer import Packer
from actors.simulate.plan import Plan
from actors.simulate.requests import Requests
from actors.simulate.reward import Reward
from actors.simulate.rollout import Rollout
from actors.simulate.sampling import Sampling
from actors.simulate.scaling import Process, Scaling
from actors.simulate.supervisor import Supervisor
from actors.simulate.trainer import Trainer
from schemas.config import RunConfig
from schemas.errors import ConfigError

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats without urgent news (`bus.beat_interval`)."""
STUCK_TIMEOUTS = 10.0
"""Multiple of the longest timeout of a group after which a simulation without a new step ends with an error."""


@dataclass
class Marks:
    """Sums of the processes at a time; the figures of a run are differences of two."""

    time: float = 0.0
    engine_busy: float = 0.0
    engine_paused: float = 0.0
    engine_slots: float = 0.0
    engine_tokens: int = 0
    reward_busy: float = 0.0
    rollout_slots: float = 0.0
    processes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("inference", "reward", "rollout"), 0.0))
    """Seconds of all processes, by role."""
    lost: dict[str, int] = field(default_factory=dict)


class Ring:
    """Simulation of a plan; `run` returns once its steps are trained."""

    def __init__(self, plan: Plan) -> None:
        ranks = plan.config.trainer.model_copy(update={"num_ranks": plan.size.trainers})
        # the simulated processes give nothing back
        up = plan.config.up.model_copy(update={"colocate": bool(plan.config.up.colocate)})
        self.plan, self.times = plan, plan.times
        self.config = plan.config.model_copy(update={"trainer": ranks, "up": up})
        self.events, self.meter = Events(), Meter()
        self.cores = Cores(plan.times)
        self.machine = machine_of(self.config)
        self.settings = self.machine.settings
        self.tokens: dict[int, int] = {}
        """Tokens of the completions of each settled group, by ordinal."""
        self.samples: dict[int, list[int]] = {}
        """Tokens of each sample (prompt and completion) of each settled group, by ordinal."""
        self.packer = Packer(self.events, plan.times, self.machine, self._record, self._tell_holders)
        self.holders: dict[int, Rollout] = {}
        """Rollout actor that holds a ticket of an ordinal, as the rollout actor knows it."""
        config, size = self.config, plan.size
        slots = config.rollout.max_concurrent_groups
        self.rollouts = [Rollout(self, f"rollout-{i}", slots) for i in range(size.rollouts)]
        self._by_name = {rollout.name: rollout for rollout in self.rollouts}
        self.rewards = [Reward(self, f"reward-{i}", config.reward.max_concurrent_groups) for i in range(size.rewards)]
        self.trainer = Trainer(self, size.trainers)
        self.requests, self._supervisor = Requests(self), Supervisor(self)
        self.engines = [self._engine(i) for i in range(size.engines)]
        self.inference = {engine.name: Inference(self, engine) for engine in self.engines}
        self.start: Marks | None = None
        """Sums at the first step; None before."""
        self.end: Marks | None = None
        self._progress_at = 0.0
        self.scaling = Scaling(self)

    def _engine(self, index: int) -> Engine:
        room, mode = self.config.inference.engine.num_slots, self.config.weights.update_mode
        return Engine(f"inference-{index}", self.events, self.times, self.cores, room, mode, self.requests.turn_ended)

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Simulate until the steps are trained.

        Raises:
            ConfigError: the run fails, or trains no further step.
        """
        for rollout in self.rollouts:
            self._join_rollout(rollout)
        for reward in self.rewards:
            self._join_reward(reward)
        for identity in self.trainer.identities:
            self.packer.join(identity, self.trainer.told)
        self.trainer.beat()
        for inference in self.inference.values():
            inference.join()
        self._supervisor.plan_deaths()
        for change in self.plan.changes:
            self.events.at(change.seconds, self._change, change)
        self.events.after(BEAT_SECONDS, self._beat)
        steps = min(self.plan.steps, self.settings.max_steps)
        self.events.run(lambda: len(self.meter.lines) >= steps or bool(self.machine.failure))
        if self.machine.failure:
            raise ConfigError(f"the simulated run fails: {self.machine.failure}")
        self.end = self._marks()

    def _join_rollout(self, rollout: Rollout) -> None:
        self.packer.join(rollout.identity)
        rollout.report()

    def _join_reward(self, reward: Reward) -> None:
        self.packer.join(reward.identity, reward.told)
        reward.beat()

    def _change(self, change: Change) -> None:
        self.times = self.times.with_values(**{change.name: change.value})
        for engine in self.engines:
            engine.set_times(self.times)

    def add(self, role: str, index: int) -> None:
        """Start one more process of a role."""
        config = self.config
        if role == "rollout":
            rollout = Rollout(self, f"rollout-{index}", config.rollout.max_concurrent_groups)
            self.rollouts.append(rollout)
            self._by_name[rollout.name] = rollout
            self._join_rollout(rollout)
        elif role == "reward":
            self.rewards.append(Reward(self, f"reward-{index}", config.reward.max_concurrent_groups))
            self._join_reward(self.rewards[-1])
        else:
            engine = self._engine(index)
            self.engines.append(engine)
            engine.restart()
            self.inference[engine.name] = Inference(self, engine)
            self.inference[engine.name].join()

    def told_to_leave(self, process: Process) -> None:
        """Let a process tell the packer that it takes no new work."""
        if isinstance(process, Engine):
            self.requests.forget_engines()
            self.inference[process.name].beat()
        elif isinstance(process, Reward):
            process.leave()
        else:
            process.report()

    def remove(self, process: Process) -> None:
        """End a process that has been given back."""
        self._supervisor.leave(process)

    def _record(self) -> None:
        """Note all trained steps as recorded, since a simulation has no files that could be full."""
        machine = self.machine
        if machine.recorded_step < machine.trained_step:
            machine.note_recorded(machine.trained_step)
            self._progress_at = self.events.now
        if machine.finished_evals:
            finished, machine.finished_evals = machine.finished_evals, []
            machine.note_evaluated(finished)
            self._progress_at = self.events.now
        self.trainer.offer()
        if self.start is None and self.meter.lines:
            self.start = self._marks()

    def _tell_holders(self, changed: list[Group]) -> None:
        """Tell rollout actors of rows that have changed: new tickets, and attempts to let go of.

        This is the part of a directive that a rollout actor gets (`actors.ledger.replies`), row by row.
        """
        for group in changed:
            known = self.holders.get(group.ordinal)
            if known is not None:
                known.follow(group)
            rollout = self._by_name.get(group.holder.partition("/")[0]) if group.holder is not None else None
            if rollout is not None and rollout.alive:
                rollout.follow(group)

    def _beat(self) -> None:
        """Do what is due each second: heartbeats of reward actors, loads of engines, deadlines of attempts."""
        for reward in self.rewards:
            reward.beat()
        for engine in self.engines:
            engine.reported_load = engine.load
        self.packer.plan()
        self.scaling.look()
        limit = STUCK_TIMEOUTS * max(self.settings.group_timeout, self.settings.reward_timeout)
        if self.events.now - self._progress_at > limit:
            raise ConfigError(
                f"the simulated run has trained nothing for {limit:g} s after step {self.machine.trained_step}: "
                f"{self.machine.groups.last_failure or 'no group has come'}; "
                "rollout.group_timeout or the figures of --set do not fit each other"
            )
        self.events.after(BEAT_SECONDS, self._beat)

    def _marks(self) -> Marks:
        for rollout in self.rollouts:
            rollout.take_in()
        for engine in self.engines:
            engine.take_in()
        return Marks(
            time=self.events.now,
            engine_busy=sum(engine.busy_seconds for engine in self.engines),
            engine_paused=sum(engine.paused_seconds for engine in self.engines),
            engine_slots=sum(engine.slot_seconds for engine in self.engines),
            engine_tokens=sum(engine.tokens for engine in self.engines),
            reward_busy=sum(reward.busy_seconds for reward in self.rewards),
            rollout_slots=sum(rollout.slot_seconds for rollout in self.rollouts),
            processes={role: self.scaling.seconds_of(role) for role in ("inference", "reward", "rollout")},
            lost={
                "lost": self.meter.lost_tokens,
                "filtered": self.meter.filtered_tokens,
                "copies": self.meter.copied_tokens,
            },
        )

    def send(self, action: Callable[..., None], *arguments: Any) -> None:
        """Carry out an action at another process, after a hop."""
        self.events.after(self.times.hop_seconds, action, *arguments)

    # --- groups --------------------------------------------------------------------------------------------------

    def send_to_reward(self, sampling: Sampling) -> None:
        """Send a sampled group to a reward actor with a low load."""
        alive = [reward for reward in self.rewards if reward.alive and not reward.leaves]
        if not alive or sampling.hold not in sampling.rollout.held:
            return
        reward = less_loaded(alive, lambda one: one.load, sampling.group.seed)
        sampling.reward = reward.identity
        self.send(self._arrive_at_reward, reward, sampling)

    def _arrive_at_reward(self, reward: Reward, sampling: Sampling) -> None:
        if reward.identity == sampling.reward and reward.alive:
            reward.get(sampling)

    def reward_seconds(self, sampling: Sampling) -> float:
        """Draw the seconds of the reward functions for a group."""
        rng = random.Random(sampling.group.seed + 1)
        return lognormal(rng, self.times.reward_seconds, self.times.reward_spread)

    def rejected_as(self, sampling: Sampling) -> str:
        """Return the reason of the group filter that rejects a group; empty: none does."""
        packer = self.config.packer
        filtered = packer.dynamic_sampling or packer.online_difficulty_filtering
        if not filtered or random.Random(sampling.group.seed + 2).random() >= self.times.filtered_share:
            return ""
        return "zero_variance" if packer.dynamic_sampling else "too_hard"

    def judged(self, sampling: Sampling, verdict: Verdict) -> None:
        """Keep the lengths of a settled group, and count the tokens of others as waste."""
        if verdict is Verdict.SETTLED:
            self.tokens[sampling.group.ordinal] = sampling.tokens
            self.samples[sampling.group.ordinal] = [sampling.prompt_tokens + length for length in sampling.lengths]
        elif verdict is Verdict.FILTERED:
            self.meter.filtered_tokens += sampling.tokens
        else:
            self.meter.copied_tokens += sampling.tokens

    def forget_old(self) -> None:
        """Forget the lengths of groups that the ledger has compacted or dropped."""
        rows = self.machine.groups.rows
        gone = [o for o in self.tokens if (row := rows.get(o)) is None or row.state is GroupState.DROPPED]
        for ordinal in gone:
            del self.tokens[ordinal], self.samples[ordinal]


def machine_of(config: RunConfig) -> Machine:
    """Return the ledger's machine of a run. Examples are drawn as in training, from endless data without content."""
    labels, weights = [one.label for one in config.trained], [one.weight for one in config.trained]
    known = [weight for weight in weights if weight is not None]
    curriculum = Curriculum([None] * len(labels), known if len(known) == len(weights) else None, config.seed)

    def draw(excluded: Collection[str] = ()) -> ExampleRef:
        number, index = curriculum.draw([labels.index(label) for label in excluded])
        return ExampleRef(labels[number], index, f"{labels[number]} {index}")

    evals = [
        ExampleRef(label, index, f"{label} {index}")
        for label, one in config.evaluations.items()
        for index in range(one.keys.num_prompts)
    ]
    settings = settings_of(config, dict(zip(labels, curriculum.shares, strict=True)))
    return Machine(settings, "simulation", 1, 0.0, draw, evals, "inproc://packer")
