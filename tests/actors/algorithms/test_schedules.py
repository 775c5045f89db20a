"""Learning rate and temperature, at the steps where they can be checked by hand."""

from typing import Any

import pytest

from actors.algorithms.schedules import learning_rate, sampling_temperature
from schemas.config.actors import TemperatureScheduleConfig
from schemas.config.trainer import TrainerConfig


def rates(steps: list[int], **changes: object) -> list[float]:
    """Peak 1.0, ten steps unless said otherwise."""
    config = TrainerConfig.model_validate({"max_steps": 10, "learning_rate": 1.0} | changes)
    return [learning_rate(step, config) for step in steps]


def test_constant_is_constant() -> None:
    """From the first step to the last."""
    assert rates([1, 5, 10]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(scheduler: str) -> None:
    """Four steps: a quarter each; the first step is not wasted on 0."""
    assert rates([1, 2, 3, 4], warmup_steps=4, lr_scheduler=scheduler) == [0.25, 0.5, 0.75, 1.0]


def test_linear_falls_to_its_end() -> None:
    """Two steps of warm-up, eight of fall: half way at step 6."""
    assert rates([2, 6, 10], warmup_steps=2, lr_scheduler="linear") == pytest.approx([1.0, 0.5, 0.0])
    assert rates([6, 10], warmup_steps=2, lr_scheduler="linear", min_lr_ratio=0.2) == pytest.approx([0.6, 0.2])


def test_cosine_falls_slowly_fast_slowly() -> None:
    """A quarter of the way: (1 + cos 45°) ÷ 2 = 0.8535534; half way 0.5."""
    found = rates([2, 4, 6, 8, 10], warmup_steps=2, lr_scheduler="cosine")
    assert found == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0])
    assert rates([10], lr_scheduler="cosine", min_lr_ratio=0.1) == pytest.approx([0.1])


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_run_that_is_all_warm_up_ends_at_its_peak(scheduler: str) -> None:
    """No division by zero; the fall has no step left."""
    assert rates([10], warmup_steps=10, lr_scheduler=scheduler) == [1.0]


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_steps_beyond_the_last_keep_the_last_rate(scheduler: str) -> None:
    """A resumed run with fewer steps does not go negative."""
    assert rates([11, 50], lr_scheduler=scheduler, min_lr_ratio=0.3) == pytest.approx([0.3, 0.3])


PEAK, STEPS = 3e-4, 40
HUGGING_FACE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("constant", {}, {}),
    ("constant_with_warmup", {"warmup_steps": 7}, {}),
    ("linear", {"warmup_steps": 7}, {}),
    ("cosine", {"warmup_steps": 7}, {}),
    ("cosine_with_restarts", {"warmup_steps": 7, "lr_schedule": {"num_cycles": 3}}, {"num_cycles": 3}),
    ("cosine_with_restarts", {}, {}),
    ("polynomial", {"min_lr_ratio": 1e-7 / PEAK}, {}),
    ("polynomial", {"warmup_steps": 4, "min_lr_ratio": 0.1, "lr_schedule": {"power": 2.5}},
     {"lr_end": 0.1 * PEAK, "power": 2.5}),
    ("inverse_sqrt", {"warmup_steps": 7}, {}),
    ("inverse_sqrt", {}, {}),
    ("inverse_sqrt", {"warmup_steps": 7, "lr_schedule": {"timescale": 3}}, {"timescale": 3}),
    ("warmup_stable_decay", {"warmup_steps": 7, "lr_schedule": {"decay_steps": 11}}, {"num_decay_steps": 11}),
    ("warmup_stable_decay",
     {"warmup_steps": 7, "min_lr_ratio": 0.1, "lr_schedule": {"decay_steps": 11, "decay_type": "linear"}},
     {"num_decay_steps": 11, "decay_type": "linear", "min_lr_ratio": 0.1}),
]  # fmt: skip


def hugging_face(name: str, kwargs: dict[str, Any], warmup: int, num_updates: int) -> list[float]:
    """The rate of each update with transformers' schedule of this name."""
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, num_updates, kwargs)
    found = []
    for _ in range(num_updates):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("name", "keys", "kwargs"), HUGGING_FACE)
