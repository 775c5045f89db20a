"""Images in the messages of a trajectory: their places in its tokens, and the interface to their files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.trajectories.bridges import BridgeError, Message


class ImagesError(BridgeError):
    """Message with a part that the model can't be shown. The text says what to change."""


@dataclass(frozen=True)
class ShownImage:
    """Image in the tokens of a prompt or a sample: a run of equal placeholder tokens."""

    start: int
    """Index of the first placeholder."""
    length: int
    """Number of placeholders."""
    digest: str
    """Digest of the image file."""

    def moved(self, tokens: int) -> "ShownImage":
        """Return the image with `tokens` more tokens in front of it."""
        return replace(self, start=self.start + tokens)


class MessageImages(Protocol):
    """Images of one trajectory."""

    def data(self, digest: str) -> bytes:
        """Return the file of an image that a message has shown."""
        ...

    def known(self, message: Message) -> Message:
        """Return a message with `{"type": "image", "digest": …}` in the place of each image, whose file is kept.

        Raises:
            ImagesError: a part is neither text nor image, or an image can't be used.
        """
        ...

    def expand(self, messages: Sequence[Message], token_ids: list[int]) -> tuple[list[int], list[ShownImage]]:
        """Return the tokens of messages with as many placeholders for each image as it has tokens, and the places.

        Args:
            messages: messages as `known` returns them.
            token_ids: tokens of the messages, with one placeholder for each image.

        Raises:
            ImagesError: there are more or fewer placeholders than images.
        """
        ...


class TextAlone:
    """Images of trajectories that show none: each part of a message must be text."""

    def data(self, digest: str) -> bytes:
        """Raise KeyError: there is no image."""
        raise KeyError(digest)

    def known(self, message: Message) -> Message:
        """Return the message itself.

        Raises:
            ImagesError: the message has a part that is no text; names its type. A template may write a placeholder
                for it, and the model would see nothing there.
        """
        for part in parts_of(message):
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise ImagesError(
                    f"a message of the role {message.get('role')} has a part of type {kind!r}, and trajectories are "
                    "trained on text alone: have the environment describe it in words, or leave it out"
                )
        return message

    def expand(self, messages: Sequence[Message], token_ids: list[int]) -> tuple[list[int], list[ShownImage]]:
        """Return the tokens as they are."""
        return token_ids, []


def shows_images(messages: Sequence[Message]) -> bool:
    """Return whether messages, as `known` returns them, have images."""
    parts = (part for message in messages for part in parts_of(message))
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def parts_of(message: Message) -> list[Any]:
    """Return the parts of a message's content; none if the content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []
