"""One run in virtual time: the packer with its ledger, and models of all other processes.

    ticket ──▶ rollout ──▶ engine ──▶ rollout ──▶ reward actor ──▶ packer: settle, compose ──▶ trainer ──▶ new version
                             ▲                                                                               │
                             └───────────────────────────────────────────────────────────────────────────────┘

Admission, order, lag, drops, attempts, the gang and the versions of the engines are decided by `actors.ledger.Machine`;
micro-batches are made by `actors.algorithms.packing.pack`. Only times are models (`actors.simulate.models`).
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from actors.algorithms.balancing import less_loaded
from actors.algorithms.curriculum import Curriculum
from actors.ledger import ExampleRef, Group, GroupState, Machine, Verdict
from actors.packer.settings import settings_of
from actors.simulate.cores import Cores
from actors.simulate.engine import Engine
from actors.simulate.events import Events
from actors.simulate.failures import Death, deaths_of
from actors.simulate.meter import Meter
from actors.simulate.models import Times, lognormal
from actors.simulate.packer import Packer
from actors.simulate.reward import Reward
from actors.simulate.rollout import Rollout
from actors.simulate.sampling import Sampling
from actors.simulate.trainer import Trainer
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import InferenceHeartbeat, PolicyVersion

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats without urgent news (`bus.beat_interval`)."""
POLL_SECONDS = 0.025
"""Mean seconds until a rollout actor that waits for an engine looks again."""
STUCK_TIMEOUTS = 10.0
"""Multiple of the longest timeout of a group after which a simulation without a new step ends with an error."""


@dataclass(frozen=True)
class Size:
    """Number of processes by role."""

    rollouts: int
    rewards: int
    trainers: int
    engines: int

    @classmethod
    def of(cls, config: RunConfig) -> "Size":
        """Return the processes that `actors up` starts."""
        up = config.up
        return cls(up.rollout, max(1, up.reward), config.trainer.num_ranks, up.inference)


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    config: RunConfig
    size: Size
    times: Times
    steps: int
    """Steps until the end; at most `trainer.max_steps` of the configuration."""
    seed: int = 0
    deaths: tuple[Death, ...] = ()
    mean_seconds_between_deaths: tuple[tuple[str, float], ...] = ()
    """Mean seconds between two deaths of a process, by role."""


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
    lost: dict[str, int] = field(default_factory=dict)


