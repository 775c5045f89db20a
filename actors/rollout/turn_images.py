"""Images of one trajectory: files out of an environment's messages, their limits, and their tokens."""

from collections.abc import Sequence

from actors.datasets.image_parts import IMAGE_TYPES, kind_of
from actors.datasets.images import Image, ImageSource
from actors.datasets.prompts import Expand
from actors.trajectories.bridges import Message
from actors.trajectories.images import ImagesError, ShownImage, parts_of
from schemas import limits
from schemas.config.images import ImageLimitsConfig, ImagesConfig
from schemas.errors import ConfigError

LOWER = "lower packer.groups_per_step or rollout.group_size"


def share_bytes(groups_per_step: int, group_size: int) -> int:
    """Return the bytes that the images of one trajectory may have together: a fixed share of those of a step."""
    return limits.IMAGES_BYTES // (groups_per_step * group_size)


class TurnImages:
    """Images of one trajectory, kept by digest. Implements `actors.trajectories.images.MessageImages`.

    A trajectory has a fixed share of what travels in a step, so that no other trajectory decides which of its images
    are taken.

    Args:
        keys: limits of the environment.
        groups_per_step: groups of a step.
        group_size: trajectories of the group.
        expand: function that gives images their tokens; None: images are refused.
        why_not: why images are refused.
    """

    def __init__(
        self, keys: ImageLimitsConfig, groups_per_step: int, group_size: int, expand: Expand | None, why_not: str = ""
    ) -> None:
        self._source = ImageSource(ImagesConfig(**keys.model_dump()), None, takes_urls=False)
        self._expand, self._why_not = expand, why_not
        self._max_images = keys.max_images
        self._share = min(limits.LIST_ITEMS // (groups_per_step * group_size), limits.GROUP_IMAGES // group_size)
        self._share_bytes = share_bytes(groups_per_step, group_size)
        self._images: dict[str, Image] = {}
        self._num_places = 0

    def data(self, digest: str) -> bytes:
        """Return the file of an image that a message has shown."""
        return self._images[digest].data

    def known(self, message: Message) -> Message:
        """Return a message with `{"type": "image", "digest": …}` in the place of each image, whose file is kept.

        Raises:
            ImagesError: a part is neither text nor image, or an image can't be used.
        """
        if not (parts := parts_of(message)):
            return message
        where = f"a message of the role {message.get('role')}"
        shown = list[object]()
        for part in parts:
            kind = kind_of(part)
            if kind in IMAGE_TYPES:
                shown.append({"type": "image", "digest": self._digest(part, where)})
            elif kind == "text":
                shown.append(part)
            else:
                raise ImagesError(f"{where} has a part of type {kind!r}; text and images are what a model is shown")
        return message | {"content": shown}

    def expand(self, messages: Sequence[Message], token_ids: list[int]) -> tuple[list[int], list[ShownImage]]:
        """Return the tokens of messages with as many placeholders for each image as it has tokens, and the places.

        Raises:
            ImagesError: there are more or fewer placeholders than images, or too many places in the trajectory.
        """
        digests = [p["digest"] for one in messages for p in parts_of(one) if kind_of(p) in IMAGE_TYPES]
        if not digests or self._expand is None:
            return token_ids, []
        images = [self._images[digest] for digest in digests]
        self._check_places(len(images))
        try:
            expanded, places = self._expand(token_ids, [(image.height, image.width) for image in images])
        except ConfigError:
            raise  # of the model's files: the same for all trajectories
        except ValueError as error:
            raise ImagesError(f"the images of a message have no tokens: {error}") from None
        return expanded, [ShownImage(one.start, one.length, digests[one.image]) for one in places]

    def _digest(self, part: object, where: str) -> str:
        """Return the digest of a part's image, whose file is kept from now on."""
        if isinstance(part, dict) and part.keys() == {"type", "digest"} and part["digest"] in self._images:
            return str(part["digest"])
        if self._expand is None:
            raise ImagesError(f"{where} has an image; {self._why_not}")
        try:
            image = self._source.load(part, f"{where} has an image that")
        except ConfigError as error:
            raise ImagesError(str(error)) from None
        if image.digest not in self._images:
            self._check_room(image, where)
            self._images[image.digest] = image
        return image.digest

    def _check_room(self, image: Image, where: str) -> None:
        """Check that one more image fits.

        Raises:
            ImagesError: names the limit, and the key to change.
        """
        if len(self._images) == self._max_images:
            raise ImagesError(
                f"{where} has one more image than the {self._max_images} of environments[].images.max_images, which "
                "count all turns of a trajectory"
            )
        num_bytes = sum(len(one.data) for one in self._images.values()) + len(image.data)
        if num_bytes > self._share_bytes:
            raise ImagesError(
                f"{where} has an image with which those of the trajectory have {num_bytes} bytes, and its share of "
                f"what travels with a step is {self._share_bytes}; return smaller images, or {LOWER}"
            )

    def _check_places(self, number: int) -> None:
        """Count the places of images, those in each branch of the trajectory as well.

        Raises:
            ImagesError: there are too many.
        """
        self._num_places += number
        if self._num_places > self._share:
            raise ImagesError(
                f"a trajectory shows images {self._num_places} times, and its share of what travels with a step is "
                f"{self._share}; show fewer, or {LOWER}"
            )
