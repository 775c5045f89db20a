"""Samples of supervised learning: the examples of `trainer.sft.path` as token ids."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.datasets.supervised import KEY, read_supervised
from actors.models.tokenizer import Tokenizer
from schemas.config import RunConfig
from schemas.config.sft import SftConfig
from schemas.errors import ConfigError

Sample = tuple[NDArray[np.int32], int]
"""Token ids of an example, prompt and completion, and the number of tokens of the prompt."""


def tokenized(config: RunConfig, sft: SftConfig) -> list[Sample]:
    """Return all examples as token ids, in the order of the file.

    Args:
        config: configuration of the run.
        sft: section `trainer.sft` of the configuration.

    Raises:
        ConfigError: the file is invalid, or an example is longer than a micro-batch.
    """
    tokenizer, capacity = Tokenizer(config.model), config.packer.sequence_len
    samples: list[Sample] = []
    for number, (prompt, completion) in enumerate(read_supervised(Path(sft.path)), start=1):
        prompt_ids, following = tokenizer.encode(prompt), tokenizer.encode_completion(prompt, completion)
        if not prompt_ids or len(prompt_ids) + len(following) > capacity:
            raise ConfigError(
                f"{KEY}: {sft.path}, example {number} has {len(prompt_ids)} + {len(following)} tokens; the prompt "
                f"needs at least 1, and packer.sequence_len {capacity} must hold both"
            )
        samples.append((np.array([*prompt_ids, *following], np.int32), len(prompt_ids)))
    return samples
