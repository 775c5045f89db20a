"""Features of images: what stands in the place of token embeddings, computed by vision tower and projector."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actors.models.vision.images import ImageReader, Patches
from actors.models.vision.parts import VISION
from actors.models.vision.positions import ImageSpan

CACHE_BYTES = 1 << 30
"""Bytes of features that a cache keeps."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image with N = height × width tokens, in the precision of the tower."""

    tokens_ND: Tensor
    """(N, D) in place of the embeddings of the image's tokens."""
    layers_ND: tuple[Tensor, ...]
    """(N, D) each, added to the hidden states behind one of the first language layers (Qwen3-VL's deepstack)."""
    height: int
    """Rows of tokens."""
    width: int
    """Tokens of a row."""

    def at(self, start: int) -> ImageSpan:
        """Return the place of the image in a sample whose token `start` is the image's first."""
        return ImageSpan(start, self.height, self.width)

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        return sum(x.numel() * x.element_size() for x in (self.tokens_ND, *self.layers_ND))


def seeing_module(model: nn.Module) -> Any:
    """Return the module of transformers that joins vision tower and language layers, under an adapter too."""
    return next(module for module in model.modules() if VISION in module._modules)


def image_features(model: nn.Module, patches: Patches) -> ImageFeatures:
    """Return the features of one image, with a gradient if a part of vision tower or projector is trained.

    Each image is computed alone and without autocast, so that its features have the same bits in trainer and engine,
    whichever images come with it.
    """
    seeing = seeing_module(model)
    weight = next(seeing.visual.parameters())
    grid = torch.tensor([[1, patches.grid_height, patches.grid_width]], device=weight.device)
    is_trained = any(parameter.requires_grad for parameter in seeing.visual.parameters())
    with (
        torch.set_grad_enabled(is_trained and torch.is_grad_enabled()),
        torch.autocast(weight.device.type, enabled=False),
    ):
        found = seeing.get_image_features(patches.pixels_PD.to(weight.device), grid, return_dict=True)
    merge = int(seeing.config.vision_config.spatial_merge_size)
    return ImageFeatures(
        tokens_ND=torch.cat(list(found.pooler_output)),
        layers_ND=tuple(torch.cat(list(layer)) for layer in getattr(found, "deepstack_features", None) or ()),
        height=patches.grid_height // merge,
        width=patches.grid_width // merge,
    )


class FeatureCache:
    """Features by the digest of an image file. They hold until the weights that compute them change.

    Args:
        model: model with the tower.
        reader: image processor of the model.
        max_bytes: bytes to keep; the features unused for longest go first.
    """

    def __init__(self, model: nn.Module, reader: ImageReader, max_bytes: int = CACHE_BYTES) -> None:
        self._model, self._reader, self._max_bytes = model, reader, max_bytes
        self._kept: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._num_bytes = 0
        self.num_computed = 0
        """Images that have been computed."""

    def forget(self) -> None:
        """Drop all features. Call after a change of the weights of vision tower or projector."""
        self._kept.clear()
        self._num_bytes = 0

    def of(self, digest: str, data: bytes) -> ImageFeatures:
        """Return the features of an image file.

        Args:
            digest: digest of the bytes.
            data: bytes of the file.

        Raises:
            ValueError: the bytes are no image; names the digest.
        """
        found = self._kept.get(digest)
        if found is None:
            try:
                patches = self._reader.read(data)
            except ValueError as error:
                raise ValueError(f"image {digest}: {error}") from error
            found = self._kept[digest] = image_features(self._model, patches)
            self.num_computed += 1
            self._num_bytes += found.num_bytes
        self._kept.move_to_end(digest)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._num_bytes -= gone.num_bytes
        return found
