"""Images of requests to a server that gives images their tokens by itself (`actors.models.served_images`)."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from actors.engines.protocol import RequestError, SampleRequest
from actors.models import served_images
from actors.models.tokenizer import model_file
from schemas.config.model import ModelConfig


def image_token(model: ModelConfig) -> int | None:
    """Return the token id of images in a model's prompts, from config.json; None for a model of text alone."""
    settings = json.loads(model_file(model, "config.json").read_text(encoding="utf-8"))
    found = settings.get("image_token_id")
    return found if type(found) is int else None


def check_places(asked: SampleRequest, placeholder: int | None) -> None:
    """Check that each image has tokens at its place.

    Args:
        asked: the request.
        placeholder: token id of images; None: the model sees none.

    Raises:
        RequestError: the model sees no images, or the prompt has no token of an image at a place.
    """
    if asked.images and placeholder is None:
        raise RequestError("images: the model sees none; model.path names a model of text alone")
    for image in asked.images:
        if asked.prompt_ids[image.start : image.start + 1] != [placeholder]:
            raise RequestError(
                f"images: image {image.digest} has no tokens with the id {placeholder} from {image.start} on"
            )


def with_placeholders(asked: SampleRequest) -> list[int]:
    """Return a prompt with one token for each image, in place of all tokens of the image."""
    return served_images.with_placeholders(asked.prompt_ids, _starts(asked))


def urls_of(asked: SampleRequest, pixels: served_images.Pixels) -> list[str]:
    """Return the images of a request as data URLs. May be called from any thread.

    Raises:
        RequestError: an image can't be decoded, or the model's processor is of no known kind.
    """
    with _refused():
        return [pixels.url(image.digest, image.data) for image in asked.images]


def check_strays(asked: SampleRequest, server: str) -> None:
    """Check that a prompt with images has their token at its images alone.

    Raises:
        RequestError: the token is elsewhere too, so the server can't tell which is the place of an image.
    """
    with _refused():
        served_images.check_strays(asked.prompt_ids, _starts(asked), server)


def check_prompt(asked: SampleRequest, found: Sequence[int] | None, server: str) -> None:
    """Check that a server has sampled behind the prompt with images that was asked for.

    Args:
        asked: the request.
        found: token ids of the prompt with the tokens of images, as the server's answer has them.
        server: name of the software.

    Raises:
        RequestError: the prompts differ, or the server does not tell its own.
    """
    with _refused():
        served_images.check_prompt(asked.prompt_ids, _starts(asked), found, server)


def _starts(asked: SampleRequest) -> list[int]:
    return [image.start for image in asked.images]


@contextmanager
def _refused() -> Iterator[None]:
    """Raise what is wrong with images as an error of the request."""
    try:
        yield
    except ValueError as error:
        raise RequestError(f"images: {error}") from error
