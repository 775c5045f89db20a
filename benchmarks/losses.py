"""Cost of each policy loss on 100 000 tokens, forward and backward, compared with the plain policy gradient.

    python -m benchmarks.losses [--json PATH]

The plain policy gradient is −A·logp over the tokens of the step, without ratio, mask and metrics. `loss` is the loss
function alone, from logprobs to their gradient. `with logits` starts at logits (vocabulary 1 024) and ends at their
gradient, and includes the trainer's own logprobs and entropy. Completion lengths are lognormal (median 500); a tenth of
the tokens is not in the loss; ratios are e^±0.1. The losses take turns, and each row is a median over the rounds. Torch
uses its default number of threads, in float32.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.algorithms.losses import LOSSES, LossInputs, compute_loss
from actors.models.logprobs import logprobs_and_entropy
from benchmarks.machine import finish, table
from schemas.config.objective import ObjectiveConfig

TOKENS, VOCABULARY = 100_000, 1_024
ROUNDS_ALONE, ROUNDS_WITH_LOGITS = 31, 5
PLAINEST = "−A·logp"

Loss = Callable[[LossInputs], Tensor]


def inputs_of(logprobs_T: Tensor, seed: int = 0) -> LossInputs:
    """Return a micro-batch with these logprobs and all inputs of every loss."""
    rng = torch.Generator().manual_seed(seed)
    completion_of_T = _completions(rng)

    def near() -> Tensor:
        return logprobs_T.detach() + 0.1 * torch.randn(TOKENS, generator=rng)

    num_completions = int(completion_of_T[-1]) + 1
    loss_mask_T = torch.rand(TOKENS, generator=rng) > 0.1
    return LossInputs(
        logprobs_T=logprobs_T,
        inference_logprobs_T=near(),
        old_logprobs_T=near(),
        teacher_logprobs_T=near(),
        advantages_T=torch.randn(num_completions, generator=rng)[completion_of_T],
        loss_mask_T=loss_mask_T,
        completion_of_T=completion_of_T,
        num_completions=num_completions,
        loss_tokens=int(loss_mask_T.sum()),
        max_completion_length=8192,
        versions_T=torch.randint(0, 4, (TOKENS,), generator=rng),
        version=4,
    )


def _completions(rng: torch.Generator) -> Tensor:
    lengths = (500 * torch.randn(TOKENS // 100, generator=rng).exp()).long().clamp(1, 8192)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:TOKENS]


def plainest(inputs: LossInputs) -> Tensor:
    """Return the plain policy gradient."""
    return -(inputs.advantages_T * inputs.logprobs_T).masked_fill(~inputs.loss_mask_T, 0.0).sum() / inputs.loss_tokens


def losses() -> dict[str, Loss]:
    """Return all losses with their defaults."""
    found: dict[str, Loss] = {PLAINEST: plainest}
    for config in LOSSES:
        objective = ObjectiveConfig(loss=config())
        found[config().type] = partial(_computed, objective=objective)
    return found


def _computed(inputs: LossInputs, objective: ObjectiveConfig) -> Tensor:
    return compute_loss(inputs, objective).loss


def alone(inputs: LossInputs, loss: Loss) -> None:
    """Compute the loss, from logprobs to their gradient."""
    fresh = replace(inputs, logprobs_T=inputs.logprobs_T.detach().requires_grad_())
    torch.autograd.grad(loss(fresh), fresh.logprobs_T)


def with_logits(inputs: LossInputs, logits_TV: Tensor, token_ids_T: Tensor, loss: Loss) -> None:
    """Compute the loss, from logits to their gradient."""
    logprobs_T, entropy_T = logprobs_and_entropy(logits_TV, token_ids_T, torch.ones(TOKENS))
    torch.autograd.grad(loss(replace(inputs, logprobs_T=logprobs_T, entropy_T=entropy_T)), logits_TV)


def medians(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return milliseconds by name. The cases take turns, so that other load affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for done in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if done:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def measure() -> dict[str, Any]:
    """Measure both costs of every loss."""
    rng = torch.Generator().manual_seed(1)
    logits_TV = torch.randn(TOKENS, VOCABULARY, generator=rng).requires_grad_()
    token_ids_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=rng)
    inputs = inputs_of(logprobs_and_entropy(logits_TV, token_ids_T, torch.ones(TOKENS))[0].detach())
    found = losses()
    bare = medians({name: partial(alone, inputs, loss) for name, loss in found.items()}, ROUNDS_ALONE)
    whole = medians(
        {name: partial(with_logits, inputs, logits_TV, token_ids_T, loss) for name, loss in found.items()},
        ROUNDS_WITH_LOGITS,
    )
    rows = [
        {
            "loss": name,
            "loss ms": bare[name],
            "ratio": bare[name] / bare[PLAINEST],
            "with logits ms": whole[name],
            "ratio with logits": whole[name] / whole[PLAINEST],
        }
        for name in found
    ]
    return {"tokens": TOKENS, "vocabulary": VOCABULARY, "threads": torch.get_num_threads(), "results": rows}


def show(measured: dict[str, Any]) -> str:
    """Return a table with a line per loss."""
    rows = measured["results"]
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


if __name__ == "__main__":
    finish(__doc__, measure, show)
