"""Tokens of images: equal to those of the processors of transformers, and budgets count them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.models.image_tokens import ImageTokens
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import ImagePlace

SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
WORDS = ["<unk>", *SPECIAL, "look", "at", "these", "?"]
PAD = WORDS.index("<|image_pad|>")
QWEN3 = {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16, "merge_size": 2}
QWEN2_5 = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2}
SMALL = {"size": {"shortest_edge": 1024, "longest_edge": 40_000}, "patch_size": 8, "merge_size": 3}


def raw_tokenizer() -> Tokenizer:
    """A tokenizer of words."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def model(folder: Path, processor: dict[str, Any], name: str = "preprocessor_config.json") -> ModelConfig:
    """A model's folder with these files alone."""
    (folder / "config.json").write_text(json.dumps({"image_token_id": PAD}))
    (folder / name).write_text(json.dumps(processor))
    return ModelConfig(path=str(folder))


def sizes(seed: int, most: int, number: int) -> list[tuple[int, int]]:
    """Heights and widths: square, long, tiny, and those at the borders of rounding."""
    rng = random.Random(seed)
    drawn = [(rng.randint(1, most), rng.randint(1, most)) for _ in range(number)]
    borders = [
        (n * factor + d, m * factor + d) for factor in (28, 32) for n, m in ((1, 1), (2, 5)) for d in (-1, 0, 14)
    ]
    return [
        size
        for size in [*drawn, *borders, (1, 1), (1, 200), (199, 1), (16, 16), (45, 17)]
        if max(size) <= 200 * min(size)
    ]


@pytest.mark.parametrize("kind", ["Qwen3VLProcessor", "Qwen2_5_VLProcessor"])
@pytest.mark.parametrize(("keys", "most"), [(QWEN3, 900), (QWEN2_5, 700), (SMALL, 500)])
def test_ids_are_those_of_the_processor_of_transformers(
    tmp_path: Path, kind: str, keys: dict[str, Any], most: int
) -> None:
    """Of prompts with one to three images of many sizes; the grid is the processor's too."""
    import transformers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw_tokenizer(), unk_token="<unk>", pad_token="<unk>", additional_special_tokens=SPECIAL
    )
    # images that are neither scaled in value nor converted: only the grid matters
    images = Qwen2VLImageProcessorPil(**keys, do_rescale=False, do_normalize=False, resample=0)
    base = getattr(transformers, kind)

    class WithoutVideo(base):  # type: ignore[misc, valid-type]
        """The processor without its part for videos, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

    processor = WithoutVideo(image_processor=images, tokenizer=tokenizer, video_processor=None)
    rule, rest = ImageTokens.of_model(model(tmp_path, keys)), sizes(1, most, 25)
    while rest:
        shown, rest = rest[:3], rest[3:]
        text = " ".join(["look at", *["<|vision_start|> <|image_pad|> <|vision_end|>"] * len(shown), "these ?"])
        pictures = [Image.new("L", (width, height)).convert("RGB") for height, width in shown]
        expected = processor(text=[text], images=pictures)
        ids, places = rule.expand(tokenizer(text)["input_ids"], shown)
        assert ids == list(expected["input_ids"][0])
        assert [(1, *rule.grid(*size)) for size in shown] == [
            tuple(map(int, grid)) for grid in expected["image_grid_thw"]
        ]
        for place in places:
            assert ids[place.start : place.start + place.length] == [PAD] * place.length
        assert sum(place.length for place in places) == ids.count(PAD)


@pytest.mark.parametrize("keys", [QWEN3, QWEN2_5, SMALL])
@pytest.mark.parametrize("most", [40, 900, 9000])
def test_grids_are_those_of_transformers_without_decoding(tmp_path: Path, keys: dict[str, Any], most: int) -> None:
    """On 2 000 sizes up to 81 megapixels, of which nothing is drawn."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor, rule = Qwen2VLImageProcessorPil(**keys), ImageTokens.of_model(model(tmp_path, keys))
    for size in sizes(most, most, 2000):
        num_patches = processor.get_number_of_image_patches(*size)
        rows, columns = rule.grid(*size)
        assert rows * columns == num_patches, size
        assert rule.num_tokens(*size) == num_patches // keys["merge_size"] ** 2


def test_one_placeholder_becomes_a_run_with_a_place(tmp_path: Path) -> None:
    """By hand: 64 × 96 pixels with squares of 32 are 2 × 3 tokens; 32 × 32 is one."""
    rule = ImageTokens(PAD, 16, 2, 1, 1 << 24)
    ids, places = rule.expand([7, PAD, 8, PAD, 9], [(64, 96), (32, 32)])
    assert ids == [7, *[PAD] * 6, 8, PAD, 9]
    assert places == [ImagePlace(image=0, start=1, length=6), ImagePlace(image=1, start=8, length=1)]
    assert rule.expand([7, 8], []) == ([7, 8], [])


def test_placeholders_without_an_image_are_refused() -> None:
    """In a text, or by a template that knows no images."""
    rule = ImageTokens(PAD, 16, 2, 1, 1 << 24)
    with pytest.raises(ValueError, match="has written 2 placeholders for 1 images"):
        rule.expand([PAD, 5, PAD], [(32, 32)])
    with pytest.raises(ValueError, match="has written 0 placeholders for 1 images"):
        rule.expand([5], [(32, 32)])
    with pytest.raises(ValueError, match="7 × 1401 pixels: a side is more than 200 times the other"):
        rule.expand([PAD], [(1401, 7)])


def test_a_processor_in_one_file_with_others_is_found(tmp_path: Path) -> None:
    """As transformers 5 saves it; min_pixels takes precedence over size."""
    keys = QWEN3 | {"min_pixels": 77}
    rule = ImageTokens.of_model(model(tmp_path, {"image_processor": keys}, "processor_config.json"))
    assert rule == ImageTokens(PAD, 16, 2, 77, 16_777_216)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (QWEN3 | {"size": {"height": 224, "width": 224}}, "size.shortest_edge in config.json or preprocessor_config"),
        (QWEN3 | {"merge_size": None}, "merge_size .* is None"),
        (QWEN3 | {"do_resize": False}, "do_resize false"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_field(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    """A processor that cuts images to squares has none of these fields."""
    with pytest.raises(ConfigError, match=words):
        ImageTokens.of_model(model(tmp_path, keys))


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    """Both names are told."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        ImageTokens.of_model(ModelConfig(path=str(tmp_path)))
