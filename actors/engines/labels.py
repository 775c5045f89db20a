"""Weights as a server of others has them, and the labels by which it says which of them sampled a token.

The server labels what it samples, and its answers come with spans of labels:

    spans     {"version": "b7f0:1.4.5", "start": 0, "end": 12}, {"version": "b7f0:1.5.6", "start": 12, "end": 40}
    segments  [(0, 1, 4), (12, 1, 5)]

The label is set by the engine with each update: its boot id, the policy, and a number of the update, so that one
policy that is loaded twice is two versions. A label that the engine has not set means that somebody else has changed
the weights, or that another server answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.engines.protocol import Segment
from schemas.messages import Policy

ADAPTER_PREFIX = "policy-"


class UnknownWeightsError(Exception):
    """The answer was not sampled by weights that this engine has loaded: it is nobody's."""


@dataclass(frozen=True)
class Version:
    """Weights as the server has them, and everything that is named after them."""

    boot: str
    policy: Policy | None
    """None: as the server has started with."""
    update: int

    @property
    def name(self) -> str:
        """Salt of the prefix cache: no two versions share keys and values."""
        return f"{self.policy or 'base'}.{self.update}"

    @property
    def label(self) -> str:
        """Of the tokens that these weights sample."""
        return f"{self.boot}:{self.name}"

    @property
    def adapter(self) -> str:
        """As the server knows it."""
        return f"{ADAPTER_PREFIX}{self.name}"


def segments_of(spans: Sequence[Mapping[str, Any]] | None, labels: Mapping[str, Policy | None]) -> list[Segment]:
    """Which policy sampled from which token on.

    Raises:
        UnknownWeightsError: a label was not set by us, or there is none.
    """
    if spans is None:
        raise UnknownWeightsError("the server does not say which weights sampled")
    segments: list[Segment] = []
    for span in spans:
        if span["version"] not in labels:
            raise UnknownWeightsError(f"sampled by weights {span['version']!r}, which this engine did not load")
        policy = labels[span["version"]]
        if policy is not None and (not segments or segments[-1][1:] != (policy.lineage, policy.version)):
            segments.append((span["start"], policy.lineage, policy.version))
    return segments
