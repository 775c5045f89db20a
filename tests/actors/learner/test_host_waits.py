"""An update waits for its device once per rank, however many micro-batches it has.

On a GPU the host queues work ahead of the device. Whatever the host wants to know of a result makes it wait until the
device has nothing left to do. Such places are found on a CPU too: by the operations that bring a number or a size that
depends on values to the host.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.learner.learner import TorchLearner, _RankStep
from actors.models import attention
from actors.process.packages import is_installed
from tests.actors.learner.steps import batches_of, random_samples, run_config, scored_group, step_batch
from tests.actors.models import varlen_attn
from tests.conftest import ModelFolder

WAITING = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "equal"}
"""Operations of torch that bring a value, or a size that depends on values, to the host."""
ASKING = ("tolist", "cpu", "numpy")
"""Methods of tensors that do so without an operation, if the tensor is on a CPU already."""


class Waits(TorchDispatchMode):
    """Counts waits by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1]
        )
        if name in WAITING or by_mask or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The waits of the body."""
    with monkeypatch.context() as patch, Waits() as counted:
        for method in ASKING:
            patch.setattr(Tensor, method, asking(method, getattr(Tensor, method), counted.found))
        yield counted.found


def asking(name: str, method: Any, found: Counter[str]) -> Any:
    """A method of tensors that counts its calls."""

    def asked(tensor: Tensor, *given: Any, **named: Any) -> Any:
        # what stands in for a GPU's kernel may look at its arguments
        if sys._getframe(1).f_globals["__name__"] != varlen_attn.__name__:
            found[name] += 1
        return method(tensor, *given, **named)

    return asked


def waits_of(learner: TorchLearner, monkeypatch: pytest.MonkeyPatch, micro_batches: int) -> Counter[str]:
    """Of the gradients of one update, on rows at mixed temperatures."""
    samples = random_samples()
    for number, sample in enumerate(samples):
        sample.temperature = 0.5 + number % 2 / 2
    batch = step_batch(samples, micro_batches=micro_batches)
    part = _RankStep(batch, learner._reference_models.logprobs(batch, with_old=True))
    with waits(monkeypatch) as found:
        learner._rank_gradients(part, 0)
    return found


PLAIN: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"loss": {"type": "gspo"}},
    "cispo": {"loss": {"type": "cispo"}},
    "dapo": {"loss": {"type": "dapo"}},
    "sapo": {"loss": {"type": "sapo"}},
    "gmpo": {"loss": {"type": "gmpo"}},
    "ipo": {"loss": {"type": "ipo"}},
    "dppo": {"loss": {"type": "dppo"}},
    "aipo": {"loss": {"type": "aipo"}},
    "rloo": {"loss": {"type": "rloo"}},
    "decoupled": {"loss": {"type": "decoupled"}},
    "vespo": {"loss": {"type": "vespo"}},
    "entropy": {"entropy_coef": 0.01},
    "reference": {"reference": {"beta": 0.1}},
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_update_reads_its_measurements_once(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One reading for one and for four micro-batches."""
    learner = TorchLearner(run_config(model_folder(), **PLAIN[name]))
    for number in (1, 4):
        assert waits_of(learner, monkeypatch, number) == {"tolist": 1}, number


@pytest.mark.parametrize(("dtype", "lora"), [("bfloat16", None), ("float32", {"rank": 4}), ("bfloat16", {"rank": 4})])
def test_precision_and_adapters_add_no_wait(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, dtype: str, lora: Any
) -> None:
    """Master weights, autocast, adapters."""
    learner = TorchLearner(run_config(model_folder(), dtype, lora))
    assert waits_of(learner, monkeypatch, 2) == {"tolist": 1}


@pytest.mark.parametrize("model", [{"output_layer": "triton"}, {"row_multiple": 16}], ids=str)
def test_ways_of_computing_for_gpus_add_no_wait(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """The kernels of the output layer, in Triton's interpreter, and rows that are filled up."""
    if "output_layer" in model and not is_installed("triton"):
        pytest.skip("not run: install triton")
    config = run_config(model_folder())
    changed = config.model_copy(update={"model": config.model.model_copy(update=model)})
    assert waits_of(TorchLearner(changed), monkeypatch, 2) == {"tolist": 1}


def test_shared_prompts_add_no_wait(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention that computes a group's prompt once, by torch's operators for GPUs."""
    monkeypatch.setattr(attention, "implementation", lambda *_: attention.NAMES["varlen"])
    learner = TorchLearner(run_config(model_folder()))
    (batch,) = batches_of([scored_group(ordinal) for ordinal in range(4)], 1)
    part = _RankStep(batch, learner._reference_models.logprobs(batch, with_old=False))
    with varlen_attn.kernels_for_cpus():
        learner._rank_gradients(part, 0)
        learner._optimizer.zero_grad()
        with waits(monkeypatch) as found:
            learner._rank_gradients(part, 0)
    assert found == {"tolist": 1}


def test_a_loss_that_waits_is_known(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """M2PO sorts the tokens of the loss mask: it waits in each micro-batch, which docs/reference/training.md says."""
    learner = TorchLearner(run_config(model_folder(), loss={"type": "m2po"}))
    one, two = (waits_of(learner, monkeypatch, number) for number in (1, 2))
    assert one["nonzero"] == 1
    assert two["nonzero"] == 2


def test_what_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ways to wait that this project has had."""
    values = torch.arange(4.0)
    with waits(monkeypatch) as found:
        bool((values == 1).all())
        values[values > 1].sum()
        values.nonzero()
        values.cpu()
        values.tolist()
        float(values.max())
    assert found == {"_local_scalar_dense": 2, "index": 1, "nonzero": 1, "cpu": 1, "tolist": 1}
