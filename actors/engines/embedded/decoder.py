"""Model side of the embedded engine: prefill and decode over slots, and loading of weights."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.embedded import cache
from actors.models import loading
from actors.models.attention import pack_row
from actors.models.determinism import make_deterministic
from actors.models.exact_head import use_exact_head
from actors.models.file_names import file_names
from actors.models.kv_size import kv_bytes_per_token
from actors.models.positions import num_positions
from actors.models.router_replay import Routing, recording
from actors.models.shared_base import Manifest, use
from actors.models.vision.features import FeatureCache
from actors.models.vision.images import ImageReader
from actors.models.vision.parts import vision_part
from actors.models.vision.row_images import PlacedImage, RowImages, placing
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.routed import Experts

SHAPES = {"cuda": (8, 128)}
"""Multiples for the sequences and the context of a decode, by type of device. On a GPU cuDNN makes a plan for each new
shape, in 20 to 40 ms, and a context grows with each token."""


class Decoder:
    """Causal LM for next-token logits of sequences kept in slots. For use from a single thread."""

    def __init__(
        self,
        config: ModelConfig,
        limits: EmbeddedEngineConfig,
        noise: NormNoise | None = None,
        shared_base: Manifest | None = None,
        tells_experts: bool = False,
    ) -> None:
        dtype = loading.TORCH_DTYPES[config.dtype]
        self.device = loading.device_of(config)
        if limits.deterministic:
            make_deterministic(self.device)
        self.shared_base = shared_base
        """Description of the trainer's base, whose memory this model uses; None: all weights are its own."""
        # a device with a shared base has no room for a second one
        loaded_as = config if shared_base is None else config.model_copy(update={"device": "cpu"})
        self.model: nn.Module = loading.load_model(loaded_as, dtype, attention=cache.NAME)
        if shared_base is not None:
            use(self.model, shared_base)
            self.model.to(self.device)
        if config.lora is not None:
            self.model = loading.add_lora(self.model, config)
        if config.has_exact_head:
            use_exact_head(self.model)
        self._routing = Routing(self.model) if tells_experts else None
        """Sizes of the model's routing, if its choices are recorded; None: they are not."""
        self.experts_T: Experts | None = None
        """Experts of the tokens of the newest prefill or decode, if they are recorded."""
        # without dropout, which would sample from another distribution than the policy's
        self.model.eval()
        if limits.deterministic and shared_base is None:
            # moved from the mapped file into aligned memory of torch: in the file the addresses depend on the length of
            # the file's header, and a matrix that is not aligned to 16 bytes is multiplied with a single row in another
            # order, which changes the last bits of the result
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
        self._adapter = config.lora is not None
        self._dtype = dtype
        self._multiples = SHAPES.get(self.device.type, (1, 1))
        """Numbers to whose multiples the sequences and the context of a decode are filled up."""
        self._pads_single_rows = single_rows_round_otherwise(config, self.device)
        self._noise = noise
        self._clean_norms: dict[str, Tensor] = {}
        """Norms without noise, kept while noise is on the model; empty before the first noise."""
        base: Any = self.model.config
        self.sees_images = vision_part(self.model) is not None
        """Whether prompts may have images."""
        self.image_token = getattr(base, "image_token_id", None)
        """Id that stands for each token of an image; None for a model of text alone."""
        self._config = config
        self._features: FeatureCache | None = None
        """Features of images, from the first image on."""
        self.trains_vision = bool(config.trained_vision)
        """Whether new weights give an image other features."""
        # a model without a limit of its own is limited by the configuration alone
        self.max_length = min(limits.max_sequence_len, num_positions(base.to_dict()) or 1 << 30)
        # of a vision-language model the language layers'
        self.vocab_size = int(base.get_text_config().vocab_size)
        num_slots = max(limits.max_sequences, 2 if self._pads_single_rows else 1)
        self._limits, self._max_prefill_tokens = (num_slots, self.max_length), limits.max_prefill_tokens
        self.forget()

    def forget(self) -> None:
        """Replace the cache with an empty one. Results then do not depend on the growth of the old cache."""
        self._cache = cache.SlotCache(*self._limits)

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[NDArray[np.int32]],
        slots: Sequence[int],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        """Compute whole sequences into their slots; return the logits behind the last token of each, (B, V).

        Each forward takes at most `max_prefill_tokens` tokens, to bound the memory of activations; a longer sequence
        has a separate forward.

        Args:
            sequences: tokens of each sequence.
            slots: slot of each sequence.
            images: images of each sequence; empty if no sequence has any.
        """
        lengths = np.array([sequence.size for sequence in sequences])
        self._cache.reserve(max(slots) + 1, int(lengths.max()))
        logits = []
        chosen: list[Experts] = []
        for part in _parts(lengths, self._max_prefill_tokens):
            offsets = np.concatenate([[0], np.cumsum(lengths[part])])
            # each sequence is a sample of its own with an empty completion, and shares nothing
            shared = [0] * len(sequences[part])
            row = pack_row(
                np.concatenate(sequences[part]), offsets, lengths[part], shared, self.device, images=images[part]
            )
            slots_T = torch.from_numpy(np.repeat(np.asarray(slots[part]), lengths[part])).to(self.device)
            plan = cache.CachePlan(self._cache, slots_T, row.position_ids_R, 0, row)
            keep = torch.from_numpy(offsets[1:] - 1).to(self.device)
            logits.append(self._forward(row.token_ids_R, row.position_ids_R, plan, keep, row.images))
            if self.experts_T is not None:
                chosen.append(self.experts_T)
        self.experts_T = np.concatenate(chosen) if chosen else None
        return torch.cat(logits)

    @torch.inference_mode()
    def decode(
        self, tokens_B: NDArray[np.int32], positions_B: NDArray[np.int64], shifts_B: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Decode the next token of the sequences in slots 0…B−1; return the logits behind each, (B, V).

        Args:
            tokens_B: newest token of each sequence.
            positions_B: its place in the sequence.
            shifts_B: position that the model is told, less the place; see `vision.positions.position_shift`. None: 0.
        """
        shifts_B = np.zeros_like(positions_B) if shifts_B is None else shifts_B
        size = positions_B.size
        rows = min(-(-size // self._multiples[0]) * self._multiples[0], self._limits[0])
        if self._pads_single_rows:
            rows = max(2, rows)
        # further rows are computed into slots behind the running sequences, which are free
        logits_BV = self._decode(*(np.pad(x, (0, rows - size)) for x in (tokens_B, positions_B, shifts_B)))[:size]
        self.experts_T = self.experts_T[:size] if self.experts_T is not None else None
        return logits_BV

    def _decode(self, tokens_B: NDArray[Any], positions_B: NDArray[Any], shifts_B: NDArray[Any]) -> Tensor:
        multiple = self._multiples[1]
        length = min(-(-(int(positions_B.max()) + 1) // multiple) * multiple, self.max_length)
        self._cache.reserve(positions_B.size, length)
        slots_B = torch.arange(positions_B.size, device=self.device)
        plan = cache.CachePlan(self._cache, slots_B, torch.from_numpy(positions_B).to(self.device), length)
        told_B = torch.from_numpy(positions_B + shifts_B).to(self.device)
        return self._forward(torch.from_numpy(tokens_B).to(self.device), told_B, plan, slots_B)

    @torch.inference_mode()
    def place(self, start: int, digest: str, data: bytes) -> PlacedImage:
        """Return an image with its features, which are kept for other requests.

        Args:
            start: index of the image's first token in its prompt.
            digest: digest of the bytes.
            data: bytes of the file.

        Raises:
            ValueError: the bytes are no image; names the digest.
            ConfigError: the model has no image processor.
        """
        if self._features is None:
            self._features = FeatureCache(self.model, ImageReader(self._config))
        return PlacedImage(start, digest, self._features.of(digest, data))

    @torch.inference_mode()
    def move_cache(self, *, to_host: bool) -> None:
        """Move keys and values to host memory and give the device's memory back, or move them to the device again."""
        if self.device.type == "cpu":
            return
        self._cache.move(torch.device("cpu") if to_host else self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def repeat(self, slot: int, count: int, length: int) -> None:
        """Copy the first `length` keys and values of a slot to the next `count` slots."""
        self._cache.reserve(slot + 1 + count, length)
        self._cache.repeat(slot, count, length)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of the slots `sources` to the slots `targets`."""
        self._cache.copy(torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device), length)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in the cache."""
        config: Any = self.model.config
        return kv_bytes_per_token(config.to_dict(), self._dtype.itemsize)

    @property
    def version_bytes(self) -> int:
        """Bytes of the weights that a new version brings."""
        return sum(tensor.nbytes for tensor in self._targets().values())

    def free_bytes(self) -> int:
        """Return the free memory of the GPU, with what torch keeps for later."""
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def _targets(self) -> dict[str, Tensor]:
        if self._adapter:
            return loading.adapter_tensors(self.model)
        return dict(file_names(self.model).views(loading.full_tensors(self.model).items()))

    def load(self, weights: Weights, version: int) -> None:
        """Overwrite the weights, and put this version's noise on the norms if noise is configured.

        Raises:
            ValueError: the weights do not belong to this model; nothing has been overwritten.
        """
        expected = "adapter" if self._adapter else "full"
        if weights.content != expected:
            raise ValueError(
                f"the trainer publishes {weights.content} weights, this engine holds {expected}; is model.lora "
                "the same in both?"
            )
        loading.copy_into(self._targets(), weights.tensors, "published weights")
        if self.trains_vision and self._features is not None:
            self._features.forget()
        if self._noise is not None:
            self._renew_noise(self._noise, version)

    @torch.inference_mode()
    def _renew_noise(self, noise: NormNoise, version: int) -> None:
        norms = {
            name.removeprefix(loading.PEFT_PREFIX): parameter
            for name, parameter in self.model.named_parameters()
            if is_noisy_norm(name)
        }
        # published full weights bring clean norms; an adapter leaves the norms with the noise of the version before
        if not self._adapter or not self._clean_norms:
            self._clean_norms = {name: norm.clone() for name, norm in norms.items()}
        for name, value in noise.on(self._clean_norms, version).items():
            norms[name].copy_(value)

    def _forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: cache.CachePlan,
        keep: Tensor,
        images: RowImages | None = None,
    ) -> Tensor:
        # peft keeps adapters in float32; without autocast they would be computed in float32 too, unlike in the trainer
        autocast = self._adapter and self._dtype is not torch.float32
        with_images = {} if images is None else images.forward_arguments()
        chosen: list[Experts] = []
        with (
            torch.autocast(self.device.type, self._dtype, enabled=autocast),
            placing(self.model, images),
            recording(self._routing, chosen) if self._routing is not None else nullcontext(),
        ):
            output = self.model(
                input_ids=tokens_T[None],
                attention_mask=None,
                # the cache is ours: slot_attention keeps keys and values
                use_cache=False,
                # logits of the last tokens alone: those of a whole prompt would take vocabulary × tokens floats
                logits_to_keep=keep,
                cache_plan=plan,
                **{"position_ids": positions_T[None]} | with_images,
            )
        self.experts_T = chosen[0] if chosen else None
        return output.logits[0]  # type: ignore[no-any-return]


def _parts(lengths: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Cut a sequence of lengths into runs of at most `budget` tokens. A longer length is a separate run."""
    first, tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if i > first and tokens + length > budget:
            yield slice(first, i)
            first, tokens = i, 0
        tokens += length
    yield slice(first, lengths.size)


def single_rows_round_otherwise(config: ModelConfig, device: torch.device) -> bool:
    """Return whether a product with one row rounds otherwise than with several rows, as in the trainer.

    bitsandbytes multiplies a single row on a GPU with a kernel of its own (gemv), several rows with the usual one.
    """
    return config.quantization is not None and device.type == "cuda"
