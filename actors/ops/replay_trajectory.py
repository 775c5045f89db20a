"""`actors replay --trajectory`: play a recorded group again with its environment, without a model, and compare.

Reads the group from the ledger, and its example from the run's data. The environment or agent runs as in the run, in
worker processes; each call of the model is answered from the record. Writes nothing, so may run next to the run.
Rewards of the environment are compared; reward functions are not run. A clock, a random number without the episode's
seed, or a search on the network may make a trajectory differ.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from actors.rollout.held import AttemptError
from schemas.config import RunConfig
from schemas.config.environments import AgentConfig, EnvironmentBase
from schemas.errors import ConfigError
from schemas.messages import TURNS, Purpose, RolloutGroup, Ticket

if TYPE_CHECKING:
    from actors.datasets import Dataset, Example
    from actors.datasets.prompts import Expand
    from actors.trajectories.chat import Chat

NAME = "replay"
"""Name of this process in the logs of workers."""


@dataclass(frozen=True)
class Completion:
    """A completion that was played again.

    Args:
        number: in its group.
        calls: calls asked for, and calls in the record.
        differences: words on each difference; empty if there is none.
    """

    number: int
    calls: tuple[int, int]
    differences: Sequence[str]


@dataclass(frozen=True)
class ReplayedGroup:
    """Result of a replay."""

    title: str
    completions: Sequence[Completion]

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not any(one.differences for one in self.completions)

    def __str__(self) -> str:
        lines = [self.title]
        for one in self.completions:
            asked, recorded = one.calls
            verdict = "DIFFERENT" if one.differences else "same"
            lines.append(f"completion {one.number:<4} {asked} of {recorded} calls   {verdict}")
            lines += [f"  {words}" for words in one.differences]
        return "\n".join(lines)


def replay_group(
    config: RunConfig,
    ordinal: int,
    completion: int | None,
    datasets: "Mapping[tuple[Purpose, str], Dataset]",
    chats: "Mapping[str, Chat]",
    expand: "Expand | None" = None,
) -> ReplayedGroup:
    """Play a group again, or one of its completions; an environment that scores whole groups is played whole.

    Args:
        config: configuration of the run, as resolved.
        ordinal: number of the group.
        completion: its number in the group; None: all.
        datasets: data sets by purpose and label, as a rollout actor has them.
        chats: language of the model by label of the environment.
        expand: function that gives images their tokens.

    Raises:
        ConfigError: the group is not there, has no environment, or its example is another one now.
    """
    from actors.ledger import LedgerReader
    from actors.ledger.replies import ticket_of
    from actors.ledger.stored_groups import stored_group
    from actors.packer.settings import settings_of
    from schemas.errors import ProtocolError

    ledger = LedgerReader.of(config.ledger_path)
    row = next((row for row in ledger.groups() if row.ordinal == ordinal), None)
    try:
        # the tokens of a group whose row is gone are removed soon after it
        payloads = ledger.payloads([ordinal]) if row is not None else []
    except ProtocolError:
        payloads = []
    if row is None or not payloads:
        raise ConfigError(
            f"--trajectory {ordinal}: the ledger has no tokens of this group; name one of the newest steps, or set "
            "ledger.keep_steps for the next run"
        )
    group = stored_group(payloads[0])
    one = config.environments_by_label.get(group.environment)
    if not isinstance(one, EnvironmentBase):
        raise ConfigError(
            f"--trajectory {ordinal}: {group.environment} has no environment to be played again; its completions are "
            "shown by `actors samples`"
        )
    if isinstance(one, AgentConfig) and one.external:
        raise ConfigError(
            f"--trajectory {ordinal}: {group.environment} is an external agent, and no service would take the "
            "trajectory; only agents with path or command can be played again"
        )
    if completion is not None and not 0 <= completion < group.num_completions:
        raise ConfigError(
            f"--trajectory {ordinal}:{completion}: the group has the completions 0 to {group.num_completions - 1}"
        )
    ticket = ticket_of(row, settings_of(config))
    data = datasets[ticket.purpose, ticket.environment]
    is_there = data.num_examples is None or ticket.index < data.num_examples
    example = data.example(ticket.index) if is_there else None
    if example is None or example.key(ticket.environment) != ticket.example_key:
        raise ConfigError(
            f"--trajectory {ordinal}: example {ticket.index} of {ticket.environment} is not the one that the run has "
            "read; bring its data back"
        )
    return asyncio.run(_replayed(config, group, ticket, example, completion, chats, expand))


async def _replayed(
    config: RunConfig,
    group: RolloutGroup,
    ticket: Ticket,
    example: "Example",
    completion: int | None,
    chats: "Mapping[str, Chat]",
    expand: "Expand | None",
) -> ReplayedGroup:
    from actors.rollout.engine_choice import EngineChoice
    from actors.rollout.environments import EnvironmentPlayer, seed_of
    from actors.rollout.group import longest_sample
    from actors.rollout.recorded import RecordedEngines
    from actors.rollout.trajectory_group import build_trajectory_group
    from actors.telemetry.metrics import Metrics

    sessions = config.rollout.sessions.model_copy(update={"host": "127.0.0.1", "port": 0, "advertise": ""})
    # a port of its own: the run may still use its own one
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sessions": sessions})})
    chat = chats[config.environments_by_label[ticket.environment].label]
    seeds = {seed_of(ticket.seed, member): member for member in range(ticket.num_completions)}
    engines = RecordedEngines(group, seeds, chat.decode, chat.ends, chat.bridges.special)
    player = EnvironmentPlayer(
        config, NAME, chats, cast(EngineChoice, engines), Metrics("rollout"), longest_sample(config)[1], expand
    )
    title = f"ordinal {group.ordinal}: {ticket.environment} example {ticket.index}, played again without a model"
    members = range(ticket.num_completions) if completion is None else [completion]
    async with player:
        try:
            trajectories, columns = await player.play(ticket, example, members)
        except (AttemptError, ValueError) as error:
            # the words on a call stand in the error of the environment as well
            words = [*itertools.chain(*(engines.differences(one) for one in members)), f"failed: {error}"]
            return ReplayedGroup(title, [Completion(one, engines.num_calls(one), words) for one in members])
    again = build_trajectory_group(group.run, NAME, ticket, columns, trajectories)
    # an environment that scores whole groups was played whole
    numbers = members if again.num_completions == len(members) else range(ticket.num_completions)
    played = [
        Completion(
            number, engines.num_calls(number), [*engines.differences(number), *_differences(group, number, again, i)]
        )
        for i, number in enumerate(numbers)
    ]
    return ReplayedGroup(title, [one for one in played if one.number in members])


def _differences(group: RolloutGroup, number: int, again: RolloutGroup, other: int) -> Iterator[str]:
    """Yield words on each difference between a recorded completion and a played one."""
    old, new = _results(group, number), _results(again, other)
    for name in {**old, **new}:
        if (recorded := old.get(name)) != (played := new.get(name)):
            yield f"{name}: {played}, the record has {recorded}"
    if not any(name in ("end", "turns") and old[name] != new[name] for name in old):
        rows = [one.completion_offsets[i : i + 2].tolist() for one, i in ((group, number), (again, other))]
        tokens, others = (one.token_ids[low:high] for one, (low, high) in zip((group, again), rows, strict=True))
        if tokens.tolist() != others.tolist():
            yield "tokens: other ones than in the record, with the same number of turns"
        elif _digests(group, number) != _digests(again, other):
            yield "images: other ones than in the record, with the same tokens"


def _digests(group: RolloutGroup, number: int) -> list[str]:
    """Return the digests of the images that a completion shows, in the order of tokens."""
    from actors.datasets.prepared import digest_of

    prompts = dict.fromkeys(group.sample_prompts[group.sample_completions == number].tolist())
    parts = [group.prompt_offsets[prompt : prompt + 2].tolist() for prompt in prompts]
    parts.append((len(group.prompt_ids) + group.completion_offsets[number : number + 2]).tolist())
    shown = [place for low, high in parts for place in group.image_places if low <= place.start < high]
    return [digest_of(group.images[place.image]) for place in shown]


def _results(group: RolloutGroup, number: int) -> dict[str, Any]:
    """Return what came of a completion, by names for people."""
    values = group.environment_rewards_EG[:, number].tolist()
    found = {"end": group.stop_conditions[number], "turns": int(group.counts[number, TURNS])}
    found |= {
        f"reward {name}": value
        for name, value in zip(group.environment_reward_names, values, strict=True)
        # none, as an absent name
        if not math.isnan(value)
    }
    return found | {f"reward of turn {int(turn)}": value for one, turn, value in group.turn_rewards if one == number}
