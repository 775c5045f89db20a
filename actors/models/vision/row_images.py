"""Images in packed rows: places, positions on three axes, and features instead of token embeddings.

The model's own forward puts features in their places. Only its search for places is replaced during a call:
transformers looks for the id of image tokens, and a policy may sample this id as any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from actors.models.vision.features import ImageFeatures, seeing_module
from actors.models.vision.positions import ImageSpan


@dataclass(frozen=True)
class PlacedImage:
    """Image in a sample."""

    start: int
    """Index of the image's first token in the sample."""
    digest: str
    """Digest of the image file."""
    features: ImageFeatures

    @property
    def span(self) -> ImageSpan:
        """Place of the image."""
        return self.features.at(self.start)


@dataclass(frozen=True)
class RowImages:
    """Images of a packed row with R tokens."""

    positions_3R: Tensor
    """(3, R) time, height and width of each token in its sample."""
    seen_R: Tensor
    """(R,) True for tokens of images."""
    features: tuple[ImageFeatures, ...]
    """Features of the images in the order of the row; an image in a shared prefix is there once."""

    def padded(self, missing: int) -> "RowImages":
        """Return the images of the row with `missing` tokens of text behind it."""
        positions_3R, seen_R = (nn.functional.pad(x, (0, missing)) for x in (self.positions_3R, self.seen_R))
        return RowImages(positions_3R, seen_R, self.features)

    def forward_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward; see `placing`."""
        layers = zip(*(one.layers_ND for one in self.features), strict=True)
        found = SimpleNamespace(
            pooler_output=tuple(one.tokens_ND for one in self.features), deepstack_features=list(layers)
        )
        return {"position_ids": self.positions_3R[:, None], "mm_encoder_outputs": {"image": found}}


@contextmanager
def placing(model: nn.Module, images: RowImages | None) -> Iterator[None]:
    """Let a forward of the model put features where the row has its images; None changes nothing."""
    if images is None:
        yield
        return
    seeing = seeing_module(model)
    seen = images.seen_R[None, :, None]
    none = torch.zeros_like(seen)
    # an attribute of the object hides the method of its class, until it is deleted
    seeing.get_placeholder_mask = lambda *_, **__: (seen, none)
    try:
        yield
    finally:
        del seeing.get_placeholder_mask