def test_schedule_has_the_rates_of_transformers_in_every_step(
    name: str, keys: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    """Counted from 0, as there."""
    keys = keys | {"lr_schedule": {"first": 0} | keys.get("lr_schedule", {})}
    found = rates(list(range(1, STEPS + 1)), max_steps=STEPS, learning_rate=PEAK, lr_scheduler=name, **keys)
    assert found == pytest.approx(hugging_face(name, kwargs, keys.get("warmup_steps", 0), STEPS), rel=1e-9, abs=1e-15)


def test_cosine_with_a_floor_is_cosine_with_min_lr_of_transformers() -> None:
    """Another name of the same."""
    keys = {"warmup_steps": 5, "min_lr_ratio": 0.2, "lr_schedule": {"first": 0}}
    found = rates(list(range(1, STEPS + 1)), max_steps=STEPS, learning_rate=PEAK, lr_scheduler="cosine", **keys)
    assert found == pytest.approx(hugging_face("cosine_with_min_lr", {"min_lr_rate": 0.2}, 5, STEPS), rel=1e-9)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 6}, {"warmup_ratio": 0.15}])
def test_updates_of_a_step_have_the_rates_of_as_many_updates_of_transformers(warmup: dict[str, Any]) -> None:
    """Ten steps of two passes over two parts; a warm-up of six updates is a step and a half."""
    keys = {"num_iterations": 2, "num_minibatches": 2, "lr_schedule": {"unit": "update", "first": 0}} | warmup
    config = TrainerConfig.model_validate({"max_steps": 10, "learning_rate": PEAK, "lr_scheduler": "linear"} | keys)
    found = [learning_rate(step, config, update) for step in range(1, 11) for update in range(1, 5)]
    assert found == pytest.approx(hugging_face("linear", {}, 6, 40), rel=1e-9)


def test_updates_of_a_step_have_one_rate_unless_asked_for() -> None:
    """The step is counted."""
    config = TrainerConfig.model_validate({"max_steps": 10, "num_minibatches": 4, "lr_scheduler": "linear"})
    assert len({learning_rate(3, config, update) for update in range(1, 5)}) == 1


def test_restarts_and_decays_at_the_end_reach_their_ends_in_the_last_step() -> None:
    """Counted from 1: two falls from the peak to a tenth; five steps of decay to 0."""
    falls = rates([5, 6, 10], lr_scheduler="cosine_with_restarts", lr_schedule={"num_cycles": 2}, min_lr_ratio=0.1)
    # in step 5 the second fall starts
    assert falls == pytest.approx([1.0, 0.1 + 0.9 * 0.9045085, 0.1])
    for kind, half in (("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - 0.5**0.5)):
        decay = {"decay_steps": 4, "decay_type": kind}
        found = rates([1, 6, 8, 10, 12], lr_scheduler="warmup_stable_decay", lr_schedule=decay)
        assert found == pytest.approx([1.0, 1.0, half, 0.0, 0.0])
    ratio = rates([8], lr_scheduler="warmup_stable_decay", lr_schedule={"decay_ratio": 0.35, "decay_type": "linear"})
    assert ratio == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, [1.0] * 7),
        ({"type": "linear", "end": 0.5, "steps": 5}, [1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]),
        ({"type": "cosine", "end": 0.5, "steps": 5}, [1.0, 0.9267767, 0.75, 0.5732233, 0.5, 0.5, 0.5]),
        ({"type": "linear", "end": 1.6}, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]),
        ({"type": "linear", "end": 0.2, "steps": 2}, [1.0] + [0.2] * 6),
        ({"type": "cosine", "end": 0.2, "steps": 1}, [0.2] * 7),
        ({"type": "linear", "end": 0.2, "steps": 1}, [0.2] * 7),
    ],
)
def test_the_temperature_goes_from_the_first_step_to_the_last_of_its_schedule(
    schedule: dict[str, object] | None, expected: list[float]
) -> None:
    """Seven steps; cosine at a quarter: (1 − cos 45°) ÷ 2 = 0.1464466. A schedule of one step has only its end."""
    config = TemperatureScheduleConfig.model_validate(schedule) if schedule else None
    found = [sampling_temperature(step, 1.0, config, 7) for step in range(1, 8)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("type_", ["linear", "cosine"])
def test_a_run_of_one_step_samples_at_the_end_of_its_schedule(type_: str) -> None:
    """Without steps of its own the schedule has those of the run, one here."""
    config = TemperatureScheduleConfig.model_validate({"type": type_, "end": 0.5})
    assert sampling_temperature(1, 1.0, config, 1) == 0.5
