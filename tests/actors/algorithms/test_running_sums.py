"""Running sums, and where they are computed."""

from typing import Any

import pytest
import torch

from actors.algorithms.losses.running_sums import running_sums


def test_sums_are_those_of_all_elements_so_far() -> None:
    """Along the last dimension."""
    assert running_sums(torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 1.0]])).tolist() == [[1, 3, 6], [4, 4, 5]]


class OnGpu:
    """What is asked of a tensor on a GPU; torch raises for its cumsum where equal bits are demanded."""

    is_cuda, device = True, torch.device("cpu")

    def cpu(self) -> torch.Tensor:
        """Return the numbers."""
        return torch.tensor([1.0, 2.0])

    def cumsum(self, dim: int) -> str:
        """Say who adds."""
        return "by the GPU"


@pytest.mark.parametrize(("deterministic", "expected"), [(False, "by the GPU"), (True, [1.0, 3.0])])
def test_a_gpu_adds_only_where_the_order_may_differ(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, expected: Any
) -> None:
    """Otherwise a step with `trainer.deterministic` would raise in the loss m2po, and replay would differ."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    found: Any = running_sums(OnGpu())  # type: ignore[arg-type]
    assert (found if isinstance(found, str) else found.tolist()) == expected
