"""Image files as patches: the pixels that a vision tower reads, made by transformers' image processor.

The processor's implementation in Pillow and NumPy is used wherever images are prepared. The implementation in
torchvision resizes with other rounding, so a trainer and an engine with different ones would see different pixels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.models.vision.files import check_pillow, decoded
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError


@dataclass(frozen=True)
class Patches:
    """Pixels of one image as the vision tower reads them."""

    pixels_PD: Tensor
    """(P, D) float32: patches in the order of the tower, each with its channels, frames and pixels."""
    grid_height: int
    """Patches of a column."""
    grid_width: int
    """Patches of a row."""


class ImageReader:
    """Image processor of a model.

    Raises:
        ConfigError: Pillow is not installed, or the model has no preprocessor_config.json.
    """

    def __init__(self, config: ModelConfig) -> None:
        check_pillow()
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(config.path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path: the image processor of {config.path} can't be loaded: {str(error).splitlines()[0]}"
            ) from error

    def read(self, data: bytes) -> Patches:
        """Return the patches of an image file. Equal bytes give equal patches.

        Raises:
            ValueError: the bytes are no image, or one whose longer side is 200 times the shorter.
        """
        made = self._processor(images=[decoded(data)], return_tensors="pt")
        [[frames, height, width]] = made["image_grid_thw"].tolist()
        assert frames == 1
        return Patches(made["pixel_values"].to(torch.float32), height, width)
