"""Loading of a Hugging Face language model, with or without LoRA, for the trainer and the embedded engine alike."""

import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_files

from actors.models import choices, recomputation
from actors.models.attention import implementation
from actors.models.lora_forward import replace_forward
from actors.models.quantized.loading import with_codes
from actors.models.quantized.scheme import read_scheme
from actors.models.vision.parts import (
    IN_VISION,
    VISION,
    attention_by_part,
    auto_class,
    check_adapted,
    freeze_vision,
    frozen_in_vision,
    is_vision_language,
)
from actors.process.library_bars import bars_for
from actors.process.tasks import Task, task
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

NF4_BLOCK = 64
"""Number of weights that share a scale in NF4."""
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers computed by the packed attention."""
PEFT_PREFIX = "base_model.model."
"""Prefix of the model's own parameter names once the model has an adapter."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Precisions by their names in safetensors files. float32 holds each of their values exactly."""


def device_of(config: ModelConfig) -> torch.device:
    """Return the configured device; `auto` is the GPU if there is one.

    Raises:
        ConfigError: `cuda` is configured, but torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("model.device: cuda, but torch sees no GPU here; use cpu or auto")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def on_gpu(config: ModelConfig) -> bool:
    """Return whether the model is computed on a GPU, also if this machine has none for it."""
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    attention: str | None = None,
    path: str | None = None,
    key: str = "model.path",
) -> nn.Module:
    """Load the base model in a single precision, on the configured device. Frozen parts get no gradients.

    Args:
        config: configuration of the model.
        dtype: precision of the weights.
        attention: name in transformers' AttentionInterface; by default as `model.attention` says.
        path: other weights of the same model; by default `config.path`.
        key: configuration key of the model, for errors.

    Raises:
        ConfigError: the model can't be loaded; with the reason.
    """
    device, quantized = device_of(config), config.quantization is not None
    # whatever the device: a rank that shares its model with others loads it in host memory, and moves it
    _choose_kernels()
    kernel = attention or implementation(config, device)
    found = described(config, key, path)
    # quantised on the device itself
    extra = {"quantization_config": _quantization(config, found), "device_map": {"": device}} if quantized else {}
    if scheme := read_scheme(getattr(found, "quantization_config", None), key):
        extra["config"] = with_codes(found, scheme)
    try:
        with task(f"load model {Path(path or config.path).name}") as loading, _told_to(loading) as told:
            model = auto_class(found).from_pretrained(
                path or config.path,
                dtype=dtype,
                attn_implementation=attention_by_part(found, kernel),
                trust_remote_code=config.trust_remote_code,
                **extra,
                **told,
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {config.path} can't be loaded: {str(error).splitlines()[0]}") from error
    problem = _unpackable(model)
    if problem:
        raise ConfigError(f"{key}: {config.path} ({type(model).__name__}) {problem}")
    freeze_vision(model, config)
    if quantized:
        _compute_alike(model, device)
        return model  # type: ignore[no-any-return]
    return model.to(device)  # type: ignore[no-any-return]


def described(config: ModelConfig, key: str = "model.path", path: str | None = None) -> Any:
    """Return a model's config.json, as an object of transformers.

    Args:
        config: configuration of the model.
        key: configuration key of the model, for errors.
        path: folder of other weights of the same model; by default `config.path`.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        return AutoConfig.from_pretrained(path or config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {config.path} can't be loaded: {str(error).splitlines()[0]}") from error


@contextmanager
def _told_to(loading: Task) -> Iterator[dict[str, Any]]:
    """Tell a task of transformers' progress in the block: the tensors loaded, and the bytes downloaded before.

    Yields:
        Arguments for `from_pretrained`. Releases of transformers without them load without progress.
    """
    bars = bars_for(loading)
    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None or "tqdm_class" not in inspect.signature(cached_files).parameters:
        yield {}
        return
    before = set_hook(lambda _, args, kwargs: bars(*args, **{"unit": "tensors"} | kwargs))
    try:
        yield {"tqdm_class": bars}
    finally:
        set_hook(before or _undrawn)


def _undrawn(factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a bar of transformers that is not drawn, since a log would have its control characters."""
    return factory(*args, **{**kwargs, "disable": True})


def stored_dtype(path: str) -> torch.dtype | None:
    """Return the precision of all weights in a model's files; None if it is not one alone, or not known yet.

    In this precision transformers maps the files into memory: weights on the CPU take no memory of this process until
    they are changed.

    Args:
        path: a model folder, or a name on the hub, which is looked up among the files downloaded already.
    """
    # imported here: only ranks that share a model ask
    from safetensors import SafetensorError, safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    found = [
        cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
                    _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    ]  # fmt: skip
    kinds: set[str] = set()
    for folder in {Path(name).parent for name in found if name is not None}:
        for file in folder.glob("*.safetensors"):
            try:
                with safe_open(file, "pt") as opened:
                    kinds |= {str(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118
            except SafetensorError:
                return None  # `load_model` tells what is wrong
    return FILE_DTYPES.get(kinds.pop()) if len(kinds) == 1 else None


def _choose_kernels() -> None:
    """Choose among torch's kernels for GPUs: none that plans for each new length, no sums in 16 bits."""
    # cuDNN's attention builds a plan of 20 ms and more for each (batch, length), and lengths grow with every token
    torch.backends.cuda.enable_cudnn_sdp(False)
    # else long products may be added up in bfloat16, in an order that depends on the number of rows
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _quantization(config: ModelConfig, described: Any) -> Any:
    """Return the settings with which transformers quantises a model during loading.

    Args:
        config: configuration of the model.
        described: contents of the model's config.json.

    Raises:
        ConfigError: a package (accelerate, bitsandbytes) is not installed.
    """
    from transformers import BitsAndBytesConfig

    # transformers reports one missing package at a time
    missing = [name for name in ("accelerate", "bitsandbytes") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"model.quantization: needs {' and '.join(missing)}; install grpo-actors[bnb]")
    assert config.quantization is not None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization.type,
        bnb_4bit_use_double_quant=config.quantization.double_quant,
        bnb_4bit_compute_dtype=TORCH_DTYPES[config.dtype],
        # names from the start, in place of transformers' own list, which has the output layer
        llm_int8_skip_modules=[f"model.{VISION}", "lm_head"] if is_vision_language(described) else None,
    )


def _compute_alike(model: nn.Module, device: torch.device) -> None:
    """Make quantised layers compute the same in eval mode, thus in the engine, as in training.

    On CPUs with bfloat16 the layers would repack their weights at the first forward in eval mode, for a kernel with
    other rounding. If training continued with these weights, no gradient would pass through the kernel.

    Raises:
        ConfigError: a layer for which bitsandbytes (0.50) uses the scales of other rows on a CPU.
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
    """Return the reason why packed rows would be computed wrongly; empty if there is none.

    Samples of a row would see each other, or attention would differ from the model's.
    """
    if not model._supports_attention_backend:
        return "has attention of its own, which can't be replaced; packing needs transformers' AttentionInterface"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - PACKABLE_LAYERS
    # a state of linear attention, for example, would pass from a sample of the row to the next
    if model._is_stateful or kinds:
        return f"has layers that carry state from token to token or attend in their own way {sorted(kinds)}"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "has attention sinks, which the packed attention does not compute"
    return ""


def switch_off_dropout(model: nn.Module) -> None:
    """Set all dropout of a base model to 0. The model's config, which checkpoints contain, keeps its values.

    Eval mode is no way: gradient checkpointing works only in training mode. Attention, and layers that call a function
    instead of a module, keep the probability as a number (`attention_dropout`, `layerdrop`).
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "layerdrop" in name):
                setattr(module, name, 0.0)


