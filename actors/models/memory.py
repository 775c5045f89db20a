"""Estimate of a run's memory, by part, before anything is loaded.

The model is built from config.json with tensors without values (torch's FakeTensorMode). So numbers of parameters are
exact, and the bytes that a forward pass of a row keeps for the backward pass are counted, for any architecture. Memory
that only a real step shows (allocators, scratch memory of kernels) is not included.
"""

import math
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actors.models import loading, plans
from actors.models.attention import pack_row
from actors.models.kv_size import kv_bytes_per_token
from actors.models.logprobs import CHUNK_BYTES
from actors.models.recomputation import KeptResults
from actors.models.skeleton import skeleton
from actors.models.vision.parts import vision_part
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.config.optimizers import AdamW8bitConfig, MuonConfig
from schemas.config.trainer import TrainerConfig

BLOCK = 64
"""Number of weights that share a scale in NF4."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one trainer rank, and of one inference process with an embedded engine (otherwise 0)."""

    weights: int
    """Weights of the policy; trained weights are float32."""
    vision: int
    """Frozen parts of vision tower and projector of a vision-language model, whole on each rank; a rounded copy too, if
    the trained weights have one."""
    rounded_weights: int
    """Copy of the trained weights in bfloat16, for the computation: full training with that model.dtype, no shards."""
    adapter: int
    gradients: int
    """Float32 gradients, and beside masters the 16-bit gradient of the largest weight."""
    optimizer: int
    """State of the optimizer, present from the first step on."""
    gathered: int
    """Weights held whole by a rank during computation with trainer.sharding fsdp: embeddings and two layers."""
    activations: int
    """Tensors kept for the backward pass of a row of packer.sequence_len tokens, and gradients inside a layer."""
    output_layer: int
    """A chunk of logits with its gradient, a second gradient of a trained output layer, and with `model.head_dtype`
    float32 a copy of its weights."""
    reference: int
    teacher: int
    published: int
    """Weights being sent or written, on the CPU; with the channel rendezvous `weights.keep` copies and a new one."""
    published_on_device: int
    """The same with the channel device, where the copies are on rank 0's device, also of what is just gathered."""
    checkpoint: int
    """Copies of weights and optimizer state while a checkpoint is written, on the CPU."""
    engine_weights: int
    engine_received: int
    """Copy of the newest weights on the engine's device, with the channel device."""
    engine_kv_cache: int
    """Keys and values of `max_sequences` completions with `max_sequence_len` tokens each."""

    @property
    def trainer(self) -> int:
        """Bytes of a rank, without copies on the CPU."""
        apart = ("published", "checkpoint", "engine_weights", "engine_received", "engine_kv_cache")
        return sum(value for name, value in self.as_dict().items() if name not in apart)

    @property
    def resting_trainer(self) -> int:
        """Bytes of a rank between two steps, when it has given back what only a step needs."""
        return self.trainer - self.activations - self.output_layer

    def table(self) -> str:
        """Return a table for people: a line per non-empty part, then sums."""
        rows = [(f.name.replace("_", " "), value) for f in fields(self) if (value := getattr(self, f.name))]
        sums = {"one trainer rank": self.trainer, "its copies on the CPU": self.published + self.checkpoint}
        if self.engine_weights:
            sums["one inference process"] = self.engine_weights + self.engine_received + self.engine_kv_cache
        lines = [f"{name:<24}{value / 2**20:>12,.1f} MiB" for name, value in chain(rows, sums.items())]
        return "\n".join([*lines[: len(rows)], "-" * 40, *lines[len(rows) :]])

    def as_dict(self) -> dict[str, int]:
        """Return bytes by part."""
        return asdict(self)


@dataclass(frozen=True)
class _Counted:
    """Bytes of the policy's parts."""

    frozen: int
    vision: int
    exact_vision: int
    adapter: int
    trained_bytes: int
    rounded_weights: int
    rounded_gradient: int
    states: int
    head_gradient: int
    head_copy: int
    gathered: int
    activations: int


