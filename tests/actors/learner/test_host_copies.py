"""Copies of weights in host memory: values, independence, and the order of work for tensors on a GPU.

There is no GPU here. Torch's fake tensors have a device without memory, so the order of operations is seen, not values.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actors.learner import host_copies
from actors.learner.host_copies import host_copies as copies_of


class Operations(TorchDispatchMode):
    """Notes each operation that reads and writes tensors: devices and precisions of both."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        read = args[1] if function.overloadpacket.__name__ == "copy_" else args[0] if args else None
        if isinstance(read, torch.Tensor) and isinstance(result, torch.Tensor):
            self.found.append((read.device.type, result.device.type, read.dtype, result.dtype))
        return result


@pytest.mark.parametrize("number", [1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_have_the_values_and_do_not_change_later(number: int, dtype: torch.dtype) -> None:
    """At three sizes: floating-point tensors in the precision, others in their own; transposed ones contiguous."""
    tensors = {str(i): torch.randn(i + 1, 3).t() for i in range(number)} | {"index": torch.arange(5)}
    expected = {name: (x.to(dtype) if x.is_floating_point() else x).clone() for name, x in tensors.items()}
    copies = copies_of(tensors.items(), dtype)
    for tensor in tensors.values():
        tensor.zero_()
    assert copies.keys() == expected.keys()
    for name, copy in copies.items():
        assert copy.dtype == expected[name].dtype
        assert copy.is_contiguous()
        assert torch.equal(copy, expected[name])


@pytest.mark.parametrize("number", [1, 7, 100])
def test_tensors_of_a_gpu_are_cast_there_and_waited_for_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy changes device and precision at once; the wait follows the last copy."""
    monkeypatch.setattr(host_copies, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    waits: list[int] = []
    with FakeTensorMode(), Operations() as operations:
        monkeypatch.setattr(host_copies, "_wait_for", lambda device: waits.append(len(operations.found)))
        tensors = [(str(i), torch.empty(i + 1, 3, device="cuda")) for i in range(number)]
        operations.found.clear()
        copies = copies_of(tensors, torch.bfloat16)
    assert {copy.device.type for copy in copies.values()} == {"cpu"}
    assert {copy.dtype for copy in copies.values()} == {torch.bfloat16}
    across = [one for one in operations.found if one[0] != one[1]]
    assert across == [("cuda", "cpu", torch.bfloat16, torch.bfloat16)] * number
    assert waits == [len(operations.found)]