def checkpoint_gradients(model: nn.Module, config: ModelConfig) -> None:
    """Make each layer keep only its input for the backward pass, or what costs most, and recompute the rest there.

    Raises:
        ConfigError: the model's layers don't support checkpointing.
    """
    # non-reentrant: works with frozen inputs, as under LoRA
    keys: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing == "selective":
        keys["context_fn"] = recomputation.contexts
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keys)  # type: ignore[operator]
        # transformers asks for gradients of the inputs, which the reentrant variant alone needs
        model.disable_input_require_grads()  # type: ignore[operator]
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing: {config.path}: {str(error).splitlines()[0]}") from error


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of the decoder: the modules never to be split, according to transformers."""
    decoder = model.get_decoder()
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    # of the decoder alone: a vision tower has such layers too
    return [module for module in decoder.modules() if type(module).__name__ in names]


def compile_layers(model: nn.Module) -> None:
    """Make torch compile each layer at the first forward, for rows of any length. All layers share the compiled code.

    Raises:
        ConfigError: no C++ compiler is installed.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"model.compile: needs a C++ compiler, and {compiler} is not installed; CXX names another")
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def add_lora(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Return the model with a new adapter (peft), as `config.lora` says. Only the adapter is trainable.

    Raises:
        ConfigError: peft is not installed, or a module of `target_modules` or `modules_to_save` does not exist, or a
            module to save shares its weights with another.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("model.lora: needs peft; install grpo-actors[lora]") from None
    lora = config.lora
    assert lora is not None
    targets = lora.target_modules
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=frozen_in_vision(config) if is_vision_language(model.config) else None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=True if lora.init == "kaiming" else lora.init,
        modules_to_save=lora.modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    if lora.modules_to_save:
        _check_modules_to_save(model, lora.modules_to_save)
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error
    check_adapted(adapted, config)
    for parameter in adapted.parameters():
        # peft leaves modules to save in the precision of the base
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if choices.lora_forward(config, on_gpu(config)).taken == "fused":
        replace_forward(adapted)
    return adapted  # type: ignore[no-any-return]


def _check_modules_to_save(model: nn.Module, names: Sequence[str]) -> None:
    """Check that modules trained as a whole exist, and that none shares its weights with a module that stays frozen.

    Raises:
        ConfigError: a module is missing or shared, or part of the vision tower.
    """
    modules = dict(model.named_modules())
    owners: dict[int, set[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    for name in names:
        found = [path for path in modules if path == name or path.endswith(f".{name}")]
        if not found:
            raise ConfigError(f"model.lora.modules_to_save: the model has no module {name}")
        for path in found:
            if re.fullmatch(IN_VISION, path):
                raise ConfigError(
                    f"model.lora.modules_to_save: {path} sees images, and is trained by adapters or not at all; remove "
                    f"{name}"
                )
            shared = {other for p in modules[path].parameters() for other in owners[id(p)]}
            others = [other for other in shared if not f"{other}.".startswith(f"{path}.")]
            if others:
                raise ConfigError(
                    f"model.lora.modules_to_save: {path} has the weights of {others[0]} too (tied), and a copy of them "
                    f"would be trained apart; remove {name}"
                )


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors by name, as in a PEFT file."""
    import peft

    # embeddings are not trained; by default peft asks the hub whether they were, each time
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by Hugging Face name.

    A tied weight appears once, under the first name, as in the model's file.
    """
    tensors, seen = {}, set()
    # by identity of tensors: two names of one tied weight would be published and saved twice
    for name, tensor in model.state_dict(keep_vars=True).items():  # keep_vars: otherwise each name gets a new tensor
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def copy_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Overwrite weights in place: all or, after an error, none.

    Args:
        targets: the weights, by name.
        tensors: new values, by name.
        what: origin of the tensors, for errors.

    Raises:
        ValueError: names or shapes differ; with examples.
    """
    check_alike(targets, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, what)
    # in place: optimizer, sharding and compiled code hold the very tensors
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def check_alike(targets: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], what: str) -> None:
    """Check that tensors have the names and shapes of a model's.

    Args:
        targets: the model's tensors, by name.
        shapes: shapes of the other tensors, by name.
        what: origin of the other tensors, for errors.

    Raises:
        ValueError: names or shapes differ; with examples.
    """
    if targets.keys() != shapes.keys():
        missing, extra = sorted(targets.keys() - shapes.keys()), sorted(shapes.keys() - targets.keys())
        raise ValueError(f"{what}: the tensors differ from the model's: missing {missing[:3]}, unknown {extra[:3]}")
    wrong = [name for name, shape in shapes.items() if tuple(shape) != targets[name].shape]
    if wrong:
        raise ValueError(
            f"{what}: {wrong[0]} has shape {tuple(shapes[wrong[0]])}, the model has {tuple(targets[wrong[0]].shape)}"
        )


def tokenizer_files(config: ModelConfig) -> dict[str, bytes]:
    """Return the files of a model's tokenizer and image processor, for checkpoints, with the chat template of the run.

    Only the template is returned for a model on the hub.
    """
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "added_tokens.json",
        # of a model that sees images: other software reads them with the weights
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
    )
    folder = Path(config.path)
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    # transformers and vLLM read this file before the template in tokenizer_config.json
    return found | ({} if config.chat_template is None else {"chat_template.jinja": config.chat_template.encode()})
