"""A loss of the user's own, by its path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from schemas.config.objective import ObjectiveConfig
from schemas.errors import ConfigError

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


def test_the_function_of_a_file_makes_the_loss(tmp_path: Path) -> None:
    """0.5 · 3 ÷ 2; its sums stand beside those of every loss."""
    (tmp_path / "my_loss.py").write_text(MINE)
    output = compute_loss(inputs_of(), ObjectiveConfig(loss={"type": "custom", "path": f"{tmp_path}/my_loss.py:mine"}))
    assert output.loss.item() == pytest.approx(0.75)
    assert (int(output.sums["tokens"]), int(output.sums["masked_tokens"])) == (2, 1)


def test_what_is_no_loss_output_is_named(tmp_path: Path) -> None:
    """With the key and the type."""
    (tmp_path / "my_loss.py").write_text(MINE)
    objective = ObjectiveConfig(loss={"type": "custom", "path": f"{tmp_path}/my_loss.py:wrong"})
    with pytest.raises(TypeError, match=r"trainer\.loss\.path: .*my_loss\.py:wrong returned a float"):
        compute_loss(inputs_of(), objective)


def test_a_function_that_is_not_there_is_named() -> None:
    """As with rewards."""
    objective = ObjectiveConfig(loss={"type": "custom", "path": "math:nothing"})
    with pytest.raises(ConfigError, match=r"trainer\.loss\.path: math has no function 'nothing'"):
        compute_loss(inputs_of(), objective)


@pytest.mark.parametrize(
    "switch",
    [
        {"correction": {"mode": "mask"}},
        {"off_policy_mask_threshold": 0.1},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"adaptive_entropy": {}},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_no_switch_stands_beside_it(switch: dict[str, Any]) -> None:
    """It would do nothing."""
    with pytest.raises(ValueError, match=f"{next(iter(switch))}: acts on no loss of type custom"):
        ObjectiveConfig(loss={"type": "custom", "path": "math:sqrt"}, **switch)
