"""Positions on three axes of the tokens of a sample with images (M-RoPE of Qwen2-VL and later).

A token of text has the same position on all axes: time, height and width. An image stands at one time; its tokens have
heights and widths of their own, row by row. Text continues behind the longer side of the image:

    text, text, image of 2 × 3, text      time     0 1  2 2 2 2 2 2  5
                                          height   0 1  2 2 2 3 3 3  5
                                          width    0 1  2 3 4 2 3 4  5
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageSpan:
    """Image in a sample: `height × width` tokens from `start` on."""

    start: int
    height: int
    """Rows of tokens: the patches of the image's height ÷ `spatial_merge_size`."""
    width: int
    """Tokens of a row."""

    @property
    def end(self) -> int:
        """Index behind the last token."""
        return self.start + self.height * self.width


def image_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> NDArray[np.int64]:
    """Return time, height and width of each token of a sample, (3, num_tokens).

    Source: `get_rope_index` of transformers' Qwen3-VL and Qwen2.5-VL, for images.

    Args:
        num_tokens: tokens of the sample.
        spans: images in the order of their places.

    Raises:
        ValueError: spans overlap, are out of order, or end behind the sample.
    """
    positions = np.empty((3, num_tokens), np.int64)
    done, position = 0, 0
    for span in spans:
        if not done <= span.start <= span.end <= num_tokens:
            raise ValueError(f"{span} does not fit between token {done} and the end of the sample, {num_tokens}")
        num_text = span.start - done
        positions[:, done : span.start] = np.arange(position, position + num_text)
        position += num_text
        heights, widths = np.divmod(np.arange(span.end - span.start), span.width)
        positions[:, span.start : span.end] = position + np.stack([np.zeros_like(heights), heights, widths])
        done, position = span.end, position + max(span.height, span.width)
    positions[:, done:] = np.arange(position, position + num_tokens - done)
    return positions


def position_shift(spans: Sequence[ImageSpan]) -> int:
    """Return the position of a token of text behind all images, less its index in the sample."""
    return sum(max(span.height, span.width) - span.height * span.width for span in spans)
