"""Learning rate and temperature, at the steps where they can be checked by hand."""

import pytest

from actors.algorithms.schedules import learning_rate, sampling_temperature
from schemas.config.actors import TemperatureScheduleConfig
from schemas.config.trainer import TrainerConfig


def rates(steps: list[int], **changes: object) -> list[float]:
    """Peak 1.0, ten steps unless said otherwise."""
    config = TrainerConfig(**{"max_steps": 10, "learning_rate": 1.0} | changes)
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
