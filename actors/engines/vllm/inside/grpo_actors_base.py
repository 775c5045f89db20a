"""Loader of vLLM for a base that the trainer holds in memory (`up.share_base`): weights are mapped, not copied.

A weight of vLLM may join several tensors of the trainer's model. Where each lies is what vLLM's own `load_weights`
does: it runs with tensors without values, and its copies are recorded. A weight that is one stretch of the trainer's
block is mapped; others, and those of one axis, which are overwritten in place, are copied. Imports nothing of ours but
modules of such folders, as the code runs in vLLM's environment.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpo_actors_handles as blocks
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

FORMAT = "grpo_base"
"""Value for `vllm serve --load-format`."""


@dataclass(frozen=True)
class Stretch:
    """Elements of a tensor, as a view of it."""

    start: int
    shape: Sequence[int]
    stride: Sequence[int]

    @classmethod
    def of(cls, view: Any) -> "Stretch":
        """Return the elements of a view."""
        return cls(view.storage_offset(), tuple(view.shape), view.stride())


@dataclass(frozen=True)
class Copy:
    """A copy of vLLM's `load_weights`: elements of a parameter, from those of a tensor in the model's files."""

    parameter: str
    source: str
    to: Stretch
    of: Stretch


@register_model_loader(FORMAT)
class BaseLoader(BaseModelLoader):  # type: ignore[misc]
    """Loader of a model whose weights are in a block of the trainer's memory.

    `--model-loader-extra-config '{"manifest": PATH}'` names the description of the block.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._manifest = json.loads(Path(load_config.model_loader_extra_config["manifest"]).read_text(encoding="utf-8"))

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the trainer has the model."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Refuse to load over weights that are the trainer's.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the base belongs to the trainer (up.share_base), and is not overwritten")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model, with the trainer's weights."""
        device = torch.device(vllm_config.device_config.device)
        block = blocks.opened(self._manifest["handle"])
        with set_default_torch_dtype(model_config.dtype):
            with device, _parameters_without_memory():
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            mapped = self._fill(model, block, device)
            with mock.patch.object(layer_utils, "dispatch_cpu_unquantized_gemm", _multiply_as_it_is):
                process_weights_after_loading(model, model_config, device)
        model.grpo_actors_mapped = mapped
        return model.eval()

    def _fill(self, model: Any, block: Any, device: Any) -> int:
        """Give each parameter its weights; return the number of bytes that are mapped."""
        copies = recorded(model, [tuple(place) for place in self._manifest["tensors"]])
        tensors = blocks.tensors_in(block, self._manifest["tensors"])
        starts = {name: start for name, _, _, start in self._manifest["tensors"]}
        mapped = 0
        for name, parameter in model.named_parameters():
            own = [copy for copy in copies if copy.parameter == name]
            if not own:
                raise ValueError(f"vLLM's weight {name} is in no tensor of the trainer's model")
            start = _start(parameter, own, tensors, starts, self._manifest["rooms"])
            if start is not None and parameter.ndim > 1:
                part = block[start : start + parameter.nbytes]
                parameter.data = part.view(parameter.dtype).view(parameter.shape)
                mapped += parameter.nbytes
                continue
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            for copy in own:
                whole = tensors[copy.source]
                source = whole.as_strided(copy.of.shape, copy.of.stride, whole.storage_offset() + copy.of.start)
                parameter.data.as_strided(copy.to.shape, copy.to.stride, copy.to.start).copy_(source)
        return mapped


def recorded(model: Any, places: Sequence[Any]) -> list[Copy]:
    """Return the copies that vLLM makes when it loads a model's weights, without a value being copied.

    Args:
        model: vLLM's model.
        places: name, dtype, shape and first byte of each tensor.

    Raises:
        ValueError: vLLM computes a weight from tensors, beyond copying them.
    """
    sources = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, dtype, shape, _ in places}
    with _twins_without_values(model) as parameters:
        recorder = _Recorder(parameters, sources)
        with recorder:
            model.load_weights(iter(sources.items()))
    return recorder.copies


def _start(
    parameter: Any, copies: Sequence[Copy], tensors: dict[str, Any], starts: dict[str, int], rooms: dict[str, int]
) -> int | None:
    """Return the first byte of a parameter in the block; None if it is not one stretch of the block."""
    size = parameter.element_size()
    begins: set[int] = {starts[copy.source] + (copy.of.start - copy.to.start) * size for copy in copies}
    alike = all(
        copy.to.shape == copy.of.shape
        and copy.to.stride == copy.of.stride
        and tensors[copy.source].dtype == parameter.dtype
        for copy in copies
    )
    covered = sum(torch.Size(copy.to.shape).numel() for copy in copies) * size
    if not alike or len(begins) != 1:
        return None
    # rows that the tensors do not have: of zeros, behind the last one
    missing = parameter.nbytes - covered
    last = max(copies, key=lambda copy: copy.to.start)
    if missing and rooms.get(last.source, 0) < missing:
        return None
    (begin,) = begins
    return begin


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies between parameters and tensors without values."""

    def __init__(self, parameters: dict[str, Any], sources: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a copy into a parameter, or run another operation."""
        if func is torch.ops.aten.copy_.default:
            parameter = self._parameters.get(args[0].untyped_storage()._cdata)
            if parameter is not None:
                source = self._sources.get(args[1].untyped_storage()._cdata)
                if source is None:
                    raise ValueError(f"vLLM computes its weight {parameter} from tensors; set up.share_base: false")
                self.copies.append(Copy(parameter, source, Stretch.of(args[0]), Stretch.of(args[1])))
                return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _twins_without_values(model: Any) -> Iterator[dict[str, Any]]:
    """Replace parameters by such of the same class and with the same loaders, but without values, meanwhile."""
    twins: dict[int, Any] = {}
    before: list[tuple[Any, str, Any]] = []
    named: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            before.append((module, leaf, parameter))
            if id(parameter) not in twins:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                twin = torch.Tensor._make_subclass(type(parameter), empty, False)
                twin.__dict__ = parameter.__dict__
                named[f"{prefix}.{leaf}" if prefix else leaf] = twins[id(parameter)] = twin
    for module, leaf, parameter in before:
        module._parameters[leaf] = twins[id(parameter)]
    try:
        yield named
    finally:
        for module, leaf, parameter in before:
            module._parameters[leaf] = parameter


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let modules that are made meanwhile have parameters with a shape, and the memory of one element."""
    register = torch.nn.Module.register_parameter

    def small(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.numel() > 1:
            one = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            parameter.data = one.expand(parameter.shape)
        register(module, name, parameter)

    with mock.patch.object(torch.nn.Module, "register_parameter", small):
        yield


def _multiply_as_it_is(layer: Any, remove_weight: bool) -> None:
    """Multiply with a layer's weight on a CPU; vLLM would multiply with a copy of it that is laid out otherwise."""
    layer.cpu_linear = torch.nn.functional.linear
