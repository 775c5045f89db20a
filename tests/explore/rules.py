"""What must hold in every world, told by what is committed and by what the processes have, not by the ledger's counts.

Each function looks at what one transition has changed, and raises the rule that it breaks.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from actors.ledger import Group, GroupFacts, GroupState, Machine, Settings, Step
from actors.ledger.rows import AttemptOutcome
from actors.ledger.witness import START, next_chain
from schemas.messages import InferenceDirective, RewardDirective, RolloutDirective, TrainerDirective

if TYPE_CHECKING:
    from tests.explore.packer import Parcel, Stored
    from tests.explore.peers import Disk, Rank

S = GroupState
MOVES = {
    S.ISSUED: {S.ISSUED, S.SETTLED, S.COMPOSED, S.DROPPED},
    S.SETTLED: {S.COMPOSED, S.DROPPED},
    S.COMPOSED: {S.TRAINED, S.DURABLE},
    S.TRAINED: {S.DURABLE, S.COMPOSED},
    S.DURABLE: set(),
    S.DROPPED: set(),
}
"""From one commit to the next (P21): a rollback takes back what is trained, nothing takes back what is durable."""


GROUP_FILTERS = ("zero_variance", "too_easy", "too_hard")


class Violation(Exception):  # noqa: N818  the rule is broken, not the test
    """A rule that does not hold."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


def demand(holds: bool, rule: str, what: str) -> None:
    """Raise the rule unless it holds."""
    if not holds:
        raise Violation(rule, what)


# --- commits ---------------------------------------------------------------------------------------------------------


def check_commit(before: "Stored", after: "Stored", settings: Settings) -> None:
    """Nothing that is committed is taken back, and nothing goes before it is over (P10, P11, P18, P21)."""
    goes_back = any(stored.values.get("going_back") for stored in (before, after))
    for ordinal, row in after.groups.items():
        old = before.groups.get(ordinal)
        if old is not None and old is not row:
            _check_move(old, row, goes_back)
        if row.state is S.SETTLED:
            demand(ordinal in after.payloads, "P11", f"ordinal {ordinal} is settled and its payload is not there")
    for ordinal in before.groups.keys() - after.groups.keys():
        over = _is_evaluated(before.groups[ordinal], after) if ordinal < 0 else _is_folded(ordinal, after)
        demand(over, "P21", f"the row of ordinal {ordinal} goes, which is {before.groups[ordinal].state}")
    for ordinal, facts in before.payloads.items():
        demand(after.payloads.get(ordinal, facts) == facts, "P11", f"the payload of ordinal {ordinal} is replaced")
    for number in before.steps.keys() & after.steps.keys():
        demand(before.steps[number] == after.steps[number], "P18", f"committed step {number} has changed")
    targets = [_target_of(before), _target_of(after)]
    demand(
        targets[0] <= targets[1], "P22", f"engines shall go from {targets[0]} to {targets[1]} (dead lineage, version)"
    )
    filtered = [row.ordinal for row in after.groups.values() if row.reason in GROUP_FILTERS]
    places = settings.groups_per_step * settings.max_steps
    demand(len(filtered) <= places * settings.max_resample_times, "P15", f"{filtered} are filtered in {places} places")
    for number in range(len(before.history), len(after.history)):
        _check_step(after.history[: number + 1], after.payloads, settings)
        _check_policies(after.history[number], after)


def _is_evaluated(row: Group, stored: "Stored") -> bool:
    return row.policy is not None and str(row.policy.version) in stored.values["evals"]


def _is_folded(ordinal: int, stored: "Stored") -> bool:
    return ordinal in check_ordinals(stored.history[: stored.values["folded"]["step"]])


def _target_of(stored: "Stored") -> tuple[int, int]:
    """(newest lineage of a dead history, version that engines shall serve)."""
    target = stored.values.get("target", {"manifest": None, "dead_lineage": -1})
    return target["dead_lineage"], target["manifest"]["policy"]["version"] if target["manifest"] else -1


def _check_policies(step: Step, stored: "Stored") -> None:
    """What is composed after a fork was sampled by policies of the live history (P23)."""
    dead, _ = _target_of(stored)
    lineages = {policy.lineage for ordinal in step.ordinals for policy in stored.payloads[ordinal].policies}
    demand(min(lineages) > dead, "P23", f"step {step.step} has groups of lineages {lineages}, dead are those to {dead}")


