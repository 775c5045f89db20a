"""Versions of the weights in an external server, and labels to tell which version sampled a token.

The server labels sampled tokens and returns spans of labels:

    spans     {"version": "b7f0:1.4.5", "start": 0, "end": 12}, {"version": "b7f0:1.5.6", "start": 12, "end": 40}
    segments  [(0, 1, 4), (12, 1, 5)]

The engine sets the label with each update: boot id, the policy, and the number of the update, so that the same
policy loaded twice is two versions. An unknown label means: another process has changed the weights, or another server
answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.engines.protocol import Segment
from schemas.messages import PolicyVersion

ADAPTER_PREFIX = "policy-"
"""Prefix of the adapter names of all versions: it marks leftovers of earlier engines."""


class UnknownWeightsError(Exception):
    """Answer sampled by weights not loaded by this engine. Without a known policy the answer is dropped."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights loaded into the server, with the derived names.

    Args:
        boot: boot id of the engine.
        update: number of the engine's update.
    """

    boot: str
    policy: PolicyVersion | None
    """Policy of the weights; None for the weights with which the server started."""
    update: int

    @property
    def name(self) -> str:
        """Name of the version, also the salt of the prefix cache: no two versions share keys and values."""
        return f"{self.policy or 'base'}.{self.update}"

    @property
    def label(self) -> str:
        """Label of the tokens sampled by these weights."""
        # the boot id tells these labels from those of earlier engines
        return f"{self.boot}:{self.name}"

    @property
    def adapter(self) -> str:
        """Name of the adapter in the server."""
        return f"{ADAPTER_PREFIX}{self.name}"


def segments_of(spans: Sequence[Mapping[str, Any]] | None, labels: Mapping[str, PolicyVersion | None]) -> list[Segment]:
    """Return the segments of an answer from the spans of labels. Spans of the model without a policy make no segment.

    Raises:
        UnknownWeightsError: a label was not set by this engine, or there are no spans.
    """
    if spans is None:
        raise UnknownWeightsError("the server does not say which weights sampled")
    segments: list[Segment] = []
    for span in spans:
        if span["version"] not in labels:
            raise UnknownWeightsError(f"sampled by weights {span['version']!r}, which this engine did not load")
        policy = labels[span["version"]]
        # consecutive labels of the same policy (loaded twice) make one segment
        if policy is not None and (not segments or segments[-1][1:] != (policy.lineage, policy.version)):
            segments.append((span["start"], policy.lineage, policy.version))
    return segments
