"""How far the running evaluation is, and its time left, on a driven machine."""

import pytest

from actors.ops.screens.limits import evaluation_words
from actors.packer.evaluation_clock import EvaluationClock
from tests.actors.ledger.test_evaluations import Run


def begun(num_prompts: int) -> Run:
    """A run whose first evaluation has been issued; none of its prompts is sampled."""
    run = Run(num_evals=num_prompts, eval_at_start=True)
    run.go(lambda: run.open == num_prompts, sample_evals=False)
    return run


@pytest.mark.parametrize("num_prompts", [1, 20, 300])
def test_prompts_are_counted_and_the_time_left_follows_the_pace_so_far(num_prompts: int) -> None:
    """After each turn of 3 seconds: seconds so far ÷ prompts done × prompts to go. Nothing between evaluations."""
    run, clock = begun(num_prompts), EvaluationClock()
    assert clock.values is None
    now = 1000.0
    clock.look(now, run.machine)
    version = run.machine.evaluations.policy.version
    assert clock.values == {"version": version, "done": 0, "total": num_prompts, "seconds_left": None}
    looks = 0
    while run.machine.evaluations.policy is not None and run.machine.evaluations.policy.version == version:
        run.work()
        now, looks = now + 3.0, looks + 1
        clock.look(now, run.machine)
        if run.open and run.machine.evaluations.policy.version == version:
            done = num_prompts - run.open
            left = round(3.0 * looks / done * run.open, 1) if done else None
            assert clock.values == {"version": version, "done": done, "total": num_prompts, "seconds_left": left}
        assert looks < 1000
    assert clock.values is None or clock.values["version"] != version


def test_a_packer_that_starts_again_counts_what_is_done_but_not_as_its_own_pace() -> None:
    """A third of the prompts was settled before: these are done, and the time left is known with the next ones."""
    run = begun(40)
    while run.open > 25:
        run.work()
    open_before, clock = run.open, EvaluationClock()
    clock.look(50.0, run.machine)
    assert clock.values == {"version": 0, "done": 40 - open_before, "total": 40, "seconds_left": None}
    while run.open == open_before:
        run.work()
    clock.look(60.0, run.machine)
    assert 0 < run.open < open_before
    assert clock.values["seconds_left"] == round(10.0 / (open_before - run.open) * run.open, 1)


def test_words_tell_prompts_and_time() -> None:
    """With an estimate, before it, and of a progress that an older packer has written."""
    known = {"version": 8, "done": 70, "total": 100, "seconds_left": 12.4}
    assert evaluation_words({"eval_open": 30, "evaluation": known}) == "version 8, 70 of 100 prompts, about 12 s left"
    assert evaluation_words({"evaluation": known | {"seconds_left": None}}) == "version 8, 70 of 100 prompts"
    assert evaluation_words({"eval_open": 30, "evaluation": None}) == "30 prompts to go"
