"""Images in packed rows, compared with transformers' own forward of each sample alone."""

from typing import Any

import numpy as np
import pytest
import torch

from actors.models.attention import PackedRow, pack_row
from actors.models.token_logprobs import TokenLogprobs
from tests import models
from tests.actors.models.vision.seeing import Piece, Seen, loaded, plain_logprobs, seen
from tests.conftest import ModelFolder
from tests.images import png

SMALL, WIDE, LARGE = png(8, 8), png(16, 40, seed=1), png(64, 50, seed=2)
"""1, 10 and 12 tokens."""
GROUPS: list[tuple[list[Piece], list[list[int]]]] = [
    ([1, 5, SMALL, 6, WIDE, 7], [[8, 9, 10, 2], [11, 2], [12, 13, 14]]),
    ([1, 20, 21], [[22, 2], [23, 24, 25]]),
    ([1, LARGE], [[8, 2], [9, 10]]),
]
"""Two images of unlike sizes, none, and one at the end of its prompt, each with several completions."""


def packed(groups: list[tuple[Seen, list[list[int]]]], shares: bool = True) -> tuple[PackedRow, torch.Tensor]:
    """One row of all samples, and the completion tokens."""
    ids, images, prompts, shared, chosen = [], [], [], [], []
    offsets = [0]
    for prompt, completions in groups:
        for number, completion in enumerate(completions):
            ids += prompt.ids + completion
            images.append(prompt.images)
            prompts.append(len(prompt.ids))
            shared.append(len(prompt.ids) if number and shares else 0)
            offsets.append(len(ids))
            chosen += completion
    row = pack_row(
        np.array(ids, np.int32), np.array(offsets), np.array(prompts), shared, torch.device("cpu"), images=images
    )
    return row, torch.tensor(chosen)


@pytest.mark.parametrize("shares", [True, False], ids=["shared prompts", "whole samples"])
@pytest.mark.parametrize("family", models.SEEING)
def test_packed_rows_with_images_have_transformers_logprobs(
    model_folder: ModelFolder, family: str, shares: bool
) -> None:
    """Mixed with text alone; a shared prompt has its images once in the row, and pads of the row change nothing."""
    model, reader, cache = loaded(model_folder(family))
    groups = [(seen(pieces, cache, reader), completions) for pieces, completions in GROUPS]
    row, chosen = packed(groups, shares)
    assert row.images is not None
    assert len(row.images.features) == (3 if shares else 8)
    plain = models.plain(model_folder(family))
    with torch.no_grad():
        found, _ = TokenLogprobs(model).of(row, chosen, None)
        in_padded_row, _ = TokenLogprobs(model).of(row.padded(len(row.token_ids_R) + 9), chosen, None)
        expected = torch.cat([plain_logprobs(plain, prompt, one) for prompt, many in groups for one in many])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(in_padded_row, expected, rtol=0, atol=1e-5)


def test_a_sampled_image_token_is_text(model_folder: ModelFolder) -> None:
    """A policy may sample the id that stands for an image's tokens; features still go to the prompt's image."""
    model, reader, cache = loaded(model_folder("qwen3_vl"))
    prompt = seen([1, WIDE, 5], cache, reader)
    row, chosen = packed([(prompt, [[6, models.IMAGE, 7, 8]])])
    plain = models.plain(model_folder("qwen3_vl"))
    usual, given = plain.model.get_placeholder_mask, torch.zeros(1, len(prompt.ids) + 4, 1, dtype=torch.bool)
    given[0, prompt.images[0].span.start : prompt.images[0].span.end] = True
    plain.model.get_placeholder_mask = lambda *a, **k: (given, torch.zeros_like(given))
    with torch.no_grad():
        found, _ = TokenLogprobs(model).of(row, chosen, None)
        expected = plain_logprobs(plain, prompt, [6, models.IMAGE, 7, 8])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        # transformers' own search would have found one place too many
        plain.model.get_placeholder_mask = usual
        with pytest.raises(ValueError, match="do not match"):
            plain_logprobs(plain, prompt, [6, models.IMAGE, 7, 8])


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients by name of parameter, and no gradient kept in the model."""
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", models.SEEING)
def test_gradients_of_language_layers_are_transformers(model_folder: ModelFolder, family: str) -> None:
    """Through hidden states with features in them; vision tower and projector have none."""
    model, reader, cache = loaded(model_folder(family))
    groups = [(seen(pieces, cache, reader), completions) for pieces, completions in GROUPS]
    row, chosen = packed(groups)
    found = gradients(model, TokenLogprobs(model).of(row, chosen, None)[0].sum())
    plain = models.plain(model_folder(family))
    logprobs = [plain_logprobs(plain, prompt, one) for prompt, many in groups for one in many]
    expected = gradients(plain, torch.cat(logprobs).sum())
    assert found.keys() == {name for name in expected if ".visual." not in name}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)
