"""Images of batches and of supervised examples as features in packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from actors.datasets.images import Image
from actors.datasets.prepared import digest_of
from actors.models.vision.features import FeatureCache
from actors.models.vision.images import ImageReader
from actors.models.vision.row_images import PlacedImage
from schemas.config.model import ModelConfig
from schemas.errors import RunFailedError
from schemas.messages import ImagePlace, StepBatch


@dataclass(frozen=True)
class _Known:
    """Images of a batch: places by sample, and digests."""

    batch: StepBatch
    places: list[list[ImagePlace]]
    digests: list[str]


class BatchImages:
    """Features of the images that batches and supervised examples show.

    Features of a frozen vision tower and projector are computed once per image. If a part is trained, they are computed
    for each micro-batch, once per image in it, by the weights as they are then, and with the gradient of the caller.

    The image processor is loaded with the first image, so a run without images needs none.

    Args:
        model: model with the tower.
        config: configuration of the model.
    """

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self._model, self._config = model, config
        self._cache: FeatureCache | None = None
        self._known: _Known | None = None

    def of(self, batch: StepBatch, first: int, last: int) -> list[list[PlacedImage]]:
        """Return the images of consecutive samples, in the order of their places; empty if the batch has none.

        Args:
            batch: batch of the rank.
            first: number of the first sample.
            last: number behind the last sample.

        Raises:
            ConfigError: the image processor can't be loaded.
            RunFailedError: an image can't be read, or has another number of tokens here than in the batch.
        """
        if not batch.images:
            return []
        self._forget_if_trained()
        if self._known is None or self._known.batch is not batch:
            self._known = _Known(batch, batch.places_of_samples(), [digest_of(image) for image in batch.images])
        known = self._known
        return [
            [self._placed(place, known.digests[place.image], batch.images[place.image], batch.step) for place in places]
            for places in known.places[first:last]
        ]

    def of_examples(
        self, examples: Sequence[tuple[Sequence[ImagePlace], Sequence[Image]]], step: int
    ) -> list[list[PlacedImage]]:
        """Return the images of supervised examples that share a row; empty if none has any.

        Args:
            examples: places and images of each example; a place has the number of its image among those.
            step: number of the step, for errors.

        Raises:
            ConfigError, RunFailedError: as `of`.
        """
        if not any(places for places, _ in examples):
            return []
        self._forget_if_trained()
        return [
            [self._placed(place, images[place.image].digest, images[place.image].data, step) for place in places]
            for places, images in examples
        ]

    def _forget_if_trained(self) -> None:
        if self._cache is not None and self._config.trained_vision:
            self._cache.forget()

    def _placed(self, place: ImagePlace, digest: str, data: bytes, step: int) -> PlacedImage:
        if self._cache is None:
            self._cache = FeatureCache(self._model, ImageReader(self._config))
        try:
            features = self._cache.of(digest, data)
        except ValueError as error:
            raise RunFailedError(f"step {step}: {error}") from error
        if (found := features.height * features.width) != place.length:
            raise RunFailedError(
                f"step {step}: image {digest} has {place.length} tokens in the prompt and {found} for the trainer; "
                f"rollout actors and trainer must have equal files of the model {self._config.path}"
            )
        return PlacedImage(place.start, digest, features)