class Ring:
    """Simulation of a plan; `run` returns once its steps are trained."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.config, self.times = plan, plan.config, plan.times
        self.events, self.meter = Events(), Meter()
        self.cores = Cores(plan.times)
        config = plan.config.model_copy(
            update={"trainer": plan.config.trainer.model_copy(update={"num_ranks": plan.size.trainers})}
        )
        self.config = config
        labels = [one.label for one in config.trained]
        weights = [one.weight for one in config.trained]
        known = [weight for weight in weights if weight is not None]
        curriculum = Curriculum([None] * len(labels), known if len(known) == len(weights) else None, config.seed)
        self.settings = settings_of(config, dict(zip(labels, curriculum.shares, strict=True)))
        self.tokens: dict[int, int] = {}
        """Tokens of the completions of each settled group, by ordinal."""
        self.samples: dict[int, list[int]] = {}
        """Tokens of each sample (prompt and completion) of each settled group, by ordinal."""

        def draw(excluded: Collection[str] = ()) -> ExampleRef:
            number, index = curriculum.draw([labels.index(label) for label in excluded])
            return ExampleRef(labels[number], index, f"{labels[number]} {index}")

        evals = [
            ExampleRef(label, index, f"{label} {index}")
            for label, one in config.evaluations.items()
            for index in range(one.keys.num_prompts)
        ]
        self.machine = Machine(self.settings, "simulation", 1, 0.0, draw, evals, "inproc://packer")
        self.packer = Packer(self.events, plan.times, self.machine, self._record, self._tell_holders)
        self.holders: dict[int, Rollout] = {}
        """Rollout actor that holds a ticket of an ordinal, as the rollout actor knows it."""
        size, slots = plan.size, config.rollout.max_concurrent_groups
        self.rollouts = [Rollout(self, f"rollout-{i}", slots) for i in range(size.rollouts)]
        self._by_name = {rollout.name: rollout for rollout in self.rollouts}
        self.rewards = [Reward(self, f"reward-{i}", config.reward.max_concurrent_groups) for i in range(size.rewards)]
        self.trainer = Trainer(self, size.trainers)
        engine = config.inference.engine
        room, mode = engine.num_slots, config.weights.update_mode
        self.engines = [
            Engine(f"inference-{i}", self.events, plan.times, self.cores, room, mode, self._turn_ended)
            for i in range(size.engines)
        ]
        self._sequences = dict.fromkeys((engine.name for engine in self.engines), 0)
        self._searching: list[Sampling] = []
        """Attempts that wait for an engine with their version."""
        self._asked: dict[tuple[str, str], int] = {}
        """Completions asked of an engine and not answered, by rollout and engine."""
        self._fit: dict[PolicyVersion | int, list[Engine]] = {}
        """Engines that may sample, by policy or oldest version; emptied with each change of an engine."""
        self.start: Marks | None = None
        """Sums at the first step; None before."""
        self.end: Marks | None = None
        self._progress_at = 0.0

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Simulate until the steps are trained.

        Raises:
            ConfigError: the run fails, or trains no further step.
        """
        for rollout in self.rollouts:
            self.packer.join(rollout.identity)
            rollout.report()
        for reward in self.rewards:
            self.packer.join(reward.identity, reward.told)
            reward.beat()
        for identity in self.trainer.identities:
            self.packer.join(identity, self.trainer.told)
        self.trainer.beat()
        for engine in self.engines:
            self._join(engine)
        self._plan_deaths()
        self.events.after(BEAT_SECONDS, self._beat)
        steps = self.plan.steps
        self.events.run(lambda: len(self.meter.lines) >= steps or bool(self.machine.failure))
        if self.machine.failure:
            raise ConfigError(f"the simulated run fails: {self.machine.failure}")
        self.end = self._marks()

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
            lost={
                "lost": self.meter.lost_tokens,
                "filtered": self.meter.filtered_tokens,
                "copies": self.meter.copied_tokens,
            },
        )

    def send(self, action: Callable[..., None], *arguments: Any) -> None:
        """Carry out an action at another process, after a hop."""
        self.events.after(self.times.hop_seconds, action, *arguments)

    # --- engines -------------------------------------------------------------------------------------------------

    def choose_engine(self, sampling: Sampling) -> None:
        """Ask an engine that may sample, chosen as `actors.rollout.engine_choice` does; or wait."""
        if sampling.is_over:
            return
        fit, name, asked = self._fit_for(sampling.group), sampling.rollout.name, self._asked
        if not fit:
            self._searching.append(sampling)
            return
        # the load of the last second's heartbeat, and what this rollout actor has asked for
        best = less_loaded(
            fit, lambda engine: engine.reported_load + asked.get((name, engine.name), 0), sampling.group.seed
        )
        turns = sampling.begin(best)
        self._count_asked(sampling, len(turns))
        self.send(self._submit, best, best.boot, sampling, turns)

    def _fit_for(self, group: Group) -> list[Engine]:
        """Return the engines that may sample a group; the same groups of a version share one list."""
        key = group.policy or group.min_version
        if key not in self._fit:
            self._fit[key] = [
                engine
                for engine in self.engines
                if engine.alive
                and (policy := engine.policy) is not None
                and (policy == group.policy if group.policy is not None else policy.version >= group.min_version)
            ]
        return self._fit[key]

    def _submit(self, engine: Engine, boot: int, sampling: Sampling, turns: list[Any]) -> None:
        if sampling.is_over:
            return
        if boot != engine.boot or engine.policy is None:
            self._ask_again(sampling)
            return
        engine.submit(turns)

    def _ask_again(self, sampling: Sampling) -> None:
        """Repeat a request elsewhere, after the engine has died (P11: inside the same attempt)."""
        self._count_asked(sampling, -sampling.num_open)
        sampling.engine = None
        self.events.after(self.times.hop_seconds + POLL_SECONDS, self.choose_engine, sampling)

    def _count_asked(self, sampling: Sampling, number: int) -> None:
        assert sampling.engine is not None
        key = (sampling.rollout.name, sampling.engine.name)
        self._asked[key] = self._asked.get(key, 0) + number

    def _turn_ended(self, turn: Any) -> None:
        sampling: Sampling = turn.owner
        if not sampling.turns_left[turn.number]:
            self._count_asked(sampling, -1)
        self.send(sampling.rollout.turn_ended, turn)

    def ask_environment(self, sampling: Sampling, number: int) -> None:
        """Wait for an environment's answer, then ask for the next turn of a completion."""
        rng = random.Random(sampling.group.seed + 7919 * (number + 1) + sampling.turns_left[number])
        seconds = lognormal(rng, self.times.environment_seconds, self.times.environment_spread)
        self.events.after(seconds, self._answered, sampling, number, sampling.engine)

    def _answered(self, sampling: Sampling, number: int, engine: Engine) -> None:
        if sampling.is_over or sampling.engine is not engine:
            return
        self.send(self._submit, engine, engine.boot, sampling, [sampling.next_turn(number)])

    def _join(self, engine: Engine) -> None:
        """Let a started engine take part."""
        self.packer.join(engine.identity, lambda: self._engine_told(engine))
        self._engine_beat(engine)

    def _engine_beat(self, engine: Engine) -> None:
        self._sequences[engine.name] += 1
        heartbeat = InferenceHeartbeat.model_construct(
            run=self.machine.run,
            name=engine.name,
            boot_id=str(engine.boot),
            sequence=self._sequences[engine.name],
            phase="running",
            url=f"inproc://{engine.identity}",
            engine_state="clean" if engine.policy is not None else "starting",
            policy=engine.policy,
            load=engine.load,
            generated_tokens=engine.tokens,
            holds_two_versions=False,
            update_seconds={},
            weight_ranks=int(self.config.weights.channel == "rendezvous"),
        )
        self.send(self.packer.hear, engine.identity, heartbeat)

    def _engine_told(self, engine: Engine) -> None:
        """Load the version that the packer names, unless one is on its way."""
        wanted = self._wanted(engine)
        if wanted is None or wanted == engine.policy or engine.loading is not None:
            return
        engine.loading = wanted
        self.events.after(self.times.wire_seconds, self._arrived, engine, engine.boot, wanted)

    def _wanted(self, engine: Engine) -> PolicyVersion | None:
        machine = self.machine
        if self.config.weights.channel == "filesystem":
            return machine.engines.target.policy if machine.engines.target else None
        update = machine.updates.current
        return update.policy if update is not None and update.names(str(engine.boot)) else None

    def _arrived(self, engine: Engine, boot: int, policy: PolicyVersion) -> None:
        if engine.alive and boot == engine.boot:
            engine.enter(policy, lambda: self._entered(engine))

    def _entered(self, engine: Engine) -> None:
        engine.reported_load = engine.load
        self._fit.clear()
        self._engine_beat(engine)
        # a newer version may have been named meanwhile
        self._engine_told(engine)
        # rollout actors hear of the version by way of the packer
        hops = 2 * self.times.hop_seconds + self.times.round_seconds
        self.events.after(hops + POLL_SECONDS, self._search)

    def _search(self) -> None:
        searching, self._searching = self._searching, []
        for sampling in searching:
            self.choose_engine(sampling)

    # --- groups --------------------------------------------------------------------------------------------------

    def send_to_reward(self, sampling: Sampling) -> None:
        """Send a sampled group to a reward actor with a low load."""
        alive = [reward for reward in self.rewards if reward.alive]
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

    # --- failures ------------------------------------------------------------------------------------------------

    def _plan_deaths(self) -> None:
        numbers = {
            "rollout": len(self.rollouts),
            "reward": len(self.rewards),
            "trainer": 1,
            "inference": len(self.engines),
        }
        for death in self.plan.deaths:
            if death.number >= numbers[death.role]:
                raise ConfigError(f"--kill {death.role}-{death.number}: there are {numbers[death.role]} of this role")
            self.events.at(death.seconds, self._kill, death)
        for role, seconds in self.plan.mean_seconds_between_deaths:
            for number in range(numbers[role]):
                self._next_death(deaths_of(role, number, seconds, self.plan.seed))

    def _next_death(self, deaths: Iterable[Death]) -> None:
        iterator = iter(deaths)
        death = next(iterator)

        def die() -> None:
            self._kill(death)
            self._next_death(iterator)

        self.events.at(death.seconds, die)

    def _kill(self, death: Death) -> None:
        """Kill a process; its supervisor starts the next one."""
        processes: dict[str, list[Any]] = {
            "rollout": [*self.rollouts],
            "reward": [*self.rewards],
            "trainer": [self.trainer],
            "inference": [*self.engines],
        }
        process = processes[death.role][death.number]
        if not process.alive:
            return
        self.meter.num_deaths += 1
        identities = self.trainer.identities if process is self.trainer else [process.identity]
        for identity in identities:
            self.packer.leave(identity)
        if isinstance(process, Engine):
            self._fit.clear()
            before = process.tokens
            owners = process.kill()
            self.meter.lost_tokens += process.tokens - before
            for sampling in owners:
                if not sampling.is_over:
                    self._ask_again(sampling)
        else:
            process.kill()
        lease, restart = self.settings.lease, self.times.restart_seconds
        # the lease ends, or the successor takes the name: whichever comes first
        self.events.after(min(lease, restart), self._missed, identities)
        self.events.after(restart, self._restart, process)

    def _missed(self, identities: list[str]) -> None:
        for identity in identities:
            self.packer.lose(identity)
        for rollout in self.rollouts:
            for sampling in rollout.held.values():
                if sampling.is_sampled and sampling.reward in identities:
                    self.send(self.send_to_reward, sampling)

    def _restart(self, process: Any) -> None:
        if process is self.trainer:
            for identity in self.trainer.identities:
                self.packer.join(identity, self.trainer.told)
        elif isinstance(process, Engine):
            process.restart()
            self._join(process)
            return
        else:
            self.packer.join(process.identity, getattr(process, "told", None))
        process.restart()
        if isinstance(process, Reward):
            # without any reward actor, groups have waited for this one
            for rollout in self.rollouts:
                for sampling in rollout.held.values():
                    if sampling.is_sampled and not sampling.reward:
                        self.send_to_reward(sampling)
