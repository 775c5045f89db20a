"""Losses of padded arrays, for those who have their own trainer."""

import numpy as np
import pytest
import torch

from actors.algorithms.losses import LossInputs, compute_loss
from schemas.config.losses import GrpoLossConfig
from schemas.config.objective import ObjectiveConfig


def test_padded_arrays_and_a_configuration_make_a_loss() -> None:
    """Ratios 1: the mean over completions of −A, and −A ÷ (its tokens · 2 completions) for each token in the mask."""
    logprobs_BT = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, 9.0, 9.0]], requires_grad=True)
    inputs = LossInputs.of_padded(logprobs_BT, np.zeros((2, 3)), [1.0, -0.5], [[1, 1, 0], [1, 0, 0]])
    loss = compute_loss(inputs, ObjectiveConfig(loss=GrpoLossConfig())).loss
    loss.backward()
    assert loss.item() == pytest.approx(-0.25)
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[-0.25, -0.25, 0.0], [0.25, 0.0, 0.0]]


def test_advantages_may_differ_by_token() -> None:
    """(B, T) as well as (B,); all else goes in by name."""
    inputs = LossInputs.of_padded(
        torch.zeros(2, 2), torch.zeros(2, 2), [[1.0, 2.0], [3.0, 4.0]], [[True, True], [False, True]],
        versions_BT=[[5, 6], [7, 8]], old_logprobs_BT=None, loss_tokens=30, version=9,
    )  # fmt: skip
    assert inputs.advantages_T.tolist() == [1.0, 2.0, 4.0]
    assert inputs.completion_of_T.tolist() == [0, 0, 1]
    assert inputs.versions_T is not None
    assert inputs.versions_T.tolist() == [5, 6, 8]
    assert (inputs.loss_tokens, inputs.version, inputs.old_logprobs_T) == (30, 9, None)


def test_shapes_and_names_that_do_not_fit_are_told() -> None:
    """Instead of being broadcast or dropped."""
    with pytest.raises(ValueError, match=r"entropy_BT: shape \(1, 2\), expected \(2, 2\), the mask's"):
        LossInputs.of_padded(torch.zeros(2, 2), torch.zeros(2, 2), [1, 2], torch.ones(2, 2), entropy_BT=[[0.1, 0.2]])
    with pytest.raises(ValueError, match=r"advantages: shape \(3,\), expected \(2, 2\)"):
        LossInputs.of_padded(torch.zeros(2, 2), torch.zeros(2, 2), [1, 2, 3], torch.ones(2, 2))
    with pytest.raises(ValueError, match="old_BT: no such array; there are old_logprobs_BT"):
        LossInputs.of_padded(torch.zeros(2, 2), torch.zeros(2, 2), [1, 2], torch.ones(2, 2), old_BT=torch.ones(2, 2))
