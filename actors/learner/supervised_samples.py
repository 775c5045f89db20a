"""Samples of supervised learning: the examples of `trainer.sft.path` as token ids."""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.datasets import prepared_folder
from actors.datasets.images import Image
from actors.datasets.supervised import KEY, SupervisedExample, SupervisedRows
from actors.models.image_tokens import ImageTokens
from actors.models.tokenizer import Tokenizer
from schemas.config import RunConfig
from schemas.config.sft import SftConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import ImagePlace


class Sample(NamedTuple):
    """Example in tokens."""

    token_ids: NDArray[np.int32]
    """Prompt and completion."""
    prompt_length: int
    image_places: tuple[ImagePlace, ...]
    """Places of the images in the prompt, in the order of `digests`."""
    digests: tuple[str, ...]

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens to learn."""
        return self.token_ids.size - self.prompt_length


class SupervisedSamples:
    """All examples in tokens, in the order of the file; images stay in their files.

    Args:
        config: configuration of the run.
        sft: section `trainer.sft` of the configuration.

    Raises:
        ConfigError: the file is invalid, the model takes no images and an example has some, or an example is longer
            than a micro-batch.
    """

    def __init__(self, config: RunConfig, sft: SftConfig) -> None:
        self._config, self._rows = config, SupervisedRows(sft, prepared_folder(config))
        self._image_tokens: ImageTokens | None = None
        tokenizer = Tokenizer(config.model)
        self._samples = [self._tokenized(number, each, tokenizer) for number, each in enumerate(self._rows)]

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """Return an example."""
        return self._samples[index]

    def images(self, index: int) -> tuple[Image, ...]:
        """Return the images of an example, read again.

        Raises:
            RunFailedError: an image is not what it was when the trainer started.
        """
        sample = self._samples[index]
        if not sample.digests:
            return ()
        try:
            images = self._rows.example(index).images
        except ConfigError as error:
            raise RunFailedError(f"{error}; it could be used when the trainer started") from None
        pairs = itertools.zip_longest([image.digest for image in images], sample.digests)
        changed = next((number for number, (now, then) in enumerate(pairs, start=1) if now != then), None)
        if changed is not None:
            raise RunFailedError(
                f"{self._rows.where(index)}: image {changed} has changed since the trainer started; put the file "
                "back, or start the trainer again to learn the new one"
            )
        return images

    def _tokenized(self, index: int, example: SupervisedExample, tokenizer: Tokenizer) -> Sample:
        ids, places = tokenizer.encode(example.prompt), list[ImagePlace]()
        following = tokenizer.encode_completion(example.prompt, example.completion)
        if example.images:
            self._image_tokens = self._image_tokens or ImageTokens.of_model(self._config.model)
            try:
                ids, places = self._image_tokens.expand(ids, [(image.height, image.width) for image in example.images])
            except ValueError as error:
                raise ConfigError(f"{self._rows.where(index)}: the images have no tokens: {error}") from None
        capacity = self._config.packer.sequence_len
        if not ids or len(ids) + len(following) > capacity:
            raise ConfigError(
                f"{KEY}: {self._rows.path}, example {index + 1} has {len(ids)} + {len(following)} tokens; the prompt "
                f"needs at least 1, and packer.sequence_len {capacity} must hold both"
            )
        digests = tuple(image.digest for image in example.images)
        return Sample(np.array([*ids, *following], np.int32), len(ids), tuple(places), digests)