def _check_move(old: Group, row: Group, goes_back: bool) -> None:
    allowed = row.state is old.state or row.state in MOVES[old.state]
    given_up = row.reason == "forked" and old.state is not S.DROPPED
    allowed = allowed or (goes_back and (given_up or (old.state, row.state) == (S.DURABLE, S.COMPOSED)))
    demand(allowed, "P21", f"ordinal {row.ordinal} goes from {old.state} to {row.state}")
    same = (old.example, old.seed, old.policy) == (row.example, row.seed, row.policy)
    demand(same, "P10", f"ordinal {row.ordinal} asks for something else than before")
    demand(row.attempt >= old.attempt, "P11", f"attempt {row.attempt} of ordinal {row.ordinal} follows {old.attempt}")


def _check_step(steps: tuple[Step, ...], payloads: Mapping[int, GroupFacts], settings: Settings) -> None:
    """The newest step follows from those before it, and from payloads that are as young as promised (P16–P18)."""
    step, earlier = steps[-1], steps[:-1]
    demand(step.step == len(steps), "P18", f"step {step.step} follows step {len(earlier)}")
    demand(len(step.ordinals) == settings.groups_per_step, "P15", f"step {step.step} has {step.ordinals}")
    check_ordinals(steps)
    limit = settings.max_async_level if settings.order == "ordinal" else settings.max_off_policy_steps
    for ordinal, digest in zip(step.ordinals, step.digests, strict=True):
        facts = payloads.get(ordinal)
        demand(
            facts is not None and facts.digest == digest, "P18", f"step {step.step} lacks ordinal {ordinal}'s payload"
        )
        assert facts is not None
        lag = step.step - 1 - facts.oldest_version
        demand(lag <= limit, "P16", f"ordinal {ordinal} has lag {lag} in step {step.step}")
    chain = earlier[-1].chain if earlier else START
    follows = next_chain(chain, step.step, step.ordinals, step.dropped, step.digests) == step.chain
    demand(follows, "P20", f"the chain of step {step.step} does not follow from step {len(earlier)}")


def check_ordinals(steps: Iterable[Step]) -> list[int]:
    """No ordinal is in two steps, or trained and dropped (P20); returns all of them."""
    ordinals = [ordinal for step in steps for ordinal in (*step.ordinals, *(drop.ordinal for drop in step.dropped))]
    demand(len(ordinals) == len(set(ordinals)), "P20", f"an ordinal is trained or dropped twice: {ordinals}")
    return ordinals


# --- what is told ----------------------------------------------------------------------------------------------------


def check_told(parcels: "Iterable[Parcel]", stored: "Stored") -> None:
    """Whatever has left the packer is committed (P9, P11, P18, P19): if it dies now, its successor knows as much."""
    for _, identity, content, _ in parcels:
        if isinstance(content, RolloutDirective):
            _check_tickets(identity, content, stored)
        elif isinstance(content, RewardDirective):
            for hold in content.release.tolist():
                demand(_has_ended(stored, *hold), "P11", f"{identity} is told to let {hold} go, which is not settled")
        elif isinstance(content, TrainerDirective):
            _check_gang(identity, content, stored.values)
        elif isinstance(content, InferenceDirective):
            target = stored.values.get("target", {}).get("manifest")
            told = content.manifest and content.manifest.model_dump(exclude={"key"})
            demand(told == target, "P22", f"{identity} is told to serve {told}, committed is {target}")
        elif isinstance(content, tuple):
            step = content.step
            kept = stored.steps.get(step.step) == step and all(ordinal in stored.payloads for ordinal in step.ordinals)
            demand(kept, "P18", f"a batch of step {step.step}, {step.ordinals}, has left that is not in the ledger")


def _check_tickets(identity: str, directive: RolloutDirective, stored: "Stored") -> None:
    for ticket in directive.tickets:
        row = stored.groups.get(ticket.ordinal)
        held = row is not None and (row.holder, row.attempt) == (identity, ticket.attempt)
        demand(
            held, "P9", f"{identity} gets ticket {ticket.ordinal}.{ticket.attempt}, which is not committed as its own"
        )
        assert row is not None
        same = (row.example.key, row.seed) == (ticket.example_key, ticket.seed)
        demand(same, "P10", f"ticket {ticket.ordinal}.{ticket.attempt} names another example than its row")
    for ordinal, attempt in directive.release.tolist():
        row = stored.groups.get(ordinal)
        held = row is not None and (row.holder, row.attempt) == (identity, attempt)
        demand(not held, "P11", f"{identity} is told to let {ordinal}.{attempt} go, which it holds in the ledger")


def _has_ended(stored: "Stored", ordinal: int, attempt: int) -> bool:
    """Whether this attempt is over, or is not the newest one and has failed at whoever is told to let it go."""
    row = stored.groups.get(ordinal)
    return row is None or row.state is not S.ISSUED or row.outcome is AttemptOutcome.FAILED or row.attempt > attempt


