"""Images of batches as features in packed rows."""

from dataclasses import dataclass

from torch import nn

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
    """Features of the images that batches show.

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
        if self._cache is not None and self._config.trained_vision:
            self._cache.forget()
        if self._known is None or self._known.batch is not batch:
            self._known = _Known(batch, batch.places_of_samples(), [digest_of(image) for image in batch.images])
        known = self._known
        return [[self._placed(known, place) for place in places] for places in known.places[first:last]]

    def _placed(self, known: _Known, place: ImagePlace) -> PlacedImage:
        if self._cache is None:
            self._cache = FeatureCache(self._model, ImageReader(self._config))
        digest = known.digests[place.image]
        try:
            features = self._cache.of(digest, known.batch.images[place.image])
        except ValueError as error:
            raise RunFailedError(f"step {known.batch.step}: {error}") from error
        if (found := features.height * features.width) != place.length:
            raise RunFailedError(
                f"step {known.batch.step}: image {digest} has {place.length} tokens in the prompt and {found} for the "
                f"trainer; rollout actors and trainer must have equal files of the model {self._config.path}"
            )
        return PlacedImage(place.start, digest, features)
