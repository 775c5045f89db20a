"""Requests of rollout actors with images: a head in JSON, and behind it the bytes of the images as they are.

    bytes of the head (uint32, little-endian) │ head │ image 0 │ image 1 │ …

The head is a completion request with the bytes of each image, and the places of the images in the prompt. An image that
the prompt shows several times travels once, and all completions share it. A request without images is JSON alone.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator

from actors.datasets.image_header import check_sides, size_of
from actors.datasets.prepared import digest_of
from actors.engines.http.requests import CompletionRequest, parse
from actors.engines.protocol import Completion, PromptImage, RequestError, SampleRequest
from actors.trajectories.forms import AnswerForm
from schemas import limits

CONTENT_TYPE = "application/x-grpo-images"
"""Value of `Content-Type` of such a request."""
HEAD = struct.Struct("<I")

Bytes = Annotated[int, Field(ge=1, le=limits.DATA_FRAME_BYTES)]
Index = Annotated[int, Field(ge=0)]


class ImagesRequest(CompletionRequest):
    """Head of a request with images."""

    prompt_forms: ClassVar[str] = "token ids"

    prompt: list[int]
    image_bytes: list[Bytes] = Field(min_length=1, max_length=limits.IMAGES)
    """Bytes of each image."""
    image_places: list[tuple[Index, Index]] = Field(min_length=1, max_length=limits.LIST_ITEMS)
    """Index of an image's first token in the prompt, and number of the image, in the order of the tokens."""

    _images: tuple[PromptImage, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (total := sum(self.image_bytes)) > limits.IMAGES_BYTES:
            raise ValueError(f"image_bytes: {total} bytes exceed the limit of {limits.IMAGES_BYTES} per request")
        if {image for _, image in self.image_places} != set(range(len(self.image_bytes))):
            raise ValueError(f"image_places: must name each of {len(self.image_bytes)} images, and no other")
        starts = [-1, *(start for start, _ in self.image_places), len(self.prompt)]
        if any(start >= behind for start, behind in pairwise(starts)):
            raise ValueError(f"image_places: must be in order, inside of a prompt of {len(self.prompt)} tokens")
        return self

    @classmethod
    def of_body(cls, body: bytes) -> Self:
        """Return a request with its images. Digests are computed here, from the bytes that have arrived.

        Raises:
            RequestError: the body is invalid; the message starts with the name of the parameter.
        """
        if len(body) < HEAD.size:
            raise RequestError("body: ends before its head")
        (length,) = HEAD.unpack_from(body)
        start = HEAD.size + length
        if length > limits.HTTP_BODY_BYTES or start > len(body):
            raise RequestError(f"body: says that its head has {length} bytes, and has {len(body) - HEAD.size}")
        asked = parse(cls, body[HEAD.size : start])
        if len(body) - start != sum(asked.image_bytes):
            raise RequestError(
                f"image_bytes: are {sum(asked.image_bytes)} together, and {len(body) - start} follow the head"
            )
        files = list[bytes]()
        for number, size in enumerate(asked.image_bytes):
            files.append(body[start : start + size])
            start += size
            _check(files[-1], f"image {number}")
        digests = [digest_of(file) for file in files]
        asked._images = tuple(PromptImage(start, digests[image], files[image]) for start, image in asked.image_places)
        return asked

    def sample_request(
        self,
        prompt_ids: list[int],
        on_piece: Callable[[int, Completion], None] | None = None,
        form: AnswerForm | None = None,
    ) -> SampleRequest:
        """Return the engine's request, with the images."""
        return replace(super().sample_request(prompt_ids, on_piece, form), images=self._images)


def encode(request: Mapping[str, Any], images: Sequence[PromptImage]) -> bytes:
    """Return the body of a request with images.

    Args:
        request: request without images.
        images: images of the prompt in the order of their places.
    """
    files = {image.digest: image.data for image in images}
    numbers = {digest: number for number, digest in enumerate(files)}
    sizes = {
        "image_bytes": [len(data) for data in files.values()],
        "image_places": [(image.start, numbers[image.digest]) for image in images],
    }
    head = json.dumps({**request, **sizes}).encode()
    return b"".join([HEAD.pack(len(head)), head, *files.values()])


def _check(data: bytes, name: str) -> None:
    """Check an image by its header, before an engine decodes it.

    Raises:
        RequestError: the bytes are no still image, or one beyond a limit.
    """
    try:
        height, width = size_of(data)
        check_sides(height, width)
        if height * width > limits.IMAGE_PIXELS:
            raise ValueError(f"has {width} × {height} pixels, and the limit is {limits.IMAGE_PIXELS}")
    except ValueError as error:
        raise RequestError(f"images: {name} {error}") from None
