"""Model side of the embedded engine: prefill and decode over slots, and loading of weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.embedded import cache
from actors.models import loading
from actors.models.attention import pack_row
from actors.models.positions import num_positions
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig


class Decoder:
    """Causal LM for next-token logits of sequences kept in slots. For use from a single thread."""

    def __init__(self, config: ModelConfig, limits: EmbeddedEngineConfig, noise: NormNoise | None = None) -> None:
        dtype = loading.TORCH_DTYPES[config.dtype]
        self.model: nn.Module = loading.load_model(config, dtype, attention=cache.NAME)
        if config.lora is not None:
            self.model = loading.add_lora(self.model, config.lora)
        self.model.eval()
        if limits.deterministic:
            _align(self.model)
        self.device = loading.device_of(config)
        self._adapter = config.lora is not None
        self._noise = noise
        self._clean_norms: dict[str, Tensor] = {}
        """Norms without noise, kept while noise is on the model; empty before the first noise."""
        base: Any = self.model.config
        # a model without a limit of its own is limited by the configuration alone
        self.max_length = min(limits.max_sequence_len, num_positions(base.to_dict()) or 1 << 30)
        self.vocab_size = int(base.vocab_size)
        self._limits, self._max_prefill_tokens = (limits.max_sequences, self.max_length), limits.max_prefill_tokens
        self.forget()

    def forget(self) -> None:
        """Replace the cache with an empty one. Results then do not depend on the growth of the old cache."""
        self._cache = cache.SlotCache(*self._limits)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[NDArray[np.int32]], slots: Sequence[int]) -> Tensor:
        """Compute whole sequences into their slots; return the logits behind the last token of each, (B, V).

        Each forward takes at most `max_prefill_tokens` tokens, to bound the memory of activations; a longer sequence
        has a separate forward.
        """
        lengths = np.array([sequence.size for sequence in sequences])
        self._cache.reserve(max(slots) + 1, int(lengths.max()))
        parts = _parts(lengths, self._max_prefill_tokens)
        return torch.cat([self._prefill(sequences[part], lengths[part], np.asarray(slots[part])) for part in parts])

    def _prefill(
        self, sequences: Sequence[NDArray[np.int32]], lengths: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> Tensor:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # each sequence is a sample of its own with an empty completion, and no two share a prompt
        row = pack_row(np.concatenate(sequences), offsets, lengths, range(len(sequences)), self.device)
        slots_T = torch.from_numpy(np.repeat(slots, lengths)).to(self.device)
        plan = cache.CachePlan(self._cache, slots_T, row.position_ids_R, 0, row)
        return self._forward(row.token_ids_R, plan, torch.from_numpy(offsets[1:] - 1).to(self.device))

    @torch.inference_mode()
    def decode(self, tokens_B: NDArray[np.int32], positions_B: NDArray[np.int64]) -> Tensor:
        """Decode the next token of the sequences in slots 0…B−1; return the logits behind each, (B, V)."""
        length = int(positions_B.max()) + 1
        self._cache.reserve(positions_B.size, length)
        slots_B = torch.arange(positions_B.size, device=self.device)
        plan = cache.CachePlan(self._cache, slots_B, torch.from_numpy(positions_B).to(self.device), length)
        return self._forward(torch.from_numpy(tokens_B).to(self.device), plan, slots_B)

    @torch.inference_mode()
    def repeat(self, slot: int, count: int, length: int) -> None:
        """Copy the first `length` keys and values of a slot to the next `count` slots."""
        self._cache.reserve(slot + 1 + count, length)
        self._cache.repeat(slot, count, length)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of the slots `sources` to the slots `targets`."""
        self._cache.copy(torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device), length)

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
        targets = loading.adapter_tensors(self.model) if self._adapter else loading.full_tensors(self.model)
        loading.copy_into(targets, weights.tensors, "published weights")
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
        if not self._adapter or not self._clean_norms:  # an adapter leaves the norms as the version before has them
            self._clean_norms = {name: norm.clone() for name, norm in norms.items()}
        for name, value in noise.on(self._clean_norms, version).items():
            norms[name].copy_(value)

    def _forward(self, tokens_T: Tensor, plan: cache.CachePlan, keep: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens_T[None],
            position_ids=plan.positions_T[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep,  # the cache is ours: slot_attention keeps keys and values
            cache_plan=plan,
        )
        return output.logits[0]  # type: ignore[no-any-return]


def _align(model: nn.Module) -> None:
    """Move weights from the mapped file into aligned memory of torch.

    In the mapped file the addresses depend on the length of the file's header. A matrix not aligned to 16 bytes
    is multiplied with a single row in another order, which changes the last bits of the result.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _parts(lengths: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Cut a sequence of lengths into runs of at most `budget` tokens. A longer length is a separate run."""
    first, tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if i > first and tokens + length > budget:
            yield slice(first, i)
            first, tokens = i, 0
        tokens += length
    yield slice(first, lengths.size)
