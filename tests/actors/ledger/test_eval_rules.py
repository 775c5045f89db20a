"""Evaluations with rules of their own (P26): when, how often and how each samples."""

import json

from hypothesis import given
from hypothesis import strategies as st

from actors.ledger import EvalRule, GroupState
from schemas.config.sampling import SamplingParams
from tests.actors.ledger.driver import Ring, policy, settings
from tests.actors.ledger.test_evaluations import Run

OFTEN = EvalRule(every_steps=1, at_start=True, at_end=True)
ONCE = EvalRule(at_end=True, completions=3, sampling=SamplingParams(temperature=0.7, top_k=5), max_tokens=99)
RULES = {"often": OFTEN, "once": ONCE}


class Both(Run):
    """A run with two evaluations of two prompts each."""

    def __init__(self, **changes: object) -> None:
        values = {"eval_rules": RULES, "max_steps": 4} | changes
        Ring.__init__(self, settings(**values), 2, eval_labels=("often", "once"))
        self._join()


def labels_at(run: Both, version: int) -> list[str]:
    """Evaluations of a version, a name for each prompt."""
    rows = run.machine.groups.rows.values()
    return sorted(row.example.environment for row in rows if row.policy and row.policy.version == version)


def test_each_evaluation_has_the_versions_of_its_rule() -> None:
    """One is due at each version and samples once; the other at the end, three completions."""
    run = Both()
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == [0, 1, 2, 3, 4]
    assert [labels_at(run, version) for version in range(4)] == [["often"] * 2] * 4
    assert labels_at(run, 4) == ["often", "often", "once", "once"]
    sizes = {row.example.environment: row.num_completions for row in run.machine.groups.rows.values() if row.policy}
    assert sizes == {"often": 1, "once": 3}


def test_tickets_have_the_sampling_of_their_rule() -> None:
    """Temperature, top_k and the number of new tokens."""
    run = Both(eval_rules={"often": OFTEN, "once": EvalRule(at_start=True, sampling=ONCE.sampling, max_tokens=99)})
    run.go(lambda: run.open == 4, sample_evals=False)
    run.turn()
    tickets = {ticket.environment: ticket for ticket in run.rollout.held.values() if ticket.purpose == "eval"}
    assert tickets["often"].sampling == SamplingParams(temperature=0.0)
    assert tickets["often"].max_tokens == run.settings.max_tokens
    assert tickets["once"].sampling == SamplingParams(temperature=0.7, top_k=5)
    assert tickets["once"].max_tokens == 99


def test_the_seed_of_a_prompt_does_not_depend_on_other_evaluations() -> None:
    """At a version with both, and at one with the first alone."""
    run = Both()
    run.go(lambda: run.machine.phase == "done")
    seeds: dict[str, set[int]] = {}
    for row in run.machine.groups.rows.values():
        if row.policy:
            seeds.setdefault(f"{row.example.environment} {row.example.index}", set()).add(row.seed)
    assert {len(found) for found in seeds.values()} == {1}
    assert len({seed for found in seeds.values() for seed in found}) == 4


def test_groups_of_an_evaluation_that_was_removed_are_given_up_at_a_restart() -> None:
    """No actor has their examples any more; the others go on, and the version is finished."""
    run = Both()
    run.go(lambda: run.evaluated == [0, 1, 2, 3])
    run.go(lambda: run.open == 4, sample_evals=False)
    run.eval_examples = [example for example in run.eval_examples if example.environment == "often"]
    run.restart_packer()
    assert run.machine.groups.dropped["eval"] == {"eval_void": 2}
    run.wait(4.0)
    run.go(lambda: run.machine.phase == "done")
    done = [row.example.environment for row in run.machine.groups.rows.values() if row.policy == policy(4)
            and row.state is GroupState.SETTLED]  # fmt: skip
    assert done == ["often", "often"]
    assert json.dumps(run.machine.evaluations.done) == "[0, 1, 2, 3, 4]"


@given(st.integers(0, 5), st.booleans(), st.booleans(), st.integers(1, 20))
def test_the_next_versions_are_those_that_are_due(every: int, start: bool, end: bool, last: int) -> None:
    """Followed from one to the next, and asked for each version."""
    rule = EvalRule(every_steps=every, at_start=start, at_end=end)
    found, version = [], rule.next_after(-1, last)
    while version is not None:
        found.append(version)
        version = rule.next_after(version, last)
    assert found == [number for number in range(last + 1) if rule.is_due(number, last)]
