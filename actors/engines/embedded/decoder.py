"""The model side of the embedded engine: prefill and decode over slots, and its weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.engines.embedded import cache
from actors.policy import loading
from actors.policy.attention import pack_row
from bus.weights import Weights
from schemas.config.model import ModelConfig


class Decoder:
    """A causal LM that computes next-token logits of sequences kept in slots. Use it from one thread."""

    def __init__(self, config: ModelConfig) -> None:
        dtype = loading.TORCH_DTYPES[config.dtype]
        self.model: nn.Module = loading.load_model(config, cache.NAME, dtype)
        if config.lora is not None:
            self.model = loading.add_lora(self.model, config.lora)
        self.model.eval()
        self.device = loading.device_of(config)
        self._adapter = config.lora is not None
        self._cache = cache.SlotCache()
        base: Any = self.model.config
        self.max_positions = int(getattr(base, "max_position_embeddings", 1 << 30))
        self.vocab_size = int(base.vocab_size)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Compute whole sequences into their slots; returns the logits behind the last token of each, (B, V)."""
        lengths = np.array([len(sequence) for sequence in sequences])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences])
        # each sequence is a sample of its own with an empty completion, and no two share a prompt
        row = pack_row(tokens, offsets, lengths, range(len(sequences)), self.device)
        last = torch.from_numpy(offsets[1:] - 1).to(self.device)
        slots_T = torch.from_numpy(np.repeat(np.asarray(slots), lengths)).to(self.device)
        plan = cache.CachePlan(self._cache, slots_T, row.position_ids_R, int(lengths.max()), False, row)
        return self._forward(row.token_ids_R, row.position_ids_R, plan, last)

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, positions_B: Tensor, slots: Sequence[int]) -> Tensor:
        """One more token of each sequence; returns the logits behind it, (B, V)."""
        contiguous = list(slots) == list(range(len(slots)))
        plan = cache.CachePlan(
            self._cache, torch.tensor(slots, device=self.device), positions_B, int(positions_B.max()) + 1, contiguous
        )
        return self._forward(tokens_B, positions_B, plan, torch.arange(len(slots), device=self.device))

    def share_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the prompt's keys and values of one slot to others."""
        with torch.inference_mode():
            self._cache.copy_prefix(source, torch.tensor(targets, device=self.device), length)

    def load(self, weights: Weights) -> None:
        """Overwrite the weights.

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

    def _forward(self, tokens_T: Tensor, positions_T: Tensor, plan: cache.CachePlan, keep: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep,
            cache_plan=plan,
        )
        return output.logits[0]  # type: ignore[no-any-return]
