"""Positions on three axes are those of transformers' get_rope_index."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from actors.models.vision.positions import ImageSpan, image_positions, position_shift
from tests import models

CLASSES = {"qwen3_vl": Qwen3VLForConditionalGeneration, "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration}


@cache
def shapes_of(family: str) -> Any:
    """A model without values: positions need its configuration alone."""
    with torch.device("meta"):
        return CLASSES[family](models.config(family))


def test_the_example_of_the_module() -> None:
    """Two texts, an image of 2 × 3, and a text."""
    found = image_positions(9, [ImageSpan(2, 2, 3)])
    assert found.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert image_positions(3, []).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("family", models.SEEING)
@given(images=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_positions_are_those_of_transformers(family: str, images: list[tuple[int, int, int]]) -> None:
    """For any images with text between them, and the next token's position too."""
    spans, start = [], 0
    for num_text, height, width in images:
        spans.append(ImageSpan(start + num_text, height, width))
        start = spans[-1].end
    length = start + 2
    types = torch.zeros(1, length, dtype=torch.int)
    for span in spans:
        types[0, span.start : span.end] = 1
    grids = torch.tensor([[1, 2 * span.height, 2 * span.width] for span in spans]) if spans else None
    expected, shift = shapes_of(family).model.get_rope_index(
        torch.zeros(1, length, dtype=torch.long), types, image_grid_thw=grids
    )
    assert np.array_equal(image_positions(length, spans), expected[:, 0].numpy())
    assert position_shift(spans) == int(shift)


@pytest.mark.parametrize("spans", [[ImageSpan(2, 2, 2)], [ImageSpan(0, 1, 2), ImageSpan(1, 1, 1)]])
def test_a_span_that_does_not_fit_is_refused(spans: list[ImageSpan]) -> None:
    """Behind the end, or inside another image."""
    with pytest.raises(ValueError, match="does not fit"):
        image_positions(5, spans)
