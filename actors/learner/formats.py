"""Public formats of the policy: published versions, and checkpoints in the formats of transformers and peft."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.learner.host_copies import cast, host_copies
from actors.learner.saved_tensors import SavedTensors
from actors.learner.shards import gathered, overwrite
from actors.learner.snapshots import Snapshot, copied
from actors.models import loading
from actors.models.attention import PADDED
from actors.models.file_names import file_names
from actors.process.tasks import task
from bus.weights import Weights
from schemas.config.model import LoraConfig, ModelConfig


def weights(model: nn.Module, config: ModelConfig, keep: bool = True, on_host: bool = True) -> Weights:
    """Return the adapter in float32, or all weights in `model.dtype`.

    Args:
        model: model of this rank.
        config: configuration of the model.
        keep: True on the publishing rank. Each rank must call, to lend parts of weights spread over ranks.
        on_host: True for copies on the CPU. False: tensors on the model's device, which the next step changes.
    """
    dtype = loading.TORCH_DTYPES[config.dtype] if config.lora is None else torch.float32  # as trained
    named = _gathered(model, config, keep)
    if config.lora is None:
        # behind the gather: parts of a spread tensor have no views
        named = file_names(model).views(named)
    tensors = host_copies(named, dtype) if on_host else cast(named, dtype)
    if config.lora is None:
        return Weights("full", tensors)
    return Weights("adapter", tensors, {"adapter_config.json": _adapter_config(model, config.lora)})


def snapshot(model: nn.Module, config: ModelConfig, keep: bool = True) -> Snapshot:
    """Return the contents of a folder for transformers (full) or peft (LoRA) to load without this package.

    Args:
        model: model of this rank.
        config: configuration of the model.
        keep: True on the saving rank. Each rank must call, to lend parts of weights spread over ranks.
    """
    tensors = copied(_gathered(model, config, keep))
    if config.lora is not None:
        texts = loading.tokenizer_files(config) | {"adapter_config.json": _adapter_config(model).encode()}
        return Snapshot({"adapter_model.safetensors": tensors}, texts)
    saver: Any = model

    # called later, in another thread: state_dict makes transformers write the copies, not the weights by then
    def write_model(folder: Path) -> None:
        saver.save_pretrained(folder, state_dict=tensors)

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Snapshot(texts=loading.tokenizer_files(config), write_model=write_model, model_bytes=num_bytes)


def restore(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Restore a model in place from a folder written by a snapshot.

    Tensors are read and copied one at a time: a second whole model may not fit on the device.

    Raises:
        ValueError: the tensors are not the model's. Nothing has been overwritten.
        ConfigError: the folder can't be loaded.
    """
    targets = loading.full_tensors(model) if config.lora is None else loading.adapter_tensors(model)
    with ExitStack() as stack:
        saved = SavedTensors(stack, folder)
        if config.lora is None and saved.keys() != targets.keys():
            # transformers writes some architectures under other names than the model's, and reads them back
            loaded = loading.load_model(
                config.model_copy(update={"device": "cpu"}), torch.float32, attention=PADDED, path=str(folder)
            )
            values: Mapping[str, Tensor] = loading.full_tensors(loaded)
            shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
        else:
            values, shapes = saved, saved.shapes
        loading.check_alike(targets, shapes, str(folder))
        with torch.no_grad(), task("restore model", len(targets), "tensors") as restoring:
            for name, target in targets.items():
                overwrite(target, values[name])
                restoring.advance()


def _gathered(model: nn.Module, config: ModelConfig, keep: bool) -> Iterator[tuple[str, Tensor]]:
    named = loading.full_tensors(model) if config.lora is None else loading.adapter_tensors(model)
    return gathered(named.items(), keep)


def _adapter_config(model: Any, published: LoraConfig | None = None) -> str:
    """Return peft's configuration of the adapter, as JSON.

    Args:
        model: model with the adapter.
        published: the adapter's keys, for engines: some know no rank-stabilised scale, and no expression in place of
            names, so both are written out. None: as peft saves adapters.
    """
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    if published is not None and published.rslora:
        settings |= {"use_rslora": False, "lora_alpha": published.scale * published.rank}
    if published is not None and isinstance(settings["target_modules"], str):
        settings |= {"target_modules": sorted({name.rpartition(".")[2] for name in model.targeted_module_names})}
    return json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
