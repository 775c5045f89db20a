"""Samples with images for the tiny models, and transformers' own forward of them."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from actors.models import loading
from actors.models.vision.features import FeatureCache
from actors.models.vision.images import ImageReader
from actors.models.vision.row_images import PlacedImage
from schemas.config.model import ModelConfig
from tests import models

Piece = int | bytes
"""Token, or image file."""


def model_config(folder: Path, **keys: Any) -> ModelConfig:
    """Configuration of a tiny model on the CPU."""
    return ModelConfig.model_validate({"path": str(folder), "dtype": "float32", "device": "cpu"} | keys)


@dataclass(frozen=True)
class Seen:
    """Prompt with images, as ids and as what transformers' forward wants."""

    ids: list[int]
    images: list[PlacedImage]
    pixels: torch.Tensor
    grids: torch.Tensor

    def types(self, length: int) -> torch.Tensor:
        """1 for tokens of images."""
        found = torch.zeros(1, length, dtype=torch.int)
        for image in self.images:
            found[0, image.span.start : image.span.end] = 1
        return found


def seen(pieces: list[Piece], cache: FeatureCache, reader: ImageReader) -> Seen:
    """A prompt of tokens and images; each image is between its start and end tokens."""
    ids: list[int] = []
    images, pixels, grids = [], [], []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        patches, digest = reader.read(piece), sha256(piece).hexdigest()
        features = cache.of(digest, piece)
        ids.append(models.VISION_START)
        images.append(PlacedImage(len(ids), digest, features))
        ids += [models.IMAGE] * len(features.tokens_ND) + [models.VISION_END]
        pixels.append(patches.pixels_PD)
        grids.append([1, patches.grid_height, patches.grid_width])
    return Seen(ids, images, torch.cat(pixels) if pixels else torch.empty(0), torch.tensor(grids))


def plain_logprobs(model: Any, prompt: Seen, completion: list[int]) -> torch.Tensor:
    """Logprobs of a completion by transformers' own forward of pixels and ids of this one sample."""
    ids = torch.tensor([prompt.ids + completion])
    more: dict[str, Any] = {}
    if prompt.images:
        more = {
            "pixel_values": prompt.pixels,
            "image_grid_thw": prompt.grids,
            "mm_token_type_ids": prompt.types(ids.shape[1]),
        }
    logits = model(ids, **more).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def loaded(folder: Path, **keys: Any) -> tuple[Any, ImageReader, FeatureCache]:
    """The model for packed rows, its image processor, and a cache of features."""
    config = model_config(folder, **keys)
    model, reader = loading.load_model(config, torch.float32), ImageReader(config)
    return model, reader, FeatureCache(model, reader)
