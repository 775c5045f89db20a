"""Logprobs and entropy of a causal LM on packed rows, without the logits of more than a chunk of tokens at a time.

The model runs as it is, adapters, checkpointing and sharding included; only its output layer's `forward` is exchanged
while it does, for one that computes logprobs from the hidden states it is called with. What a model does to its logits
afterwards (scales them, bends them) is read off once, from what it makes of known ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from actors.policy.attention import PackedRow, pack_row
from actors.policy.logprobs import Bend, chunked_logprobs_and_entropy, logprobs_and_entropy

log = structlog.get_logger("learner")

HeadForward = Callable[[Tensor], Tensor]


class ChosenLogprobs:
    """What a model says of chosen tokens.

    A model whose output layer is no plain linear one (it has an adapter, or is quantised), or which makes something
    else of its logits than `Bend` knows, computes them all at once; the log says so.

    Args:
        model: as it is trained: with its adapter, before it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._bend, problem = _bend(model, self._head)
        if problem:
            log.warning("logits are computed all at once", model=type(model).__name__, why=problem)

    def of(
        self,
        row: PackedRow,
        token_ids_T: Tensor,
        temperatures_T: Tensor,
        wanted_K: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(T,) logprobs, with gradient, and (T,) entropy, with it where it is asked for.

        Args:
            row: one micro-batch.
            token_ids_T: its completion tokens.
            temperatures_T: of their sampling.
            wanted_K: places in T; all others are 0 and cost nothing. None: all.
            entropy_gradient: whether entropy has one.
        """
        source_K = row.source_T
        if wanted_K is not None:
            source_K, token_ids_T, temperatures_T = (x[wanted_K] for x in (source_K, token_ids_T, temperatures_T))
        if self._bend is None:
            logits_KV = self.model(**row.forward_arguments(), logits_to_keep=source_K).logits[0]
            found = logprobs_and_entropy(logits_KV, token_ids_T, temperatures_T, entropy_gradient)
        else:
            found = self._chunked(self._bend, row, source_K, token_ids_T, temperatures_T, entropy_gradient)
        if wanted_K is None:
            return found
        logprobs_T, entropy_T = (x_K.new_zeros(len(row.source_T)).index_copy(0, wanted_K, x_K) for x_K in found)
        return logprobs_T, entropy_T

    def _chunked(
        self, bend: Bend, row: PackedRow, source_K: Tensor, ids_K: Tensor, temperatures_K: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []

        def instead(hidden_1RD: Tensor) -> Tensor:
            hidden_KD, head = hidden_1RD[0].index_select(0, source_K), self._head
            both = chunked_logprobs_and_entropy(
                hidden_KD, head.weight, head.bias, ids_K, temperatures_K, bend, gradient
            )
            found.append(torch.stack(both, -1)[None])
            return found[0]  # the very tensor: sharding watches for the gradient of what a module returns

        with _forward_of(self._head, instead):
            self.model(**row.forward_arguments())
        logprobs_K, entropy_K = found[0][0].unbind(-1)
        return logprobs_K, entropy_K if gradient else entropy_K.detach()


@contextmanager
def _forward_of(head: nn.Module, forward: HeadForward) -> Iterator[None]:
    """Have it compute this; hooks and parameters stay its own."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _bend(model: nn.Module, head: nn.Module | None) -> tuple[Bend | None, str]:
    """What the model does to logits, from what it makes of known ones; or None, and why chunks can't be computed."""
    if type(head) is not nn.Linear:
        return None, f"its output layer is {type(head).__name__}, not a plain linear one"
    given_V = torch.linspace(-50, 50, head.out_features, device=head.weight.device)
    given_V[:3] = torch.tensor([2**-10, 1e9, 2e9])  # where a bend is a line, and where it has reached its cap
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _forward_of(head, lambda hidden_1RD: given_V.expand(*hidden_1RD.shape[:2], -1)):
            row = pack_row(np.zeros(2, np.int32), np.array([0, 2]), np.array([1]), [0], given_V.device)
            found_V = model(**row.forward_arguments()).logits[0, -1].float()
    finally:
        model.train(training)
    line, capped, as_capped = found_V[:3].tolist()
    bend = Bend(round(line * 2**10, 5), capped) if capped == as_capped else Bend(capped / 1e9)
    if not torch.allclose(bend.forward_(given_V.clone()), found_V, rtol=1e-4, atol=1e-4):
        return None, "what it does to its logits is neither a factor nor a soft cap"
    return bend, ""
