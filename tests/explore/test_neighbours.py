"""Two runs on one machine whose addresses are exchanged by restarts: each minds its own (P1)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from actors.ledger import GroupFacts
from bus.fence import Fence
from tests.explore.packer import PACKER, Batch, Parcel, Product
from tests.explore.rules import Violation
from tests.explore.scenarios import STEPS
from tests.explore.walks import anything
from tests.explore.world import Action, World

ROUNDS = 1_000
CONTROL_SHARE = 0.3
"""Of heartbeats and directives that are brought to the wrong run; of groups and batches, which are fewer, all are."""
OURS = STEPS
THEIRS = replace(STEPS, product=Product(run="another run"), first_boot=10_001)


def neighbours(seed: int, rounds: int) -> Counter[str]:
    """Let both runs meet crashes and losses, and bring messages of each to processes of the other with the same name.

    Both are at the same steps, so numbers of ordinals, attempts, steps, terms and incarnations are mostly those that
    the receiver waits for. A process that has heard no packer yet belongs to no run, and its heartbeats are left out.

    Returns:
        messages that were brought to the wrong run, by kind.

    Raises:
        Violation: one of them was taken, or a rule was broken.
    """
    rng, brought = random.Random(seed), Counter[str]()
    worlds, number = [World(OURS), World(THEIRS)], 0
    while number < rounds:
        for i, other in ((0, 1), (1, 0)):
            if worlds[i].packer.over:
                worlds[i] = World((OURS, THEIRS)[i])
            action = anything(worlds[i], rng)
            worlds[i] = worlds[i].after(action)
            number += action.verb == "round"
            for parcel in worlds[i].said:
                control = not isinstance(parcel.content, GroupFacts | Batch)
                if parcel.run and (not control or rng.random() < CONTROL_SHARE):
                    worlds[other] = worlds[other].after(Action("misdeliver", detail=parcel))
                    brought[kind_of(parcel)] += 1
    return brought


def kind_of(parcel: Parcel) -> str:
    """A word for what a message is."""
    content = parcel.content[1] if parcel.to == PACKER and isinstance(parcel.content, tuple) else parcel.content
    return f"{type(content).__name__} to {'packer' if parcel.to == PACKER else 'peer'}"


@pytest.mark.slow
def test_no_message_of_another_run_is_taken_in_a_thousand_rounds() -> None:
    """Directives, groups, scored groups and batches of a run that is at the same step change nothing in any process."""
    brought = neighbours(seed=0, rounds=ROUNDS)
    print(brought)
    directives = (
        "RolloutDirective",
        "RewardDirective",
        "TrainerDirective",
        "InferenceDirective",
        "ObserverDirective",
        "GroupFacts",
        "Batch",
    )
    assert (
        min(brought[kind] for kind in ("GroupFacts to packer", *(f"{directive} to peer" for directive in directives)))
        >= 5
    )


def test_the_search_finds_a_process_that_does_not_compare_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As receivers were: whoever sends to an address is believed."""
    monkeypatch.setattr(Fence, "refuses", lambda self, run, term=None: "")
    with pytest.raises(Violation) as found:
        neighbours(seed=0, rounds=ROUNDS)
    assert found.value.rule == "P1"
