"""Loading a Hugging Face causal LM, with or without LoRA, for the trainer and the embedded engine alike."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from actors.policy.attention import implementation
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError

NF4_BLOCK = 64
"""Weights that share a scale."""
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
PEFT_PREFIX = "base_model.model."
"""Before the names of a model's own parameters, once it has an adapter."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(config: ModelConfig) -> torch.device:
    """The configured device; `auto` is the GPU when there is one.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("model.device: cuda, but torch sees no GPU here; use cpu or auto")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    attention: str | None = None,
    path: str | None = None,
    key: str = "model.path",
) -> nn.Module:
    """The base model in one precision, on its device.

    Args:
        config: of the model.
        dtype: of its weights.
        attention: a name of transformers' AttentionInterface; without one, what `model.attention` says.
        path: of other weights of this model.
        key: where the configuration names the model.

    Raises:
        ConfigError: the model can't be loaded; says why.
    """
    device, quantized = device_of(config), config.quantization is not None
    kernel = attention or implementation(config, device)
    extra = {"quantization_config": _quantization(config), "device_map": {"": device}} if quantized else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path or config.path,
            dtype=dtype,
            attn_implementation=kernel,
            trust_remote_code=config.trust_remote_code,
            **extra,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {config.path} can't be loaded: {str(error).splitlines()[0]}") from error
    problem = _unpackable(model)
    if problem:
        raise ConfigError(f"{key}: {config.path} ({type(model).__name__}) {problem}")
    if quantized:
        _compute_alike(model, device)
        return model  # type: ignore[no-any-return]
    return model.to(device)  # type: ignore[no-any-return]


def _quantization(config: ModelConfig) -> Any:
    """What transformers needs to quantise a model while it loads it.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig

    missing = [name for name in ("accelerate", "bitsandbytes") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"model.quantization: needs {' and '.join(missing)}; install grpo-actors[bnb]")
    assert config.quantization is not None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization.type,
        bnb_4bit_use_double_quant=config.quantization.double_quant,
        bnb_4bit_compute_dtype=TORCH_DTYPES[config.dtype],
    )


def _compute_alike(model: nn.Module, device: torch.device) -> None:
    """Have quantised layers compute in eval mode, thus in the engine, as they do in training.

    On CPUs with bfloat16 they would pack their weights anew at the first forward in eval mode, for a kernel that rounds
    otherwise and through which, once they train on, no gradient comes.

    Raises:
        ConfigError: a layer that bitsandbytes (0.50) gives the scales of other rows on a CPU.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for name, layer in layers:
        layer.support_avx512bf16_for_cpu = False
        if device.type == "cpu" and layer.in_features % NF4_BLOCK:
            raise ConfigError(
                f"model.quantization: {name} has {layer.in_features} inputs, and on a CPU bitsandbytes computes "
                f"rightly with multiples of {NF4_BLOCK} only; use a GPU (model.device), or no quantization"
            )


def _unpackable(model: Any) -> str:
    """Why the samples of a packed row would see each other, or attention be another than the model's; else ""."""
    if not model._supports_attention_backend:
        return "has attention of its own, which can't be replaced; packing needs transformers' AttentionInterface"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    if model._is_stateful or kinds:
        return f"has layers that carry state from token to token or attend in their own way {sorted(kinds)}"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "has attention sinks, which the packed attention does not compute"
    return ""


def checkpoint_gradients(model: nn.Module, config: ModelConfig) -> None:
    """Have each layer keep its input alone, and compute the rest again in the backward pass.

    Raises:
        ConfigError: its layers can't.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing: {config.path}: {str(error).splitlines()[0]}") from error


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of its decoder, as transformers names what must stay together."""
    names = set(getattr(model.get_decoder(), "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: nn.Module) -> None:
    """Have torch compile each layer at its first forward, for rows of any length: all layers share the result.

    Raises:
        ConfigError: there is no compiler for what it generates.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"model.compile: needs a C++ compiler, and {compiler} is not installed; CXX names another")
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def add_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """The model with a fresh adapter (peft); only the adapter is trainable.

    Raises:
        ConfigError: peft is not installed, or a target module does not exist.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora: needs peft; install grpo-actors[lora]") from None
    targets = config.target_modules
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors under the names that a PEFT file has."""
    import peft

    # embeddings are not trained; by default peft asks the hub whether they were, each time
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All weights by their Hugging Face names; a tied one once, under its first name, which its file has too."""
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():  # else each name would have a tensor of its own
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def copy_into(targets: dict[str, Tensor], tensors: dict[str, Tensor], what: str) -> None:
    """Overwrite weights in place.

    Raises:
        ValueError: names or shapes differ; says which. Nothing has been overwritten then.
    """
    if targets.keys() != tensors.keys():
        missing, extra = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
        raise ValueError(f"{what}: the tensors differ from the model's: missing {missing[:3]}, unknown {extra[:3]}")
    wrong = [name for name, tensor in tensors.items() if tensor.shape != targets[name].shape]
    if wrong:
        raise ValueError(
            f"{what}: {wrong[0]} has shape {tuple(tensors[wrong[0]].shape)}, "
            f"the model has {tuple(targets[wrong[0]].shape)}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def tokenizer_files(path: str) -> dict[str, bytes]:
    """The tokenizer's files of a model directory, to be put beside its checkpoints; empty for a model by name."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "added_tokens.json",
    )
    folder = Path(path)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
