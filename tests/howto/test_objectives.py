"""Loss and advantage that a page's run.yaml sets, against the other system's formulas in plain Python.

Formulas are of the systems' documents and code: TRL 1.16 (`loss_type` dapo, `scale_rewards` group, `sequence_mask`),
prime-rl (dppo), Surogate's RL guide, AReaL (decoupled, token ratios above 5 masked), ms-swift (grpo, beta 0.04).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import pytest
import torch
import yaml

from actors.algorithms.advantages import compute_advantages
from actors.algorithms.losses import LossInputs, compute_loss
from schemas.config import RunConfig, check_tree
from tests.howto.pages import page

LENGTHS = (5, 3, 4, 2)


@dataclass(frozen=True)
class Token:
    """Logprobs of one token, and its advantage."""

    logp: float
    q: float
    old: float
    ref: float
    advantage: float


Completion = Sequence[Token]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's objective, to be minimised."""
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def mean_of_tokens(completions: Sequence[Completion], of: Callable[[Token], float]) -> float:
    """Mean over the tokens of the step."""
    return mean(of(token) for completion in completions for token in completion)


def trl(completions: Sequence[Completion]) -> float:
    """Token loss × the weight of the completion, exp(Σ old − q) where that is at most 3, over all tokens."""

    def weight(completion: Completion) -> float:
        found = math.exp(sum(token.old - token.q for token in completion))
        return found if found <= 3.0 else 0.0

    losses = [
        weight(completion) * clipped(math.exp(token.logp - token.old), token.advantage, 0.2, 0.2)
        for completion in completions
        for token in completion
    ]
    return mean(losses)


def prime(completions: Sequence[Completion]) -> float:
    """−A·r where the probability has not moved more than 0.2 the way it is pushed, + 1e-3·(logp − q)² everywhere."""

    def of(token: Token) -> float:
        moved = math.exp(token.logp) - math.exp(token.q)
        keeps = moved <= 0.2 if token.advantage > 0 else moved >= -0.2
        ratio = math.exp(token.logp - token.q)
        return -token.advantage * ratio * keeps + 1e-3 * (token.logp - token.q) ** 2

    return mean_of_tokens(completions, of)


def surogate(completions: Sequence[Completion]) -> float:
    """−r·A·logp where r is in 0.125 to 8, its geometric mean in 0.1 to 10, and none of the completion above 100."""
    total = 0.0
    for completion in completions:
        ratios = [math.exp(token.logp - token.q) for token in completion]
        geo = math.exp(mean(token.logp - token.q for token in completion))
        whole = 0.1 <= geo <= 10.0 and max(ratios) <= 100.0
        for ratio, token in zip(ratios, completion, strict=True):
            total -= ratio * token.advantage * token.logp * (whole and 0.125 <= ratio <= 8.0)
    return total / sum(map(len, completions))


def areal(completions: Sequence[Completion]) -> float:
    """Clipped at 0.4 around the proximal policy × exp(prox − q), masked above 5; over all tokens, those masked too."""

    def of(token: Token) -> float:
        weight = math.exp(token.old - token.q)
        loss = clipped(math.exp(token.logp - token.old), token.advantage, 0.4, 0.4)
        return weight * loss if weight <= 5.0 else 0.0

    return mean_of_tokens(completions, of)


def swift(completions: Sequence[Completion]) -> float:
    """Means over completions of token means; clipped at 0.2 and 0.28, + 0.04·k3, k3 held within ±10."""

    def of(token: Token) -> float:
        distance = token.ref - token.logp
        k3 = min(math.exp(distance) - distance - 1, 10.0)
        return clipped(math.exp(token.logp - token.old), token.advantage, 0.2, 0.28) + 0.04 * k3

    return mean(mean(map(of, completion)) for completion in completions)


def config_of(name: str) -> RunConfig:
    """The configuration of a page."""
    return check_tree(yaml.safe_load(page(name).block("run.yaml")))


def drawn(seed: int) -> list[list[Token]]:
    """Completions with logprobs far enough apart that every bound is crossed somewhere."""
    generator = torch.Generator().manual_seed(seed)

    def token(advantage: float) -> Token:
        logp, *further = (torch.randn(4, generator=generator, dtype=torch.float64) * 0.8).tolist()
        logp = -1.5 + 0.4 * logp
        q, old, ref = (logp + distance for distance in further)
        return Token(logp, min(q, 0.0), min(old, 0.0), min(ref, 0.0), advantage)

    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).tolist()
    return [[token(advantage) for _ in range(length)] for advantage, length in zip(advantages, LENGTHS, strict=True)]


def inputs_of(completions: Sequence[Completion]) -> LossInputs:
    """The same as arrays."""
    width = max(LENGTHS)

    def padded(name: str) -> Any:
        rows = [[getattr(token, name) for token in completion] for completion in completions]
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)

    return LossInputs.of_padded(
        padded("logp").requires_grad_(),
        padded("q"),
        padded("advantage"),
        [[t < length for t in range(width)] for length in LENGTHS],
        old_logprobs_BT=padded("old"),
        reference_logprobs_BT=padded("ref"),
        versions_BT=torch.zeros(len(LENGTHS), width, dtype=torch.int64),
        max_completion_length=width,
    )


REFERENCES = {"trl": trl, "prime-rl": prime, "surogate": surogate, "areal": areal, "ms-swift": swift}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", REFERENCES)
def test_the_loss_of_the_run_is_that_of_the_other_system(name: str, seed: int) -> None:
    """On tokens that cross every bound."""
    completions = drawn(seed)
    loss = compute_loss(inputs_of(completions), config_of(name).trainer).loss
    assert loss.item() == pytest.approx(REFERENCES[name](completions), abs=1e-9)


def with_deviation(eps: float) -> Callable[[list[float]], list[float]]:
    """(r − mean) ÷ (unbiased deviation + eps)."""
    return lambda rewards: [(reward - mean(rewards)) / (stdev(rewards) + eps) for reward in rewards]


def without_deviation(rewards: list[float]) -> list[float]:
    """R − mean."""
    return [reward - mean(rewards) for reward in rewards]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl", with_deviation(1e-4)),
        ("prime-rl", without_deviation),
        ("surogate", without_deviation),
        ("areal", with_deviation(1e-5)),
        ("ms-swift", without_deviation),
    ],
)
def test_the_advantage_of_the_run_is_that_of_the_other_system(
    name: str, expected: Callable[[list[float]], list[float]]
) -> None:
    """Of a group with two right answers of five."""
    rewards = [1.0, 0.0, 0.1, 1.1, 0.0]
    found = compute_advantages([rewards], config_of(name).reward.advantage)[0].tolist()
    assert found == pytest.approx(expected(rewards), abs=1e-9)
