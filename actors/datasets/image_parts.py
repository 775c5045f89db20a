"""Parts of messages that are images, as in OpenAI's API and in chat templates: found, checked, replaced by a digest."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.datasets.base import is_message
from actors.datasets.images import SOURCES, Image, ImageSource, is_url, named_in
from schemas.errors import ConfigError

IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images."""
Messages = list[dict[str, Any]]


def with_images(
    messages: Messages, in_column: Sequence[Any], source: ImageSource | None, where: str
) -> tuple[Messages, tuple[Image, ...]]:
    """Return messages with `{"type": "image", "digest": …}` in the place of each image, and the images in this order.

    Args:
        messages: messages of a prompt.
        in_column: images of the row's column, for parts without an image of their own. If no message has such a part,
            they stand in front of the first user message, as in TRL.
        source: where images come from; None: they are refused.
        where: the example, for errors.

    Raises:
        ConfigError: a part is neither text nor image, an image can't be used, there are too many, or parts and column
            do not fit together.
    """
    _refuse_other_parts(messages, source, where)
    if source is None:
        return messages, ()
    if in_column and not any(_images_in(messages)):
        messages = _with_places(messages, len(in_column), where)
    places = list(_images_in(messages))
    if not places:
        return messages, ()
    if len(places) > source.keys.max_images:
        raise ConfigError(
            f"{where}: has {len(places)} images, and {source.section}.max_images is {source.keys.max_images}"
        )
    values = enumerate(_values(places, in_column, f"{source.section}.column", where), start=1)
    images = tuple(source.load(value, f"{where}: image {number}") for number, value in values)
    following = iter(images)

    def shown(part: Any) -> Any:
        return {"type": "image", "digest": next(following).digest} if kind_of(part) in IMAGE_TYPES else part

    return [
        message | {"content": [shown(part) for part in content]} if isinstance(content, list) else message
        for message in messages
        for content in [message["content"]]
    ], images


def urls_of(prompt: Any, in_column: Sequence[Any]) -> Iterator[str]:
    """Yield the URLs of a prompt's images. A faulty prompt gives none; its faults are told when the row is read.

    Args:
        prompt: prompt of a row, not checked.
        in_column: images of the row's column.
    """
    messages = prompt if isinstance(prompt, list) and all(map(is_message, prompt)) else []
    for value in (*_images_in(messages), *in_column):
        try:
            named = named_in(value)
        except ValueError:  # a place for an image of the column
            continue
        if is_url(named):
            yield named


def _values(places: Sequence[Mapping[str, Any]], in_column: Sequence[Any], key: str, where: str) -> Iterator[Any]:
    """Yield the value of each image, of its part or of the column."""
    num_open = sum(not SOURCES & _given(part) for part in places)
    if num_open != len(in_column):
        raise ConfigError(
            f"{where}: {num_open} parts of type image name no image, and the row's column has {len(in_column)} ({key})"
        )
    following = iter(in_column)
    yield from (part if SOURCES & _given(part) else next(following) for part in places)


def _given(part: Mapping[str, Any]) -> set[str]:
    return {name for name, value in part.items() if value is not None}


def _images_in(messages: Messages) -> Iterator[Mapping[str, Any]]:
    """Yield the parts that are images."""
    yield from (part for _, part in _parts_of(messages) if kind_of(part) in IMAGE_TYPES)


def _parts_of(messages: Messages) -> Iterator[tuple[int, Any]]:
    """Yield the parts of all messages, each with the number of its message from 1."""
    for number, message in enumerate(messages, start=1):
        if isinstance(message["content"], list):
            yield from ((number, part) for part in message["content"])


def kind_of(part: Any) -> str:
    """Return the type of a part; an object without a type is known by its fields, as in chat templates."""
    if not isinstance(part, dict):
        return "text"
    return str(part.get("type") or next((name for name in IMAGE_TYPES if name in part), "text"))


def _refuse_other_parts(messages: Messages, source: ImageSource | None, where: str) -> None:
    """Refuse parts that no model is trained on.

    Raises:
        ConfigError: there is such a part; names its message and its type.
    """
    known, others = (("text",), "images, audio") if source is None else (("text", *IMAGE_TYPES), "audio")
    for number, part in _parts_of(messages):
        if (kind := kind_of(part)) not in known:
            raise ConfigError(
                f"{where}: message {number} has a part of type {kind!r}; leave out the rows with {others} and video, "
                "which no model is trained on here"
            )


def _with_places(messages: Messages, number: int, where: str) -> Messages:
    """Return messages with places for images in front of the first user message."""
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ConfigError(f"{where}: the row's column has images, and there is no user message for them")
    content = messages[first]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    changed = messages[first] | {"content": [*({"type": "image"} for _ in range(number)), *parts]}
    return [*messages[:first], changed, *messages[first + 1 :]]
