"""Weight channels: how one published version of the policy reaches the engines.

A channel is two small classes: a publisher in the trainer and a receiver in the inference actor. The packer carries
the `Manifest` between them and never sees a tensor.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from schemas.messages import Manifest, Policy

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """Tensors under their Hugging Face (or PEFT) names, and the small text files that describe them."""

    content: Literal["full", "adapter"]
    tensors: "dict[str, torch.Tensor]"
    files: dict[str, str] = field(default_factory=dict)


class WeightPublisher(Protocol):
    """The trainer's end."""

    def publish(self, policy: Policy, weights: Weights) -> Manifest:
        """Make a version available; returns when receivers may ask for it."""
        ...

    def published(self) -> list[Manifest]:
        """The versions that can still be received, oldest first."""
        ...

    def prune(self, keep_version: int) -> None:
        """Let old versions go, but none from `keep_version` on."""
        ...

    def close(self) -> None:
        """Let all versions go: the run is done, and its checkpoints are elsewhere."""
        ...


class WeightReceiver(Protocol):
    """The inference actor's end."""

    def receive(self, manifest: Manifest) -> Weights:
        """The weights of this version, checked against the manifest's digest."""
        ...
