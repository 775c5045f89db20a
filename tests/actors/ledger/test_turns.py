"""Who may use a device that trainer and engines share."""

from typing import Any

import pytest

from actors.ledger.turns import Turns
from schemas.messages import InferenceHeartbeat, TrainerHeartbeat
from tests.schemas.messages.examples import EXAMPLES

TERM = 3


def rank(device: str) -> TrainerHeartbeat:
    """Return what a rank says of the device."""
    heartbeat = EXAMPLES["trainer_heartbeat"].model_copy(update={"device": device})
    assert isinstance(heartbeat, TrainerHeartbeat)
    return heartbeat


def engine(turn: int, holds: bool) -> InferenceHeartbeat:
    """Return what an engine says of the device."""
    heartbeat = EXAMPLES["inference_heartbeat"].model_copy(update={"turn": turn, "holds_device": holds})
    assert isinstance(heartbeat, InferenceHeartbeat)
    return heartbeat


def history(turns: Turns, *rounds: tuple[list[Any], list[Any], bool]) -> list[str]:
    """Return the holder after each round, a second apart."""
    found = []
    for second, (ranks, engines, composed) in enumerate(rounds):
        turns.update(float(second), ranks, engines, composed)
        found.append(turns.holder)
    return found


def test_a_step_is_a_turn_of_the_trainer_between_two_of_the_engines() -> None:
    """Load, sample, rest, train, and sample again; an order to rest has a new number."""
    turns = Turns(True, TERM, 0.0)
    first = turns.number
    resting, awake = engine(first, False), engine(first, True)
    assert history(
        turns,
        ([rank("wanted")], [resting], False),
        ([rank("held")], [resting], False),
        ([rank("free")], [resting], False),
    ) == ["trainer", "trainer", ""]
    assert turns.number == first + 1
    awake, resting = engine(first + 2, True), engine(first + 2, False)
    assert history(
        turns,
        ([rank("free")], [engine(first + 1, False)], False),
        ([rank("free")], [awake], False),
        ([rank("free")], [awake], True),
        ([rank("free")], [awake], True),
        ([rank("free")], [resting], True),
        ([rank("held")], [resting], True),
        ([rank("free")], [resting], False),
    ) == ["engines", "engines", "", "", "trainer", "trainer", ""]


def test_an_engine_that_rested_before_the_order_does_not_count() -> None:
    """It may be about to wake, by an order from before."""
    turns = Turns(True, TERM, 0.0)
    turns.update(0.0, [], [], False)
    assert turns.holder == "engines"
    turns.update(1.0, [], [], True)
    assert history(turns, ([], [engine(turns.number - 1, False)], True)) == [""]
    assert history(turns, ([], [engine(turns.number, False), engine(turns.number, True)], True)) == [""]
    assert history(turns, ([], [engine(turns.number, False)] * 2, True)) == ["trainer"]


@pytest.mark.parametrize("holds", ["rank", "engine"])
def test_who_is_gone_has_no_turn_any_more(holds: str) -> None:
    """Heartbeats of the dead are not among those of the live."""
    turns = Turns(True, TERM, 0.0)
    turns.update(0.0, [rank("wanted")] if holds == "rank" else [], [], False)
    assert turns.holder == ("trainer" if holds == "rank" else "engines")
    wanted = holds == "engine"
    assert history(turns, ([], [], wanted), ([], [], wanted))[-1] == ("engines" if holds == "rank" else "trainer")


def test_nobody_has_a_turn_before_those_from_before_could_speak() -> None:
    """After a restart of the packer."""
    turns = Turns(True, TERM, 1.5)
    assert history(turns, *[([rank("wanted")], [], False)] * 3) == ["", "", "trainer"]
    assert turns.number > Turns(True, TERM - 1, 0.0).number + 1000


def test_without_turns_all_may_use_their_devices() -> None:
    """At all times, and engines hear no number."""
    turns = Turns(False, TERM, 0.0)
    assert not turns.update(0.0, [rank("held")], [engine(0, True)], True)
    assert (turns.may_use("trainer"), turns.may_use("engines"), turns.number) == (True, True, 0)
