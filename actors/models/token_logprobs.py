"""Logprobs and entropy of a causal LM on packed rows, with the logits of only a chunk of tokens at a time.

The model runs unchanged, with adapters, checkpointing and sharding. Only the output layer's `forward` is replaced
during a call, by a function that computes logprobs from the hidden states. A later transform of the logits (a scale, a
soft cap) is found once, from the model's output for known logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from actors.models.attention import PADDED, PackedRow, attending, pack_row
from actors.models.attention.row_ranks import RowRanks, gathered_results, gathered_rows
from actors.models.attention.rows import UNPADDED, RowLengths
from actors.models.choices import row_multiple
from actors.models.exact_head import refusal
from actors.models.loading import TORCH_DTYPES, device_of, on_gpu
from actors.models.logprobs import LogitTransform, chunked_logprobs_and_entropy, logprobs_and_entropy
from actors.models.triton_trial import takes_triton
from actors.models.vision.row_images import placing
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

log = structlog.get_logger("learner")

HeadForward = Callable[[Tensor], Tensor]


class TokenLogprobs:
    """Logprobs of chosen tokens under a model.

    If the output layer is not a plain linear layer (it has an adapter, or is quantised), or the model transforms its
    logits otherwise than `LogitTransform`, all logits are computed at once, and the log says so.

    Args:
        model: model as it is trained: with its adapter, before sharding.
        fused: True to compute logprobs by kernels of Triton.
        lengths: lengths to which rows are padded.
        exact_head: True for products of the output layer in float32.

    Raises:
        ConfigError: `exact_head`, and logits have to be computed at once.
    """

    def __init__(
        self, model: nn.Module, fused: bool = False, lengths: RowLengths = UNPADDED, exact_head: bool = False
    ) -> None:
        self.model, self._fused, self._lengths = model, fused, lengths
        self._head_dtype = torch.float32 if exact_head else None
        self.row_ranks: RowRanks | None = None
        """Ranks that compute rows together with this one: all call `of` for the same rows. None: rows are whole."""
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._transform, problem = _transform(model, self._head)
        if problem and exact_head:
            raise ConfigError(refusal(problem))
        if problem:
            log.warning("logits are computed all at once", model=type(model).__name__, why=problem)

    def of(
        self,
        row: PackedRow,
        token_ids_T: Tensor,
        temperatures_T: Tensor | None,
        wanted_K: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (T,) logprobs, with gradient, and (T,) entropies, with gradient if `entropy_gradient`.

        Args:
            row: one micro-batch.
            token_ids_T: completion tokens of the row.
            temperatures_T: sampling temperature of each token; None: all are 1.
            wanted_K: indices in T to compute; others are 0 and cost nothing. None computes all.
            entropy_gradient: True if entropies need a gradient.
        """
        row = row.padded(self._lengths.of(len(row.token_ids_R)))
        source_K = row.source_T
        if wanted_K is not None:
            source_K, token_ids_T = source_K[wanted_K], token_ids_T[wanted_K]
            temperatures_T = None if temperatures_T is None else temperatures_T[wanted_K]
        if self.row_ranks is None:
            found = self._computed(row, source_K, token_ids_T, temperatures_T, entropy_gradient)
        else:
            found = self._together(self.row_ranks, row, source_K, token_ids_T, temperatures_T, entropy_gradient)
        if wanted_K is None:
            return found
        logprobs_T, entropy_T = (x_K.new_zeros(len(row.source_T)).index_copy(0, wanted_K, x_K) for x_K in found)
        return logprobs_T, entropy_T

    def _computed(
        self, row: PackedRow, source_K: Tensor, ids_K: Tensor, temperatures_K: Tensor | None, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        if self._transform is not None:
            return self._chunked(self._transform, row, source_K, ids_K, temperatures_K, gradient)
        if row.ranks is None:
            with placing(self.model, row.images):
                logits_KV = self.model(**row.forward_arguments(), logits_to_keep=source_K).logits[0]
        else:
            logits_KV = self._logits_of_part(row, row.ranks, source_K)
        return logprobs_and_entropy(logits_KV, ids_K, temperatures_K, gradient)

    def _together(
        self,
        ranks: RowRanks,
        row: PackedRow,
        source_K: Tensor,
        ids_K: Tensor,
        temperatures_K: Tensor | None,
        gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute a row together with other ranks; each rank gets all K results.

        The output layer is divided by results, not by parts of the row: a row's prompts have none.
        """
        num_results = len(source_K)
        share = -(-num_results // ranks.size)
        # equally many on each rank: the last ones compute the last result again
        own = torch.arange(ranks.place * share, (ranks.place + 1) * share, device=source_K.device)
        own = own.clamp(max=max(0, num_results - 1))
        temperatures = None if temperatures_K is None else temperatures_K[own]
        found = self._computed(row.divided(ranks), source_K[own], ids_K[own], temperatures, gradient)
        logprobs_K, entropy_K = gathered_results(torch.stack(found, -1), ranks)[:num_results].unbind(-1)
        return logprobs_K, entropy_K if gradient else entropy_K.detach()

    def _logits_of_part(self, row: PackedRow, ranks: RowRanks, source_K: Tensor) -> Tensor:
        """Return logits from an output layer that is not computed in chunks."""
        forward = self._head.forward

        def instead(hidden_1RD: Tensor) -> Tensor:
            logits: Tensor = forward(gathered_rows(hidden_1RD[0], ranks).index_select(0, source_K)[None])
            return logits

        with _forward_of(self._head, instead):
            logits_KV: Tensor = self.model(**row.forward_arguments()).logits[0]
        return logits_KV

    def _chunked(
        self,
        transform: LogitTransform,
        row: PackedRow,
        source_K: Tensor,
        ids_K: Tensor,
        temperatures_K: Tensor | None,
        gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []

        # logprobs and entropy take the place of logits: the model's code only passes them on
        def instead(hidden_1RD: Tensor) -> Tensor:
            hidden_RD, head = hidden_1RD[0], self._head
            if row.ranks is not None:
                hidden_RD = gathered_rows(hidden_RD, row.ranks)
            hidden_KD = hidden_RD.index_select(0, source_K)
            both = chunked_logprobs_and_entropy(
                *(hidden_KD, head.weight, head.bias, ids_K, temperatures_K, transform, gradient),
                fused=self._fused,
                dtype=self._head_dtype,
            )
            found.append(torch.stack(both, -1)[None])
            return found[0]  # this very tensor: sharding hooks into the gradient of a module's output

        with _forward_of(self._head, instead), placing(self.model, row.images):
            self.model(**row.forward_arguments())
        logprobs_K, entropy_K = found[0][0].unbind(-1)
        return logprobs_K, entropy_K if gradient else entropy_K.detach()


def as_configured(model: nn.Module, config: ModelConfig, sequence_len: int) -> TokenLogprobs:
    """Return the logprobs of a model, computed as its configuration says.

    Args:
        model: the model, before sharding.
        config: configuration of the model.
        sequence_len: tokens of the longest row.

    Raises:
        ConfigError: the configured kernels do not run here, or not in the precision of `head_dtype`.
    """
    exact = config.has_exact_head
    fused = takes_triton(config, device_of(config), torch.float32 if exact else TORCH_DTYPES[config.dtype])
    multiple = int(row_multiple(config, sequence_len, on_gpu(config)).taken)
    return TokenLogprobs(model, fused, RowLengths(multiple, sequence_len), exact)


@contextmanager
def _forward_of(head: nn.Module, forward: HeadForward) -> Iterator[None]:
    """Replace the forward of a module. Hooks and parameters stay in place."""
    # an attribute of the object hides the method of its class, until it is deleted
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _transform(model: nn.Module, head: nn.Module | None) -> tuple[LogitTransform | None, str]:
    """Return the transform from the model's output for known logits, or None and why chunks are impossible."""
    if type(head) is not nn.Linear:
        return None, f"its output layer is {type(head).__name__}, not a plain linear one"
    given_V = torch.linspace(-50, 50, head.out_features, device=head.weight.device)
    given_V[:3] = torch.tensor([2**-10, 1e9, 2e9])  # where tanh is linear, and where it has reached its cap
    training = model.training
    model.eval()
    try:
        # padded: a sharded model is still in host memory here, where the kernels for its GPU don't run
        with (
            torch.no_grad(),
            attending(model, PADDED),
            _forward_of(head, lambda hidden_1RD: given_V.expand(*hidden_1RD.shape[:2], -1)),
        ):
            row = pack_row(np.zeros(2, np.int32), np.array([0, 2]), np.array([1]), [0], given_V.device)
            found_V = model(**row.forward_arguments()).logits[0, -1].float()
    finally:
        model.train(training)
    # equal outputs for 1e9 and 2e9 are a cap; otherwise their ratio to the input is the scale
    line, capped, as_capped = found_V[:3].tolist()
    transform = LogitTransform(round(line * 2**10, 5), capped) if capped == as_capped else LogitTransform(capped / 1e9)
    if not torch.allclose(transform.forward_(given_V.clone()), found_V, rtol=1e-4, atol=1e-4):
        return None, "what it does to its logits is neither a factor nor a soft cap"
    return transform, ""
