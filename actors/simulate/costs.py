"""Costs of a run, and the cheapest split of a number of GPUs between training and sampling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from actors.simulate.limit import short
from actors.simulate.plan import Plan, Size
from actors.simulate.result import Result, simulate
from schemas.config import RunConfig
from schemas.errors import ConfigError

HOUR = 3600.0
PRICED = ("trainer", "inference")
MOST_TRIED = 16
"""Splits up to which all are tried; of more, those around the best of a coarse search are."""


def parse_price(text: str) -> tuple[str, float]:
    """Return role and price of a GPU hour, from a word of `--price`, such as `trainer=2.5`.

    Raises:
        ConfigError: the word has another form.
    """
    role, _, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if role not in PRICED or not 0 <= price < float("inf"):
        raise ConfigError(
            f"--price {text}: write ROLE=PRICE of a GPU hour, as in trainer=2.5; roles: {', '.join(PRICED)}"
        )
    return role, price


def gpus_of(config: RunConfig, size: Size) -> dict[str, int]:
    """Return the GPUs by role: one for each trainer rank, and for each engine as many as it spreads over."""
    return {"trainer": size.trainers, "inference": size.engines * gpus_of_engine(config)}


def gpus_of_engine(config: RunConfig) -> int:
    """Return the GPUs of an engine, at least 1: an engine on another machine has one too."""
    return max(1, config.inference.engine.num_gpus)


def cost_per_step(prices: Mapping[str, float], gpus: Mapping[str, int], steps_per_second: float) -> float:
    """Return the price of a step: Σ GPUs · price of an hour ÷ 3600 · seconds per step.

    Example: 8 GPUs at 2.00 an hour and 0.1 steps per second are 8 · 2 ÷ 3600 · 10 = 0.044 a step.
    """
    return sum(number * prices.get(role, 0.0) for role, number in gpus.items()) / HOUR / steps_per_second


@dataclass(frozen=True)
class Split:
    """A split of GPUs, with the figures of its run."""

    size: Size
    gpus: dict[str, int]
    result: Result
    cost: float
    """Price of a step; without prices, GPU seconds of a step."""


def splits(plan: Plan, num_gpus: int, prices: Mapping[str, float]) -> list[Split]:
    """Return splits of a number of GPUs between training and sampling, the cheapest step first.

    Raises:
        ConfigError: too few GPUs for a trainer rank and an engine.
    """
    each = gpus_of_engine(plan.config)
    most = num_gpus - each
    if most < 1:
        raise ConfigError(f"--gpus {num_gpus}: a trainer rank and an engine take {1 + each} GPUs at least")
    # a GPU hour of both roles costs the same unless said otherwise; in GPU seconds without a price
    given = prices if any(prices.values()) else dict.fromkeys(PRICED, HOUR)
    known: dict[int, Split] = {}

    def at(trainers: int) -> float:
        if trainers not in known:
            size = replace(plan.size, trainers=trainers, engines=(num_gpus - trainers) // each)
            result, gpus = simulate(short(replace(plan, size=size))), gpus_of(plan.config, size)
            known[trainers] = Split(size, gpus, result, cost_per_step(given, gpus, result.steps_per_second))
        return known[trainers].cost

    _search(at, 1, most)
    return sorted(known.values(), key=lambda one: (one.cost, one.size.trainers))


def _search(cost: Callable[[int], float], first: int, last: int) -> None:
    """Look at all numbers, or at a coarse grid and then ever closer around the cheapest."""
    step = max(1, (last - first) // MOST_TRIED)
    tried = set(range(first, last + 1, step)) | {last}
    while True:
        best = min(sorted(tried), key=cost)
        if step == 1:
            return
        step = max(1, step // 4)
        tried |= {
            max(first, best - 2 * step),
            max(first, best - step),
            min(last, best + step),
            min(last, best + 2 * step),
        }
        if step == 1:
            tried |= {number for number in range(best - 3, best + 4) if first <= number <= last}
