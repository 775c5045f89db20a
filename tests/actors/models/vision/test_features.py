"""Pixels and features of images are those of transformers, computed once per image."""

import io
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from actors.models.vision.features import FeatureCache, image_features
from actors.models.vision.images import ImageReader
from schemas.errors import ConfigError
from tests import models
from tests.actors.datasets import pictures
from tests.actors.models.vision.seeing import loaded, model_config
from tests.conftest import ModelFolder
from tests.images import png

SIZES = [(8, 8), (16, 40), (64, 50), (300, 200), (3, 90)]


@pytest.mark.parametrize("family", models.SEEING)
def test_features_have_the_bits_of_transformers(model_folder: ModelFolder, family: str) -> None:
    """Of small, wide and large images, which are made smaller, by the processor and the tower alone."""
    model, reader, _ = loaded(model_folder(family))
    plain = models.plain(model_folder(family))
    processor = Qwen2VLImageProcessorPil.from_pretrained(model_folder(family))
    for number, (height, width) in enumerate(SIZES):
        data = png(height, width, number)
        made = processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
        patches = reader.read(data)
        assert torch.equal(patches.pixels_PD, made["pixel_values"])
        assert [1, patches.grid_height, patches.grid_width] == made["image_grid_thw"][0].tolist()
        with torch.no_grad():
            expected = plain.model.get_image_features(made["pixel_values"], made["image_grid_thw"], return_dict=True)
        found = image_features(model, patches)
        assert torch.equal(found.tokens_ND, expected.pooler_output[0])
        assert len(found.tokens_ND) == found.height * found.width
        layers = getattr(expected, "deepstack_features", None) or []
        assert len(found.layers_ND) == len(layers) == (2 if family == "qwen3_vl" else 0)
        assert all(torch.equal(ours, theirs[0]) for ours, theirs in zip(found.layers_ND, layers, strict=True))


def test_transparent_and_turned_images_are_read_as_transformers_reads_them(model_folder: ModelFolder) -> None:
    """Transparency is dropped, and a camera's orientation is followed."""
    _, reader, _ = loaded(model_folder("qwen3_vl"))
    flat = Image.open(io.BytesIO(png(16, 40)))
    turned, transparent, exif = io.BytesIO(), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned by 90°
    flat.save(turned, "PNG", exif=exif)
    flat.convert("RGBA").save(transparent, "PNG")
    assert torch.equal(reader.read(transparent.getvalue()).pixels_PD, reader.read(png(16, 40)).pixels_PD)
    found, usual = reader.read(turned.getvalue()), reader.read(png(16, 40))
    assert (found.grid_height, found.grid_width) == (usual.grid_width, usual.grid_height)


def test_damaged_files_are_refused_or_read_and_nothing_else(model_folder: ModelFolder) -> None:
    """Hundreds of files with wrong bytes behind a sound start: Pillow raises errors of many kinds."""
    reader, rng = ImageReader(model_config(model_folder("qwen3_vl"))), random.Random(0)
    refused = 0
    for number in range(600):
        file = bytearray(pictures.picture(40, 30, pictures.FORMATS[number % 3]))
        for _ in range(rng.randint(1, 20)):
            file[rng.randrange(30, len(file))] = rng.randrange(256)
        data = bytes(file[: rng.choice([len(file), rng.randrange(30, len(file))])])
        try:
            assert reader.read(data).pixels_PD.isfinite().all()
        except ValueError as error:
            assert str(error).startswith(f"{len(data)} bytes are no image that can be read: ")  # noqa: PT017
            refused += 1
    assert 200 < refused < 600


def test_an_image_is_computed_once_until_the_cache_is_full(model_folder: ModelFolder) -> None:
    """By digest; with too little room the image unused for longest goes."""
    model, reader, cache = loaded(model_folder("qwen3_vl"))
    first = cache.of("a", png(16, 16))
    assert cache.of("a", png(16, 16)) is first
    assert cache.num_computed == 1
    small = FeatureCache(model, reader, max_bytes=2 * first.num_bytes)
    for digest in "abacab":
        small.of(digest, png(16, 16))
    assert small.num_computed == 4  # b has gone for c


def test_bytes_that_are_no_image_are_refused_with_their_digest(model_folder: ModelFolder) -> None:
    """The message says which image of the many it was."""
    _, _, cache = loaded(model_folder("qwen3_vl"))
    with pytest.raises(ValueError, match="image abc: 5 bytes are no image"):
        cache.of("abc", b"hello")


def test_a_model_without_an_image_processor_is_refused_by_key(tmp_path: Path) -> None:
    """The message names model.path."""
    with pytest.raises(ConfigError, match=r"model\.path: the image processor of .* can't be loaded"):
        ImageReader(model_config(tmp_path))
