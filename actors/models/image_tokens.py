"""Tokens of images in a prompt of Qwen2.5-VL and Qwen3-VL: one placeholder becomes as many as the model sees patches.

The chat template writes one placeholder (`<|image_pad|>`) per image. The processor of transformers repeats it in the
text; here token ids are repeated, which is the same, since a special token is never part of another one. Equal to
`Qwen3VLProcessor` and `Qwen2_5_VLProcessor`, without their packages.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.models.tokenizer import model_file
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.limits import IMAGE_ASPECT_RATIO
from schemas.messages import ImagePlace

SIZE_KEYS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Fields with the smallest and the largest number of pixels: earlier name, and name in a processor's `size`."""
BICUBIC = 3
"""Pillow's number of the filter with which images are resized."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageTokens:
    """Rule for the tokens of images, of one model."""

    placeholder: int
    """Token id of an image's patch (`image_token_id`)."""
    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """Patches of the side of a square that becomes one token."""
    min_pixels: int
    """Pixels to which smaller images are enlarged."""
    max_pixels: int
    """Pixels to which larger images are reduced."""

    @classmethod
    def of_model(cls, model: ModelConfig) -> "ImageTokens":
        """Return the rule of a model, from config.json and from its processor's file.

        Raises:
            ConfigError: the model has no processor of images, or one of another kind; names file and field.
        """
        processor, name = _processor(model)
        size = dict(processor.get("size") or {})
        # as in transformers, min_pixels and max_pixels take precedence
        edges = [processor.get(old) or size.get(new) for old, new in SIZE_KEYS.items()]
        values = {
            "image_token_id": _json(model, "config.json").get("image_token_id"),
            "patch_size": processor.get("patch_size"),
            "merge_size": processor.get("merge_size"),
            "size.shortest_edge": edges[0],
            "size.longest_edge": edges[1],
        }
        numbers = list[int]()
        for key, value in values.items():
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"model.path: {model.path} takes no images of a known kind: {key} in config.json or {name} is "
                    f"{value!r}; Qwen2.5-VL and Qwen3-VL have it"
                )
            numbers.append(value)
        if processor.get("do_resize") is False:
            raise ConfigError(f"model.path: {model.path} has do_resize false in {name}; images must be resized")
        if processor.get("resample", BICUBIC) != BICUBIC:
            raise ConfigError(
                f"model.path: {model.path} has resample {processor['resample']} in {name}, and not {BICUBIC}"
            )
        return cls(*numbers)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the patches of an image along its height and its width, after the processor has resized it.

        Args:
            height, width: pixels.

        Raises:
            ValueError: a side is more than 200 times the other.
        """
        if max(height, width) > IMAGE_ASPECT_RATIO * min(height, width):
            raise ValueError(
                f"{width} × {height} pixels: a side is more than {IMAGE_ASPECT_RATIO} times the other, which the "
                "model's processor refuses"
            )
        # of `smart_resize` in transformers; round() is to even, as there
        factor = self.patch_size * self.merge_size
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrinks = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrinks / factor)) for side in (height, width))
        elif rows * columns * factor**2 < self.min_pixels:
            grows = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grows / factor) for side in (height, width))
        return rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image, of a size in pixels; errors as for `grid`."""
        rows, columns = self.grid(height, width)
        return rows * columns // self.merge_size**2

    def expand(self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[list[int], list[ImagePlace]]:
        """Return token ids with as many placeholders for each image as it has tokens, and the places of the images.

        Args:
            token_ids: prompt with one placeholder per image.
            sizes: height and width of each image in pixels, in the order of the placeholders.

        Returns:
            The expanded token ids, and a place per image. `ImagePlace.image` counts images in the order of `sizes`.

        Raises:
            ValueError: there are more or fewer placeholders than images, or an image has sides that are too different.
        """
        places = [place for place, token in enumerate(token_ids) if token == self.placeholder]
        if len(places) != len(sizes):
            raise ValueError(
                f"the chat template has written {len(places)} placeholders for {len(sizes)} images; a text must not "
                "contain the placeholder, and the template must know images"
            )
        expanded, found, end = list[int](), list[ImagePlace](), 0
        for image, (place, size) in enumerate(zip(places, sizes, strict=True)):
            expanded += token_ids[end:place]
            length, end = self.num_tokens(*size), place + 1
            found.append(ImagePlace(image=image, start=len(expanded), length=length))
            expanded += [self.placeholder] * length
        return [*expanded, *token_ids[end:]], found


def _processor(model: ModelConfig) -> tuple[dict[str, Any], str]:
    """Return the keys of a model's processor of images, and the name of their file."""
    for name in PROCESSOR_FILES:
        try:
            found = _json(model, name)
        except ConfigError:  # the other file, or the error below
            continue
        return dict(found.get("image_processor") or found), name
    raise ConfigError(f"model.path: {model.path} takes no images: it has neither {' nor '.join(PROCESSOR_FILES)}")


def _json(model: ModelConfig, name: str) -> dict[str, Any]:
    file = model_file(model, name)
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.path: {file} can't be read: {error}") from None