def estimate(config: RunConfig) -> MemoryEstimate:
    """Return the estimate for a run, from the configuration and the models' config.json.

    Raises:
        ConfigError: a model's config.json can't be read.
    """
    model, trainer = config.model, config.trainer
    policy = _counted(model, trainer, config.packer.sequence_len)
    base = parameter_bytes(model)
    on_cpu = not torch.cuda.is_available() or model.device == "cpu"
    published = policy.adapter or base  # without LoRA all weights are published
    channel, num_copies = config.weights.channel, config.weights.keep + 1
    has_second = trainer.reference is not None and model.lora is None
    moves, exact = trainer.reference is not None and trainer.reference.sync is not None, 0
    if moves:
        # a reference that moves is kept in float32, beside the one that computes unless that is float32 itself
        in_float32 = parameter_bytes(model.model_copy(update={"dtype": "float32"}))
        exact = in_float32 if model.dtype != "float32" else 0
    # a teacher is loaded like the policy, but never quantised
    is_here = trainer.teacher is not None and trainer.teacher_server is None
    taught = trainer.teacher.model_dump() | {"quantization": None} if trainer.teacher and is_here else {}
    taught |= dict.fromkeys(model.trained_vision if taught else (), False)
    teacher = model.model_copy(update=taught)
    engine = config.inference.engine
    shards = trainer.num_ranks if trainer.sharding == "fsdp" else 1
    # a checkpoint of full training is the whole model
    saved_vision = 0 if model.lora else policy.exact_vision or policy.vision
    kv_cache = 0
    if engine.cached_tokens:
        text, item_bytes = loading.described(model).get_text_config(), loading.TORCH_DTYPES[model.dtype].itemsize
        kv_cache = engine.cached_tokens * kv_bytes_per_token(text.to_dict(), item_bytes)
    return MemoryEstimate(
        weights=(policy.frozen + policy.trained_bytes - policy.adapter) // shards,
        vision=policy.vision + (policy.exact_vision if shards == 1 else 0),
        rounded_weights=policy.rounded_weights if shards == 1 else 0,
        adapter=policy.adapter // shards,
        gradients=policy.trained_bytes // shards + (policy.rounded_gradient if shards == 1 else 0),
        optimizer=policy.states // shards,
        gathered=policy.gathered if shards > 1 else 0,
        activations=policy.activations,
        output_layer=3 * CHUNK_BYTES["cpu" if on_cpu else "cuda"] + policy.head_gradient + policy.head_copy,
        reference=base + exact if has_second else 0,
        teacher=parameter_bytes(teacher, "trainer.teacher.path") if taught else 0,
        published=0 if channel == "device" else published * (1 if channel == "filesystem" else num_copies),
        # and what is gathered or rounded before it is copied
        published_on_device=published * (num_copies + 1) if channel == "device" else 0,
        checkpoint=policy.trained_bytes + policy.states + saved_vision + (exact or base) * moves,
        engine_weights=(0 if config.up.share_base else base) + policy.adapter
        if engine.loads_model and not engine.has_server
        else 0,
        engine_received=published if channel == "device" else 0,
        engine_kv_cache=kv_cache,
    )


