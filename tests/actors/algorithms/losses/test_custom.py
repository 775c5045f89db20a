"""A loss of the user's own: loaded by assembly, handed in to the learner."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from actors.assembly import load_loss, make_learner
from actors.learner.learner import TorchLearner
from actors.learner.ranks import SINGLE_RANK
from schemas.config import RunConfig
from schemas.config.losses import CustomLossConfig
from schemas.config.objective import ObjectiveConfig
from schemas.errors import ConfigError
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder
from tests.ring.harness import ring_config

MINE = """
from actors.algorithms.losses import LossOutput


def mine(inputs):
    dropped = inputs.loss_mask_T.sum() - 1
    loss = -(inputs.advantages_T * inputs.logprobs_T).sum() / inputs.loss_tokens
    return LossOutput(loss, {"masked_tokens": dropped})


def wrong(inputs):
    return 1.0
"""


def inputs_of() -> LossInputs:
    """Two tokens of one completion."""
    return LossInputs.of_padded(torch.tensor([[-1.0, -2.0]]), [[-1.0, -2.0]], [0.5], [[True, True]])


def with_loss(config: RunConfig, path: str) -> RunConfig:
    """The same run with the function at this path as its loss."""
    trainer = config.trainer.model_copy(update={"loss": CustomLossConfig(type="custom", path=path)})
    return config.model_copy(update={"trainer": trainer})


def test_the_function_of_a_file_makes_the_loss(tmp_path: Path) -> None:
    """0.5 · 3 ÷ 2; its sums stand beside those of every loss."""
    (tmp_path / "my_loss.py").write_text(MINE)
    config = with_loss(ring_config(tmp_path), f"{tmp_path}/my_loss.py:mine")
    output = compute_loss(inputs_of(), config.trainer, load_loss(config))
    assert output.loss.item() == pytest.approx(0.75)
    assert (int(output.sums["tokens"]), int(output.sums["masked_tokens"])) == (2, 1)


def test_what_is_no_loss_output_is_named(tmp_path: Path) -> None:
    """With the key and the type."""
    (tmp_path / "my_loss.py").write_text(MINE)
    config = with_loss(ring_config(tmp_path), f"{tmp_path}/my_loss.py:wrong")
    with pytest.raises(TypeError, match=r"trainer\.loss\.path: .*my_loss\.py:wrong returned a float"):
        compute_loss(inputs_of(), config.trainer, load_loss(config))


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As with rewards."""
    with pytest.raises(ConfigError, match=r"trainer\.loss\.path: math has no function 'nothing'"):
        load_loss(with_loss(ring_config(tmp_path), "math:nothing"))


@pytest.mark.slow
def test_the_learner_of_a_run_trains_with_it(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Its sums are among the metrics of the step; a learner that was not given the function says so."""
    (tmp_path / "my_loss.py").write_text(MINE)
    config = with_loss(run_config(model_folder()), f"{tmp_path}/my_loss.py:mine")
    samples = random_samples()
    measured = make_learner(config).step(step_batch(samples), SINGLE_RANK)
    assert measured["masked_fraction"] > 0.5
    with pytest.raises(ValueError, match=r"trainer\.loss\.path: the function .*my_loss\.py:mine was not handed in"):
        TorchLearner(config).step(step_batch(samples))


@pytest.mark.parametrize(
    "modifier",
    [
        {"correction": {"mode": "mask"}},
        {"off_policy_mask_threshold": 0.1},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"adaptive_entropy": {}},
    ],
    ids=lambda modifier: next(iter(modifier)),
)
def test_no_switch_stands_beside_it(modifier: dict[str, Any]) -> None:
    """It would do nothing."""
    with pytest.raises(ValueError, match=f"{next(iter(modifier))}: acts on no loss of type custom"):
        ObjectiveConfig(loss={"type": "custom", "path": "math:sqrt"}, **modifier)
