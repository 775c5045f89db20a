"""Names of weights in the files of a model, where transformers names or joins them otherwise in memory.

Transformers keeps the experts of a layer in two tensors of three axes; files have three matrices for each expert, and
so have engines. Published weights have the names of files. Nothing is copied: each matrix is a view.

    in memory                      in files
    …mlp.experts.gate_up_proj      …mlp.experts.0.gate_proj.weight, …mlp.experts.0.up_proj.weight, …experts.1…
    …mlp.experts.down_proj         …mlp.experts.0.down_proj.weight, …
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from schemas.errors import ConfigError


class FileNames:
    """Names of a model's weights in its files.

    Args:
        model: model of transformers, as loaded.

    Raises:
        ConfigError: transformers joins weights of this model in a way that is not known here.
    """

    def __init__(self, model: Any) -> None:
        forward = [
            one for one in get_model_conversion_mapping(model, add_legacy=False) if type(one) is not PrefixChange
        ]
        # models with renamed weights alone are published under the names in memory, which engines take
        has_converters = any(isinstance(one, WeightConverter) for one in forward)
        backward = [one.reverse_transform() for one in reversed(forward)] if has_converters else []
        self._renamings: list[Any] = [one for one in backward if isinstance(one, WeightRenaming)]
        self._converters: list[Any] = [one for one in backward if isinstance(one, WeightConverter)]
        for converter in self._converters:
            unknown = [type(one).__name__ for one in converter.operations if not _has_view(one)]
            if unknown:
                raise ConfigError(
                    f"model.path: weights of {type(model).__name__} are published in parts, and {', '.join(unknown)} "
                    "can't be undone without a copy; train an adapter (model.lora)"
                )

    def views(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors under the names of files, in order; joined ones as views of their parts."""
        by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        for name, tensor in tensors:
            if not self._converters:
                yield name, tensor
                continue
            renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
            if pattern is None:
                yield renamed, tensor
                continue
            converter = by_pattern[pattern]
            before, first, after = renamed.partition(converter.target_patterns[0])
            assert first, f"{renamed} has no part {converter.target_patterns[0]}"
            parts = {first: tensor}
            for operation in converter.operations:
                parts = _VIEWS[type(operation)](operation, parts, converter.target_patterns)
            for part, view in parts.items():
                yield f"{before}{part}{after}", view


def _has_view(operation: Any) -> bool:
    # chunks whose number is in the configuration have one pattern for all of them
    return type(operation) in _VIEWS and getattr(operation, "num_shards_attribute", None) is None


def _chunks(operation: Any, parts: Mapping[str, Tensor], targets: list[str]) -> dict[str, Tensor]:
    (tensor,) = parts.values()
    return dict(zip(targets, tensor.chunk(len(targets), operation.dim), strict=True))


def _split(operation: Any, parts: Mapping[str, Tensor], targets: list[str]) -> dict[str, Tensor]:
    # expert by expert, as files have them
    number = next(iter(parts.values())).shape[operation.dim]
    return {
        pattern.replace("*", str(i)): tensor.select(operation.dim, i)
        for i in range(number)
        for pattern, tensor in parts.items()
    }


def _transposed(operation: Any, parts: Mapping[str, Tensor], targets: list[str]) -> dict[str, Tensor]:
    return {pattern: tensor.transpose(operation.dim0, operation.dim1) for pattern, tensor in parts.items()}


_VIEWS: dict[Any, Any] = {Chunk: _chunks, SplitModulelist: _split, Transpose: _transposed}
"""Operations of transformers, as views."""


def file_names(model: nn.Module) -> FileNames:
    """Return the names of a model's weights in its files; found once for a model."""
    if model not in _known:
        _known[model] = FileNames(model)
    return _known[model]


_known: "WeakKeyDictionary[nn.Module, FileNames]" = WeakKeyDictionary()