def _counted(config: ModelConfig, trainer: TrainerConfig, sequence_len: int) -> _Counted:
    dtype = loading.TORCH_DTYPES[config.dtype]
    model = skeleton(config)
    has_masters = config.lora is None and dtype is not torch.float32
    tower = vision_part(model)
    seeing = list(tower.parameters()) if tower is not None else []
    in_vision = sum(p.numel() for p in seeing)
    if config.lora is None:
        seeing = [p for p in seeing if not p.requires_grad]
    vision = sum(map(_bytes, seeing))
    language = _base_bytes(model, config) - vision
    if config.lora:
        model = loading.add_lora(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    head = model.get_output_embeddings().weight
    # in numbers, since all of them are gathered in the precision of computation, adapters too
    layers = loading.layers_of(model)
    outer = sum(p.numel() for p in model.parameters()) - in_vision
    outer -= sum(p.numel() for layer in layers for p in layer.parameters())
    inner = [_gathered_numbers(layer, _divisors(model, trainer)) for layer in layers[:2]]
    # a rank has a part of each row's tokens, and in attention a part of the heads
    num_tokens = -(-sequence_len // trainer.ranks_per_row)
    width = model.config.get_text_config().hidden_size
    return _Counted(
        gathered=(outer + sum(inner)) * dtype.itemsize,  # fsdp gathers a layer while the layer before is computed
        frozen=language if config.lora else 0,
        vision=vision,
        exact_vision=sum(map(_trained_bytes, seeing)) if has_masters else 0,
        adapter=sum(map(_trained_bytes, trained)) if config.lora else 0,
        trained_bytes=sum(map(_trained_bytes, trained)),
        rounded_weights=sum(map(_bytes, trained)) if has_masters else 0,
        rounded_gradient=max(map(_bytes, trained)) if has_masters else 0,
        states=_state_bytes(model, trained, trainer),
        head_gradient=_trained_bytes(head) if head.requires_grad else 0,
        head_copy=_trained_bytes(head) if config.has_exact_head else 0,
        # last: it replaces the model's parameters
        activations=_kept_bytes(
            model, num_tokens, torch.float32 if has_masters else dtype, config.gradient_checkpointing
        )
        # with tensor_parallel, the inputs of attention and MLP are kept for all tokens
        + (trainer.tensor_parallel > 1)
        * (2 * (1 if config.gradient_checkpointing else len(layers)) * (sequence_len - num_tokens) * width)
        * dtype.itemsize,
    )


def _divisors(model: Any, trainer: TrainerConfig) -> dict[nn.Module, int]:
    """Return the number of ranks that compute with different parts of a module's weights, where it is not 1."""
    cut = {m: s for m, s in plans.styles(model, "tp_plan").items() if s in (plans.COLWISE, plans.ROWWISE)}
    dispatched = {m: s for m, s in plans.styles(model, "ep_plan").items() if s == plans.DISPATCHED}
    return dict.fromkeys(cut, trainer.tensor_parallel) | dict.fromkeys(dispatched, trainer.expert_parallel)


def _gathered_numbers(layer: nn.Module, divisors: dict[nn.Module, int]) -> int:
    """Return how many weights of a layer a rank gathers for its computation."""
    whole = sum(p.numel() for p in layer.parameters())
    for module in layer.modules():
        size = sum(p.numel() for p in module.parameters())
        whole -= size - size // divisors.get(module, 1)
    return whole


def parameter_bytes(config: ModelConfig, key: str = "model.path") -> int:
    """Return the bytes of an untrained model, in the configured `dtype` or quantised."""
    return _base_bytes(skeleton(config, key), config)


def _base_bytes(model: Any, config: ModelConfig) -> int:
    """Return the bytes of a base model.

    In NF4, linear layers except the output layer and those of a vision tower have four bits per weight, and a scale per
    block: one byte and a scale per 256 blocks with double quantisation, otherwise float32.
    """
    if config.quantization is None:
        return sum(map(_bytes, model.parameters()))
    head = model.get_output_embeddings()
    tower = vision_part(model)
    kept = {head, *(tower.modules() if tower is not None else ())}
    linear = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear) and m not in kept}
    scale = (1 + 4 / 256 if config.quantization.double_quant else 4) / BLOCK
    rest = sum(_bytes(p) for p in model.parameters() if id(p) not in linear)
    return rest + math.ceil(sum(p.numel() for p in linear.values()) * (0.5 + scale))


