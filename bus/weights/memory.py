"""Where the buckets of a version lie, and how their bytes are marked: the two kinds of broadcast channels."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bus.weights import Weights, buckets
from bus.weights.buckets import Header, PackedWeights

if TYPE_CHECKING:
    import torch


class Memory(Protocol):
    """Memory for the buckets of versions, in trainer and inference actors."""

    @property
    def channel(self) -> Literal["rendezvous", "device"]:
        """Channel of which this is the memory."""
        ...

    @property
    def device(self) -> "torch.device":
        """Device of the buckets."""
        ...

    @property
    def place(self) -> str:
        """Name of the memory: processes with equal names map each other's buckets. Empty: nobody else maps them."""
        ...

    def pack(self, weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> PackedWeights:
        """Copy weights into buckets, tensor by tensor in the given order.

        Args:
            weights: weights of a version, on any device.
            bucket_bytes: most bytes of a bucket; a larger tensor fills a bucket alone.
            spare: buckets of an older version, no longer read; their memory is reused if all sizes fit.
        """
        ...

    def staged(self, sizes: Sequence[int], spare: "Sequence[torch.Tensor]") -> "Sequence[torch.Tensor]":
        """Return memory for buckets of these sizes in bytes. Spare memory is returned if all sizes fit."""
        ...

    def verify(self, key: bytes, number: int, flat: "torch.Tensor", code: bytes) -> None:
        """Check bucket `number` of an unauthenticated wire by its code, made with the version's key.

        Raises:
            ValueError: the bytes differ from the trainer's.
        """
        ...

    def lend(self, flats: "Sequence[torch.Tensor]", key: bytes) -> bytes:
        """Return a handle of a version's buckets, for one process in the same place."""
        ...

    def borrow(self, lent: bytes, key: bytes, flats: "Sequence[torch.Tensor]") -> None:
        """Fill buckets from those that another process has lent.

        Raises:
            ValueError: the handle is not the trainer's, or does not fit.
            OSError: the memory can't be mapped.
        """
        ...

    def share(self, header: Header, flats: "Sequence[torch.Tensor]") -> Callable[[], dict[str, Any]] | None:
        """Return the function of `Weights.share`; None if nobody else maps this memory."""
        ...


class HostMemory:
    """Memory of channel `rendezvous`: host memory of this process alone."""

    channel: Literal["rendezvous"] = "rendezvous"
    place = ""

    @property
    def device(self) -> "torch.device":
        """Device of the buckets: the CPU."""
        import torch

        return torch.device("cpu")

    def pack(self, weights: Weights, bucket_bytes: int, spare: "Sequence[torch.Tensor]" = ()) -> PackedWeights:
        """Copy weights into buckets."""
        return buckets.pack(weights, bucket_bytes, spare)

    def staged(self, sizes: Sequence[int], spare: "Sequence[torch.Tensor]") -> "Sequence[torch.Tensor]":
        """Return memory for buckets."""
        return buckets.staged(sizes, spare)

    def verify(self, key: bytes, number: int, flat: "torch.Tensor", code: bytes) -> None:
        """Check a bucket."""
        buckets.verify(key, number, flat, code)

    def lend(self, flats: "Sequence[torch.Tensor]", key: bytes) -> bytes:
        """Raise: no member of an update is in the place of another."""
        raise NotImplementedError

    def borrow(self, lent: bytes, key: bytes, flats: "Sequence[torch.Tensor]") -> None:
        """Raise, as `lend`."""
        raise NotImplementedError

    def share(self, header: Header, flats: "Sequence[torch.Tensor]") -> None:
        """Return None."""
