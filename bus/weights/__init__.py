"""Weight channels: how one published version of the policy reaches the engines.

A channel is two small classes: a publisher in the trainer and a receiver in the inference actor. The packer carries
the `Manifest` between them and never sees a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from schemas.messages import Manifest, Policy, WeightUpdate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """Tensors under their Hugging Face (or PEFT) names, and the small text files that describe them."""

    content: Literal["full", "adapter"]
    tensors: "dict[str, torch.Tensor]"
    files: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    """Where they lie as files, if they do: for engines that read files themselves."""


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


class UpdateAbandonedError(Exception):
    """The update was given up: a newer one is named, a member is gone or too late, or the actor ends.

    Args:
        missed: boot ids of the members that are behind the others, where that is known.
    """

    def __init__(self, message: str, missed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missed = list(missed)


@runtime_checkable
class BroadcastPublisher(WeightPublisher, Protocol):
    """A trainer's end that must itself be there when a version is received."""

    def send(self, update: WeightUpdate, check: Callable[[], object]) -> None:
        """Broadcast the version that an update names; returns when every member has checked all of it.

        Args:
            check: called while waiting; raises UpdateAbandonedError to give up.

        Raises:
            UpdateAbandonedError: it was given up.
        """
        ...


class WeightReceiver(Protocol):
    """The inference actor's end."""

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """The weights of this version, checked by its manifest; they may lie in memory that the next call overwrites.

        Args:
            update: by which they come; None where the channel needs none.
            check: called while waiting; raises UpdateAbandonedError to give up.

        Raises:
            ValueError: they are not what the trainer published.
            OSError: they can't be read.
            UpdateAbandonedError: the update was given up.
        """
        ...