def _as_on_cpu(model: nn.Module) -> nn.Module:
    """Replace a model's tensors on the device meta by fake tensors on the CPU, so that CPU kernels are chosen."""
    # by id: a tied weight stays a single tensor, and counts once
    made: dict[int, Any] = {}

    def exchanged(tensor: Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)] if tensor is not None else None

    for module in model.modules():
        module._parameters = {name: exchanged(p) for name, p in module._parameters.items()}
        module._buffers = {name: exchanged(b) for name, b in module._buffers.items()}
    return model


class _ExpertsInAnyPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of experts' matrices without values. Torch knows their shapes in bfloat16 alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or make the result of such a product."""
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def _kept_bytes(model: Any, num_tokens: int, autocast: torch.dtype, checkpointing: bool | str) -> int:
    """Return the bytes kept by the layers for a row, and the gradients inside a layer during a backward pass.

    Args:
        autocast: precision of the computation; float32: that of the weights.
        checkpointing: `model.gradient_checkpointing`.
    """
    kept: dict[int, int] = {}
    with FakeTensorMode():
        model = _as_on_cpu(model)
        # by the storage's own address: fake tensors have no data, so no data_ptr
        parameters = {p.untyped_storage()._cdata for p in chain(model.parameters(), model.buffers())}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            # views of a storage count once, and weights are counted elsewhere
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        ends = np.array([0, num_tokens])
        row = pack_row(np.zeros(num_tokens, np.int32), ends, np.array([1]), [0], torch.device("cpu"))
        body = model.get_decoder()
        results = KeptResults()
        with (
            _ExpertsInAnyPrecision(),  # type: ignore[no-untyped-call]
            torch.autocast("cpu", autocast, enabled=autocast is not torch.float32),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
            results,
        ):
            output = body(**row.forward_arguments()).last_hidden_state
        # the model's output is as large as the input of each layer
        total, between = sum(kept.values()), int(output.untyped_storage().nbytes())
    num_layers = int(body.config.get_text_config().num_hidden_layers)
    one_layer = total // num_layers
    # besides, the layer in its backward pass holds gradients or, with checkpointing, its recomputed tensors
    if not checkpointing:
        return total + one_layer
    return num_layers * between + one_layer + (results.num_bytes if checkpointing == "selective" else 0)


def _state_bytes(model: Any, trained: list[nn.Parameter], trainer: TrainerConfig) -> int:
    """Return the bytes of the optimizer's state, on all ranks together if it is spread.

    Adam: two float32 numbers per trained weight; in 8 bits with a scale for each block, small tensors in float32.
    Muon: one number per weight of a matrix.
    """
    config = trainer.optimizer
    if isinstance(config, AdamW8bitConfig):
        # of a weight whose rows are cut (Megatron), a part of a row needs whole blocks
        rows = None if trainer.sharding == "none" else 256 * trainer.tensor_parallel
        return sum(2 * _bytes_in_8_bits(weight, rows) for weight in trained)
    orthogonal = isinstance(config, MuonConfig)
    # Muon leaves embeddings and the output layer to Adam
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    outside.add(id(model.get_output_embeddings().weight))
    return sum(_trained_bytes(p) * (1 if orthogonal and p.ndim == 2 and id(p) not in outside else 2) for p in trained)


def _bytes_in_8_bits(weight: Tensor, rows: int | None) -> int:
    """Return the bytes of one of AdamW's moments: a byte per number, and a float32 per block of 256.

    Args:
        weight: the whole weight.
        rows: divisor of the rows of weights with blocks (actors/learner/optimizer_states.py); None: all large ones.
    """
    count = weight.numel()
    has_blocks = count >= 4096 and (rows is None or (weight.ndim > 1 and weight.shape[-1] % rows == 0))
    return count + 4 * -(-count // 256) if has_blocks else 4 * count


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _trained_bytes(tensor: Tensor) -> int:
    """Return the bytes of a weight, or of its gradient, in float32: the precision of all that is trained."""
    return tensor.numel() * torch.float32.itemsize
