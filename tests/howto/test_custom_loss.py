"""docs/howto/custom-loss.md: its function is the built-in loss that it says it is, and trains in a run."""

from pathlib import Path

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.metrics import DENOMINATORS
from actors.assembly import load_loss, make_learner
from schemas.config import RunConfig
from schemas.config.losses import CustomLossConfig, DapoLossConfig
from tests.actors.algorithms.losses.around_engine import random_inputs
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder
from tests.howto.pages import CODE, page

PAGE = page("custom-loss")
LIKE = DapoLossConfig(old_logprobs="inference", epsilon=0.2, epsilon_high=0.28)


def with_loss(config: RunConfig, loss: CustomLossConfig | DapoLossConfig) -> RunConfig:
    """The same run with another loss."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"loss": loss})})


@pytest.fixture
def mine(tmp_path: Path) -> CustomLossConfig:
    """The page's loss, as a file."""
    PAGE.write_files(tmp_path)
    return CustomLossConfig(path=f"{tmp_path}/my_loss.py:clipped")


@pytest.mark.parametrize("seed", range(5))
def test_the_function_is_the_loss_that_it_is_compared_with(
    seed: int, mine: CustomLossConfig, model_folder: ModelFolder
) -> None:
    """Value, gradient and metric, on random tokens."""
    config = with_loss(run_config(model_folder()), mine)
    inputs = random_inputs(seed)
    found = compute_loss(inputs, config.trainer, load_loss(config))
    expected = compute_loss(inputs, with_loss(config, LIKE).trainer)
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-9)
    gradients = [torch.autograd.grad(output.loss, inputs.logprobs_T)[0].tolist() for output in (found, expected)]
    assert gradients[0] == pytest.approx(gradients[1], abs=1e-9)
    assert found.sums["clipped_high"] == expected.sums["clipped_high"]


def test_a_step_of_the_trainer_with_it_makes_the_same_weights(
    mine: CustomLossConfig, model_folder: ModelFolder
) -> None:
    """As with the built-in loss, in a tiny model; the metric is in the step's figures."""
    config, batch = run_config(model_folder()), step_batch(random_samples())
    learners = [make_learner(with_loss(config, loss)) for loss in (mine, LIKE)]
    figures = [learner.step(batch) for learner in learners]  # type: ignore[call-arg]
    assert figures[0]["clip_fraction_high"] == figures[1]["clip_fraction_high"]
    first, second = (learner.weights().tensors for learner in learners)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_the_tables_name_fields_methods_and_sums_that_exist() -> None:
    """Of LossInputs, and of the metrics."""
    for head in (("Field of `LossInputs`", "Holds"), ("Method", "Does")):
        for cell, _ in PAGE.table(*head).rows:
            for name in CODE.findall(cell):
                name = name.partition("(")[0]
                assert name in LossInputs.__dataclass_fields__ or hasattr(LossInputs, name), name
    for sums, columns in PAGE.table("Sum", "Column").rows:
        for name, column in zip(CODE.findall(sums), CODE.findall(columns), strict=True):
            assert DENOMINATORS[column][0] == name


def test_what_is_said_to_be_refused_is_refused(mine: CustomLossConfig) -> None:
    """Each of the keys of that line."""
    from schemas.config.objective import ObjectiveConfig

    values = {
        "correction": {"mode": "mask"}, "entropy_coef": 0.1, "adaptive_entropy": {}, "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.1, "distillation": {"type": "joint"},
    }  # fmt: skip
    line = next(line for line in PAGE.text.split("\n- ") if line.startswith("`trainer.correction`"))
    named = [name.removeprefix("trainer.") for name in CODE.findall(line)]
    assert sorted(named) == sorted(values)
    for key, value in values.items():
        with pytest.raises(ValueError, match=f"{key}: acts on no loss of type custom"):
            ObjectiveConfig.model_validate({"loss": mine.model_dump(), key: value})
