"""Keys of the images of prompts."""

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from schemas.config.base import Section
from schemas.config.origins import origin_of
from schemas.limits import DATA_FRAME_BYTES, IMAGE_PIXELS, IMAGES, IMAGES_BYTES


class ImageLimitsConfig(Section):
    """Limits of images, checked before an image is decoded."""

    max_images: int = Field(8, ge=1, le=IMAGES)
    """Greatest number of images of a prompt; with an environment, of all turns of a trajectory."""
    max_bytes: int = Field(8 << 20, ge=1, le=DATA_FRAME_BYTES)
    """Bytes of the largest image, as its file has them."""
    max_pixels: int = Field(16_777_216, ge=1, le=IMAGE_PIXELS)
    """Pixels (width × height) of the largest image, before the model's processor resizes it. A decoded image takes 3
    bytes per pixel, and 12 as numbers."""

    @model_validator(mode="after")
    def _fit_into_a_message(self) -> Self:
        if self.max_images * self.max_bytes > IMAGES_BYTES:
            raise ValueError(
                f"max_images {self.max_images} × max_bytes {self.max_bytes} are more than {IMAGES_BYTES} bytes, the "
                "most that travel with a group; lower one of them"
            )
        return self


class ImagesConfig(ImageLimitsConfig):
    """Images of prompts: their column, their origins, and limits that are checked before an image is decoded."""

    column: str = ""
    """Column with the images of a row: one image, or a list of images. Its images take the places of parts
    `{type: image}` in the messages; without such parts they stand in front of the first user message. Empty: images
    stand in the parts of messages alone."""
    origins: list[str] = []
    """Origins from which images at URLs are downloaded when the data is opened, as in `https://data.example.com` or
    `http://localhost:8000` (http on this machine alone). The run keeps the files. Empty: rows with URLs are
    refused."""

    @field_validator("origins")
    @classmethod
    def _in_normal_form(cls, origins: list[str]) -> list[str]:
        return [_normal(origin) for origin in origins]


def _normal(given: str) -> str:
    try:
        origin = origin_of(given)
    except ValueError as error:
        raise ValueError(f"{given!r} {error}") from None
    if urlsplit(given)[2:] not in (("", "", ""), ("/", "", "")):
        raise ValueError(f"{given!r} is more than an origin; write {origin}")
    return origin
