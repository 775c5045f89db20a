"""What is sampled from.

An environment gives examples by number; packer and rollout build the same one, so a ticket carries only the number.
"""

from actors.environments.base import Environment, Example
from actors.environments.generated import Arithmetic, ReverseText
from actors.environments.jsonl import Jsonl
from schemas.config.data import ArithmeticConfig, EnvironmentConfig, ReverseTextConfig, Split


def make_environment(config: EnvironmentConfig, split: Split, seed: int) -> Environment:
    """The examples of one split of an environment; the same arguments give the same examples in every process."""
    if isinstance(config, ReverseTextConfig):
        return ReverseText(config, split, seed)
    if isinstance(config, ArithmeticConfig):
        return Arithmetic(config, split, seed)
    return Jsonl(config, split)


__all__ = ["Environment", "Example", "make_environment"]
