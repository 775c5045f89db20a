"""Weight channels, from the trainer to the engines, for published versions of the policy.

A channel is a publisher in the trainer and a receiver in each inference actor. The packer passes the `Manifest`
on and never sees a tensor. `bus.weights.filesystem` writes files. `bus.weights.rendezvous` broadcasts, from host memory
or, as channel `device`, from the device of the trainer (`bus.weights.device_memory`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from schemas.messages import Manifest, PolicyVersion, WeightUpdate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """Tensors of a version under their Hugging Face (or PEFT) names, and small text files that describe them."""

    content: Literal["full", "adapter"]
    """`full`: all weights of the model. `adapter`: the weights of a LoRA adapter."""
    tensors: "dict[str, torch.Tensor]"
    files: dict[str, str] = field(default_factory=dict)
    """Texts by file name; only names in FILES."""
    directory: str = ""
    """Directory with the same weights as files, for engines that read files; empty: none."""
    share: Callable[[], dict[str, Any]] | None = None
    """Returns the arguments `handle` and `tensors` with which processes on the same device map the same weights
    (`bus.weights.inside`); None: nobody else can."""


FILES: Mapping[str, frozenset[str]] = {"full": frozenset(), "adapter": frozenset({"adapter_config.json"})}
"""Allowed names in `Weights.files`, by content. Names may come from a peer, and become names of files."""


def check_files(content: str, files: object) -> None:
    """Check the content and the small text files of weights from a peer.

    Raises:
        ValueError: the content is unknown, a file name is not in FILES, or a file is no text.
    """
    if content not in FILES:
        raise ValueError(f"{content!r} is no content of weights; allowed are: {', '.join(FILES)}")
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError("the files of the weights are no texts by name")
    if unknown := sorted(map(str, files.keys() - FILES[content])):
        allowed = ", ".join(sorted(FILES[content])) or "none"
        raise ValueError(f"{content!r} weights come with the files {unknown}, allowed are: {allowed}")


class WeightPublisher(Protocol):
    """The trainer's end of a channel."""

    def publish(self, policy: PolicyVersion, weights: Weights) -> Manifest:
        """Make a version available. Return its manifest when receivers can ask for the version.

        Raises:
            OSError: there is no room for the version now; a later call may succeed.
        """
        ...

    def published(self) -> list[Manifest]:
        """Return the manifests of all versions still available, oldest first."""
        ...

    def prune(self, keep_version: int) -> None:
        """Remove old versions, but none from `keep_version` on."""
        ...

    def close(self) -> None:
        """Remove all versions: the run is done, and its checkpoints are elsewhere."""
        ...

    def leave(self) -> None:
        """Release the channel to a successor: this trainer stops, and the run may go on."""
        ...


class UpdateAbandonedError(Exception):
    """An update was given up: a newer update is named, a member is gone or too late, or the actor stops.

    Args:
        message: reason as a text.
        missed: boot ids of members behind the others; empty if unknown.
    """

    def __init__(self, message: str, missed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missed = list(missed)


@runtime_checkable
class BroadcastPublisher(WeightPublisher, Protocol):
    """A trainer's end that sends while receivers receive."""

    def send(self, update: WeightUpdate, check: Callable[[], object]) -> None:
        """Broadcast the version of an update. Return when every member has checked all bytes.

        Args:
            update: the version and its members.
            check: called again and again while waiting; raises UpdateAbandonedError to give up.

        Raises:
            UpdateAbandonedError: the update was given up.
        """
        ...


class WeightReceiver(Protocol):
    """The inference actor's end of a channel."""

    def receive(self, manifest: Manifest, update: WeightUpdate | None, check: Callable[[], object]) -> Weights:
        """Return the weights of a version, checked against its manifest.

        The next call may overwrite the memory of the tensors.

        Args:
            manifest: manifest of the version, from the packer.
            update: the update for this version; None for channels without updates.
            check: called again and again while waiting; raises UpdateAbandonedError to give up.

        Raises:
            ValueError: the bytes differ from the published version.
            OSError: the version can't be read.
            UpdateAbandonedError: the update was given up.
        """
        ...
