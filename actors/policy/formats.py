"""The policy as others read it: published versions, and checkpoints in the formats of transformers and peft."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.policy import loading
from actors.policy.attention import PADDED
from actors.policy.shards import gathered
from actors.policy.snapshots import Snapshot, copied
from bus.weights import Weights
from schemas.config.model import ModelConfig


def weights(model: nn.Module, config: ModelConfig, keep: bool = True) -> Weights:
    """The adapter, or all weights in `model.dtype`, on the CPU.

    Args:
        model: of this rank.
        config: of it.
        keep: whether this rank is the one that publishes; of weights that are spread over ranks each tells its part.
    """
    if config.lora is None:
        return Weights("full", _published(_gathered(model, config, keep), loading.TORCH_DTYPES[config.dtype]))
    tensors = _published(_gathered(model, config, keep), torch.float32)
    return Weights("adapter", tensors, {"adapter_config.json": _adapter_config(model)})


def snapshot(model: nn.Module, config: ModelConfig, keep: bool = True) -> Snapshot:
    """A folder that loads with transformers (full) or peft (LoRA) alone; `keep` as above."""
    tensors = copied(_gathered(model, config, keep))
    if config.lora is not None:
        texts = {"adapter_config.json": _adapter_config(model).encode()}
        return Snapshot({"adapter_model.safetensors": tensors}, texts)
    saver: Any = model

    def write_model(folder: Path) -> None:
        saver.save_pretrained(folder, state_dict=tensors)

    return Snapshot(texts=loading.tokenizer_files(config.path), write_model=write_model)


def restore(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """What a snapshot wrote, in place."""
    from safetensors.torch import load_file

    if config.lora is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        loading.copy_into(loading.adapter_tensors(model), tensors, str(folder))
    else:
        saved = loading.load_model(config, torch.float32, attention=PADDED, path=str(folder))
        loading.copy_into(loading.full_tensors(model), loading.full_tensors(saved), str(folder))


def _gathered(model: nn.Module, config: ModelConfig, keep: bool) -> Iterator[tuple[str, Tensor]]:
    named = loading.full_tensors(model) if config.lora is None else loading.adapter_tensors(model)
    return gathered(named.items(), keep)


def _adapter_config(model: Any) -> str:
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))


def _published(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors
    }
