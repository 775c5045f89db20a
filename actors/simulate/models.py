"""Models of all times in a run: pure functions of a few figures, in seconds and tokens.

    decode, B completions at once    decode_seconds + decode_sequence_seconds · B            a token of each
    prefill, P new prompt tokens     prefill_seconds + prefill_token_seconds · P             stops decoding
    new weights                      wire_seconds, then update_pause_seconds                 the pause stops decoding
    step, on the costliest rank      step_seconds + Σ micro-batches (micro_batch_seconds + train_token_seconds · cost)
    round of the packer, N peers     round_seconds + round_peer_seconds · N
    group in a reward actor          lognormal, mean reward_seconds
    answer of an environment         lognormal, mean environment_seconds

`cost` is `actors.algorithms.packing.cost`: tokens, and a part that grows with the square of a sample's length. A
lognormal value has a mean and a spread, which is its standard deviation ÷ mean (0: always the mean).
"""

import math
import random
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

from schemas.errors import ConfigError


@dataclass(frozen=True)
class Times:
    """Figures of the models. The defaults are round figures for a model of 7 billion weights on current GPUs."""

    decode_seconds: float = 0.02
    """Seconds of a decoding step of an engine, without the part of each sequence."""
    decode_sequence_seconds: float = 0.0001
    """Seconds that each running completion adds to a decoding step."""
    prefill_seconds: float = 0.0
    """Seconds of the start of new prompts apart from their tokens; prompts of one decoding step share it."""
    prefill_token_seconds: float = 0.00002
    """Seconds per token of a new prompt."""
    update_pause_seconds: float = 1.0
    """Seconds for which an engine decodes nothing while new weights enter."""
    wire_seconds: float = 4.0
    """Seconds from the order to load a version until its weights are at the engine, which decodes meanwhile."""
    prompt_tokens: float = 200.0
    """Tokens of a prompt."""
    completion_tokens: float = 400.0
    """Mean tokens of a completion, before the limit `rollout.max_tokens`."""
    completion_spread: float = 0.6
    """Spread of the tokens of a completion."""
    turns: float = 1.0
    """Turns of the model in a completion; above 1 the tokens are divided evenly among the turns."""
    environment_seconds: float = 0.0
    """Mean seconds of an environment's answer to a turn."""
    environment_spread: float = 1.0
    """Spread of the seconds of an environment's answer."""
    reward_seconds: float = 0.05
    """Mean seconds of the reward functions for a group."""
    reward_spread: float = 0.5
    """Spread of the seconds of the reward functions."""
    step_seconds: float = 0.5
    """Seconds of a training step apart from its micro-batches: optimizer, exchange of the ranks."""
    micro_batch_seconds: float = 0.05
    """Seconds that each micro-batch takes apart from its tokens."""
    train_token_seconds: float = 0.0001
    """Seconds per unit of cost of a micro-batch, forward and backward."""
    publish_seconds: float = 2.0
    """Seconds in which the trainer publishes a version after each step."""
    checkpoint_seconds: float = 1.0
    """Seconds for which training stands still for a checkpoint."""
    save_seconds: float = 20.0
    """Seconds from a checkpoint's start until the checkpoint is good, in the background."""
    hop_seconds: float = 0.005
    """Seconds of a message from one process to another, both ends included."""
    round_seconds: float = 0.005
    """Seconds of a round of the packer, with its commit."""
    round_peer_seconds: float = 0.00002
    """Seconds that each process of the run adds to a round of the packer."""
    restart_seconds: float = 30.0
    """Seconds from the death of a process until its successor works."""
    packer_restart_seconds: float = 2.0
    """Seconds from the death of the packer, which loads no model, until its successor works."""
    filtered_share: float = 0.0
    """Share of the groups that a group filter rejects, if one is configured."""
    cores: float = math.inf
    """CPU cores that engines and trainer share; infinite: each has a device of its own."""
    core_threads: float = 1.0
    """Cores that an engine or a trainer rank uses while it computes; counts only with a number of cores."""
    other_cores: float = 0.0
    """Cores that all other processes use together; counts only with a number of cores."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (math.isinf(value) and name != "cores"):
                raise ConfigError(f"--set {name}={value:g}: must be a number of 0 or more")
        for name in ("decode_seconds", "completion_tokens", "turns", "prompt_tokens", "cores"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--set {name}=0: must be above 0")
        if self.filtered_share >= 1:
            raise ConfigError(f"--set filtered_share={self.filtered_share:g}: must be below 1")

    def with_values(self, **values: float) -> "Times":
        """Return a copy with other values of some figures."""
        return replace(self, **values)


NAMES = tuple(one.name for one in fields(Times))
"""Names of all figures, as `--set` takes them."""


def parse_setting(text: str) -> tuple[str, float]:
    """Return name and value of a word of `--set`.

    Raises:
        ConfigError: no such figure, or no number.
    """
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise ConfigError(f"--set {text}: no such figure; the figures are {', '.join(NAMES)}")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--set {text}: {value!r} is no number") from None


def decode_step(times: Times, batch: int) -> float:
    """Return the seconds of a decoding step with `batch` running completions, each of which gets a token."""
    return times.decode_seconds + times.decode_sequence_seconds * batch


def slowdown(times: Times, num_computing: int) -> float:
    """Return by which factor computing takes longer while some processes compute on the shared cores.

    Example: 3 processes of 1 thread each on 2 cores take 1.5 times as long; 2 processes take no longer.
    """
    if math.isinf(times.cores):
        return 1.0
    return max(1.0, (num_computing * times.core_threads + times.other_cores) / times.cores)


def round_seconds(times: Times, num_peers: int) -> float:
    """Return the seconds of a round of the packer with so many processes in the run."""
    return times.round_seconds + times.round_peer_seconds * num_peers


def train_step(times: Times, costs_of_ranks: list[list[float]]) -> float:
    """Return the seconds of forward, backward and optimizer; ranks wait for the costliest.

    Args:
        times: the figures.
        costs_of_ranks: cost of each micro-batch, by rank.
    """
    ranks = (
        times.micro_batch_seconds * len(costs) + times.train_token_seconds * sum(costs) for costs in costs_of_ranks
    )
    return times.step_seconds + max(ranks, default=0.0)


def lognormal(rng: random.Random, mean: float, spread: float) -> float:
    """Draw a lognormal value of this mean, with standard deviation spread · mean."""
    if not spread or not mean:
        return mean
    variance = math.log1p(spread * spread)
    return math.exp(rng.gauss(math.log(mean) - variance / 2, math.sqrt(variance)))


def largest_of(mean: float, spread: float, number: int) -> float:
    """Return the median of the largest of some lognormal values."""
    if not spread:
        return mean
    variance = math.log1p(spread * spread)
    # the largest of n values is below x with probability P(x)ⁿ
    place = NormalDist().inv_cdf(0.5 ** (1.0 / number))
    return math.exp(math.log(mean) - variance / 2 + math.sqrt(variance) * place)


def completion_lengths(times: Times, seed: int, number: int, longest: int) -> list[int]:
    """Draw the tokens of the completions of a group, from the seed of its ticket; each at least 1.

    Args:
        times: the figures.
        seed: seed of the group, so that the same group has the same lengths in every simulation.
        number: completions of the group.
        longest: `rollout.max_tokens`.
    """
    rng = random.Random(seed)
    mean, spread = times.completion_tokens, times.completion_spread
    return [min(longest, max(1, round(lognormal(rng, mean, spread)))) for _ in range(number)]