def _check_gang(identity: str, directive: TrainerDirective, values: Mapping[str, Any]) -> None:
    gang = values.get("gang", {"incarnation": 0, "checkpoint": 0, "members": []})
    told = (directive.incarnation, directive.checkpoint) if directive.incarnation else None
    if told is not None:
        demand(
            told == (gang["incarnation"], gang["checkpoint"]), "P19", f"{identity} is told {told}, committed is {gang}"
        )
    recorded = values.get("recorded_step", 0)
    kept = directive.recorded_step <= recorded and (directive.phase != "done" or recorded >= directive.max_steps)
    demand(kept, "P18", f"{identity} hears that step {directive.recorded_step} is recorded, committed is {recorded}")


# --- restart, ranks, engines, the end --------------------------------------------------------------------------------


def check_restart(stored: "Stored", machine: Machine) -> None:
    """A restarted packer goes on from what is committed: what was settled is settled, what was dropped stays so."""
    for ordinal, row in stored.groups.items():
        known = machine.groups.rows.get(ordinal)
        open_now = known is not None and known.state is S.ISSUED
        demand(
            open_now == (row.state is S.ISSUED), "P11", f"after a restart ordinal {ordinal} is not {row.state} any more"
        )
        if row.state is S.SETTLED:
            kept = known is not None and known.state is S.SETTLED
            demand(kept, "P11", f"after a restart ordinal {ordinal} is not settled any more")
    for step in stored.steps.values():
        known_step = machine.steps.composed.get(step.step, step)
        demand(
            known_step == step, "P18", f"after a restart step {step.step} is {known_step.ordinals}, not {step.ordinals}"
        )


def check_ranks(ranks: "list[Rank]", disk: "Disk", stored: "Stored") -> None:
    """Each trains 1, 2, 3, … without a repeat, and all train the same (P19, P20), whatever became of the ledger.

    Ranks and checkpoints of a history that a fork has given up are not compared with others.
    """
    known: dict[int, tuple[str, Step]] = {}
    dead = set(stored.values.get("dead_chains", []))
    trained = [(rank.name, rank.trained) for rank in ranks]
    trained += [(f"checkpoint {step}", checkpoint.trained) for step, checkpoint in disk.checkpoints.items()]
    for name, steps in trained:
        demand([step.step for step in steps] == list(range(1, len(steps) + 1)), "P19", f"{name} has trained {steps}")
        check_ordinals(steps)
        if steps and steps[-1].chain in dead:
            continue
        for step in steps:
            other_name, other = known.setdefault(step.step, (name, step))
            what = f"step {step.step} is {other.ordinals} at {other_name}, {step.ordinals} at {name}"
            demand(step == other, "P18", what)


def check_turns(live: "list[Any]") -> None:
    """Of those that nobody may take for gone, ranks and engines never hold memory of the device at once (P28)."""
    held = [one.label for one in live if getattr(one, "device", "") == "held"]
    engines = [one.label for one in live if getattr(one, "holds_device", False)]
    demand(not held or not engines, "P28", f"{held} and {engines} hold the device at once")


def check_disk(disk: "Disk", stored: "Stored") -> None:
    """The ledger has what a gang needs that goes on from any checkpoint that is kept (P21)."""
    first = min(disk.checkpoints, default=0)
    for step in stored.history[first:]:
        kept = step.step in stored.steps and all(ordinal in stored.payloads for ordinal in step.ordinals)
        demand(kept, "P21", f"there is a checkpoint of step {first}, and the ledger has forgotten step {step.step}")


def check_end(ranks: "list[Rank]", disk: "Disk", settings: Settings, highest: int, stored: "Stored") -> None:
    """By the witness on the disk every ordinal that was ever told is trained once or dropped (P20, P27).

    Args:
        highest: the last train ordinal that a rollout has got a ticket for.
        stored: what is committed.
    """
    last = disk.checkpoints.get(settings.max_steps)
    demand(last is not None, "P27", f"done with checkpoints of {list(disk.checkpoints)}")
    assert last is not None
    demand(last.trained == stored.history, "P27", f"done with a checkpoint of {last.trained}")
    check_ranks(ranks, disk, stored)
    ordinals = sorted(check_ordinals(last.trained))
    demand(ordinals == list(range(len(ordinals))), "P20", f"trained or dropped are {ordinals}")
    demand(highest < len(ordinals), "P20", f"ordinal {highest} was issued, trained or dropped are {ordinals}")
