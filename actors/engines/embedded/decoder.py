"""The model side of the embedded engine: prefill and decode over slots, and its weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.embedded import cache
from actors.policy import loading
from actors.policy.attention import pack_row
from bus.weights import Weights
from schemas.config.actors import EmbeddedEngineConfig
from schemas.config.model import ModelConfig


class Decoder:
    """A causal LM that computes next-token logits of sequences kept in slots. Use it from one thread."""

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
        base: Any = self.model.config
        self.max_length = min(limits.max_sequence_len, int(getattr(base, "max_position_embeddings", 1 << 30)))
        self.vocab_size = int(base.vocab_size)
        self._limits, self._max_prefill_tokens = (limits.max_sequences, self.max_length), limits.max_prefill_tokens
        self.forget()

    def forget(self) -> None:
        """Start over with an empty cache, so that nothing decoded before decides on its size."""
        self._cache = cache.SlotCache(*self._limits)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[NDArray[np.int32]], slots: Sequence[int]) -> Tensor:
        """Compute whole sequences into their slots; returns the logits behind the last token of each, (B, V).

        One forward takes at most `max_prefill_tokens` (one sequence may be longer): it bounds what activations need.
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
        """One more token of the sequences in slots 0…B−1; returns the logits behind it, (B, V)."""
        length = int(positions_B.max()) + 1
        self._cache.reserve(positions_B.size, length)
        slots_B = torch.arange(positions_B.size, device=self.device)
        plan = cache.CachePlan(self._cache, slots_B, torch.from_numpy(positions_B).to(self.device), length)
        return self._forward(torch.from_numpy(tokens_B).to(self.device), plan, slots_B)

    @torch.inference_mode()
    def repeat(self, slot: int, count: int, length: int) -> None:
        """Copy the first `length` keys and values of a slot to the `count` slots behind it."""
        self._cache.reserve(slot + 1 + count, length)
        self._cache.repeat(slot, count, length)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of slots to other slots."""
        self._cache.copy(torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device), length)

    def load(self, weights: Weights, version: int) -> None:
        """Overwrite the weights, and put the noise of this version on the norms, where there is any.

        Raises:
            ValueError: they are not this model's; nothing has been overwritten.
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
            logits_to_keep=keep,
            cache_plan=plan,
        )
        return output.logits[0]  # type: ignore[no-any-return]


def _align(model: nn.Module) -> None:
    """Move weights out of the mapped file into memory of torch's own, which is aligned.

    The length of the file's header decides on their addresses there, and a matrix that is not aligned to 16 bytes is
    multiplied with a single row in another order.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _parts(lengths: NDArray[np.int64], budget: int) -> Iterator[slice]:
    """Cut a sequence of lengths into runs of at most `budget` tokens."""
    first, tokens = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if i > first and tokens + length > budget:
            yield slice(first, i)
            first, tokens = i, 0
        tokens += length
    yield slice(first, lengths.size)
