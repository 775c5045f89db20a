"""Images of prompts: found in rows of every format, checked before they are decoded, kept as bytes of their files."""

import base64
import io
import json
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as PillowImage

from actors.datasets import Example, make_dataset
from actors.datasets.base import why_not_sendable
from actors.datasets.image_header import size_of
from actors.datasets.images import Image, ImageSource
from actors.datasets.jsonl import Jsonl
from actors.datasets.prepared import Prepared, digest_of
from actors.datasets.table import Preview
from schemas.config.data import DatasetConfig, JsonlConfig
from schemas.config.images import ImagesConfig
from schemas.errors import ConfigError
from tests.actors.datasets.pictures import FORMATS, hostile, jpeg, picture, turned, webp, webp_parts

RED, BLUE = picture(40, 30), picture(20, 50, "JPEG")
LIMITS = ImagesConfig(max_bytes=1 << 20, max_pixels=1_000_000)


def url(data: bytes) -> str:
    """A data URL."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def question(*parts: Any) -> list[dict[str, Any]]:
    """A message of the user with these parts and a text."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def jsonl(folder: Path, *rows: dict[str, Any], **images: Any) -> list[Example]:
    """The examples of rows in a JSON Lines file; its folder has two pictures."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures/red.png").write_bytes(RED)
    (folder / "pictures/blue.jpg").write_bytes(BLUE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = JsonlConfig(path=str(folder / "rows.jsonl"), images=ImagesConfig(**images))
    dataset = make_dataset(config, "train", 0)
    return [dataset.example(index) for index in range(len(rows))]


def refused(folder: Path, row: dict[str, Any], **images: Any) -> str:
    """Why the only row of a file is refused."""
    with pytest.raises(ConfigError) as caught:
        jsonl(folder, row, **images)
    return str(caught.value)


def shown(*images: bytes) -> list[dict[str, str]]:
    """Parts of a prompt in which images were replaced."""
    return [{"type": "image", "digest": digest_of(one)} for one in images]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "path": "pictures/red.png"},
        {"type": "image", "image": "pictures/red.png"},
        {"type": "image", "image": {"bytes": None, "path": "pictures/red.png"}},
        {"image": "pictures/red.png"},
        {"type": "image", "url": url(RED)},
        {"type": "image_url", "image_url": {"url": url(RED), "detail": "high"}},
        {"type": "image_url", "image_url": url(RED)},
    ],
)
def test_an_image_in_a_message_is_read_however_it_is_written(tmp_path: Path, part: dict[str, Any]) -> None:
    """The message keeps a digest, the example the bytes and their size."""
    (found,) = jsonl(tmp_path, {"prompt": question(part), "answer": "red"})
    assert found.prompt == question(*shown(RED))
    assert found.images == (Image(RED, 30, 40),)
    assert found.columns == {"answer": "red"}
    assert not why_not_sendable(found)


def test_several_images_keep_the_order_of_their_parts(tmp_path: Path) -> None:
    """Over messages, and repeated ones twice; texts in between stay."""
    red, blue = ({"type": "image", "path": f"pictures/{name}"} for name in ("red.png", "blue.jpg"))
    messages = [*question(blue, red), {"role": "assistant", "content": "a box"}, *question(blue)]
    (found,) = jsonl(tmp_path, {"prompt": messages})
    assert [image.data for image in found.images] == [BLUE, RED, BLUE]
    assert found.prompt == [*question(*shown(BLUE, RED)), messages[1], *question(*shown(BLUE))]


def test_the_key_of_an_example_depends_on_its_images(tmp_path: Path) -> None:
    """Another file under the same name is another example; so packer and rollout actors see the same images."""
    row = {"prompt": question({"type": "image", "path": "pictures/red.png"})}
    (before,) = jsonl(tmp_path, row)
    dataset = make_dataset(JsonlConfig(path=str(tmp_path / "rows.jsonl")), "train", 0)
    assert dataset.example(0).key("e") == before.key("e")
    (tmp_path / "pictures/red.png").write_bytes(BLUE)
    assert dataset.example(0).key("e") != before.key("e")


@pytest.mark.parametrize("value", ["pictures/red.png", ["pictures/red.png"], {"path": "pictures/red.png"}])
def test_a_column_has_the_images_of_a_text_or_of_messages_without_places(tmp_path: Path, value: Any) -> None:
    """They stand in front of the first user message, and reward functions do not get the column."""
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "what is it?"}]
    rows = [{"prompt": prompt, "images": value, "answer": 1} for prompt in ("what is it?", messages)]
    plain, chat = jsonl(tmp_path, *rows, column="images")
    assert plain.prompt == question(*shown(RED))
    assert chat.prompt == [messages[0], *question(*shown(RED))]
    assert plain.columns == chat.columns == {"answer": 1}


def test_a_column_fills_the_places_of_messages_in_order(tmp_path: Path) -> None:
    """A part with an image of its own takes none of the column."""
    own = {"type": "image", "path": "pictures/red.png"}
    row = {"prompt": question({"type": "image"}, own, {"type": "image"}), "images": [url(BLUE), url(RED)]}
    (found,) = jsonl(tmp_path, row, column="images")
    assert [image.data for image in found.images] == [BLUE, RED, RED]
    assert "2 parts of type image name no image, and the row's column has 1" in refused(
        tmp_path, row | {"images": url(BLUE)}, column="images"
    )
    assert "no column 'pictures' (images.column)" in refused(tmp_path, row, column="pictures")


@pytest.mark.parametrize("empty", [None, []])
def test_rows_without_images_stay_what_they_are(tmp_path: Path, empty: Any) -> None:
    """A text stays a text, with or without a column; without the key a column goes to the reward functions."""
    (found,) = jsonl(tmp_path, {"prompt": "abc", "images": empty}, column="images")
    assert found == Example("abc", {})
    (found,) = jsonl(tmp_path, {"prompt": "abc", "images": ["x"]})
    assert found == Example("abc", {"images": ["x"]})


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", ["r.parquet", "r.arrow"])
def test_bytes_in_tables_are_images(tmp_path: Path, name: str, declared: bool) -> None:
    """As the library `datasets` stores them, noted in the schema or not; a path next to bytes is not followed."""
    pictures = [[{"bytes": RED, "path": "/etc/passwd"}], [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b"}]]
    data = pa.table({"prompt": ["a", "b"], "shots": pictures})
    if declared:
        features = {"prompt": {"dtype": "string", "_type": "Value"}, "shots": [{"_type": "Image"}]}
        data = data.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    if name.endswith("parquet"):
        pq.write_table(data, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), data.schema) as writer:
            writer.write_table(data)
    config = DatasetConfig(path=str(tmp_path / name), columns={"pictures": "shots"}, images={"column": "pictures"})
    found = make_dataset(config, "train", 0, prepared=Prepared(tmp_path / "prepared")).example(1)
    assert [image.data for image in found.images] == [RED, BLUE]
    assert found.columns == {}
    previewed = Preview(config, "train")
    assert previewed.num_with_images == 2
    assert previewed.example(1) == found


def test_paths_of_a_folder_of_files_start_at_the_folder(tmp_path: Path) -> None:
    """Wherever below it the file with the row is."""
    (tmp_path / "data").mkdir()
    (tmp_path / "red.png").write_bytes(RED)
    row = {"prompt": question({"type": "image", "path": "red.png"})}
    (tmp_path / "data/train.jsonl").write_text(json.dumps(row))
    dataset = make_dataset(DatasetConfig(path=str(tmp_path)), "train", 0, prepared=Prepared(tmp_path / "prepared"))
    assert dataset.example(0).images == (Image(RED, 30, 40),)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"path": "../red.png"}, "must be relative to"),
        ({"path": "/etc/passwd"}, "must be relative to"),
        ({"path": "pictures"}, "which is no file"),
        ({"path": "pipe"}, "which is no file"),
        ({"path": "none.png"}, "can't be read: No such file"),
        (
            {"url": "https://example.com/a.png"},
            "images.origins does not name https://example.com; add it",
        ),
        ({"url": "file:///etc/passwd"}, "download it next to the data"),
        ({"url": "data:image/png,abc"}, "without base64"),
        ({"url": "data:image/png;base64,ä"}, "damaged"),
        ({"image": {}}, "without bytes, path or url"),
        ({"image": 7}, "is a int, and must be"),
        ({"path": "rows.jsonl"}, "is no JPEG, PNG or WebP image"),
    ],
)
def test_an_image_that_can_not_be_read_is_named_with_its_row(tmp_path: Path, part: dict[str, Any], words: str) -> None:
    """File, line, column, and the number of the image in the prompt."""
    os.mkfifo(tmp_path / "pipe")
    good = {"type": "image", "path": "pictures/red.png"}
    told = refused(tmp_path, {"prompt": question(good, {"type": "image"} | part)})
    assert told.startswith(f"environments[].path: {tmp_path / 'rows.jsonl'}, line 1, column 'prompt': image 2 ")
    assert words in told


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_images": 1}, "has 2 images, and environments[].images.max_images is 1"),
        ({"max_bytes": len(RED) - 1}, f"has {len(RED)} bytes, and environments[].images.max_bytes is {len(RED) - 1}"),
        ({"max_pixels": 1199}, "has 40 × 30 pixels, and environments[].images.max_pixels is 1199"),
    ],
)
@pytest.mark.parametrize("source", [{"path": "pictures/red.png"}, {"url": url(RED)}])
def test_a_limit_is_named_with_the_value(
    tmp_path: Path, limit: dict[str, int], words: str, source: dict[str, str]
) -> None:
    """At the limit an image is good, one beyond is refused by the key."""
    part = {"type": "image"} | source
    assert words in refused(tmp_path, {"prompt": question(part, part)}, **limit)
    (key, value), row = *limit.items(), {"prompt": question(part, part)}
    assert len(jsonl(tmp_path, row, **{key: value + 1})[0].images) == 2


def test_images_that_can_not_travel_with_a_group_are_refused_with_the_configuration() -> None:
    """The product is what counts."""
    with pytest.raises(ValueError, match=r"max_images 64 × max_bytes 8388608 are more than 268435456 bytes"):
        ImagesConfig(max_images=64)
    assert ImagesConfig(max_images=64, max_bytes=4 << 20).max_images == 64


def test_other_media_and_images_of_environments_are_refused(tmp_path: Path) -> None:
    """An environment's own rows have no images yet."""
    assert "message 1 has a part of type 'video'" in refused(tmp_path, {"prompt": question({"type": "video"})})
    jsonl(tmp_path, {"prompt": question({"type": "image", "path": "pictures/red.png"})})
    config = JsonlConfig(path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"a part of type 'image'; leave out the rows with images"):
        Jsonl(config, "train", of_environment=True)


# --- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_size_in_a_header_is_the_size_of_the_decoded_image(file_format: str) -> None:
    """Of every mode and variant that Pillow writes, from one pixel to a long side."""
    variants: list[dict[str, Any]] = {
        "PNG": [{}, {"optimize": True}],
        "JPEG": [{}, {"progressive": True}, {"quality": 10, "comment": b"\xff\xd9 no end"}],
        "WEBP": [{}, {"lossless": True}, {"icc_profile": b"x" * 99}],
    }[file_format]
    modes = {"PNG": ["RGB", "L", "P", "1", "I;16"], "JPEG": ["RGB", "L", "CMYK"], "WEBP": ["RGB"]}
    for mode in modes[file_format]:
        for options in variants:
            for width, height in ((1, 1), (3, 500), (640, 480), (17, 1)):
                data = picture(width, height, file_format, mode, **options)
                with PillowImage.open(io.BytesIO(data)) as image:
                    image.load()
                    assert (image.height, image.width) == size_of(data) == (height, width)
    assert size_of(turned(file_format, orientation=1)) == (20, 30)


def test_an_image_that_is_transparent_in_places_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    """Of every format and kind: engines and trainers would see other pixels."""
    icc = {"icc_profile": b"x" * 99}

    def webp_of(**options: Any) -> bytes:
        image, file = PillowImage.linear_gradient("L").resize((7, 5)), io.BytesIO()
        # Pillow writes no alpha channel where nothing is transparent
        image.putalpha(image.copy())
        image.convert("RGBA").save(file, "WEBP", **options)
        return file.getvalue()

    transparent = [
        picture(mode="RGBA"),
        picture(mode="LA"),
        picture(mode="P", transparency=3),
        picture(mode="RGB", transparency=(1, 2, 3)),
        *(webp_of(lossless=lossless, **more) for lossless in (True, False) for more in ({}, icc)),
        # flags that do not tell of the alpha channel behind them
        webp_parts((b"VP8X", bytes(4) + b"\6\0\0\4\0\0"), (b"ALPH", b"\0")),
        webp_parts((b"VP8X", bytes(4) + b"\6\0\0\4\0\0"), (b"VP8L", b"\x2f" + (1 << 28).to_bytes(4, "little"))),
    ]
    for data in transparent:
        with pytest.raises(ValueError, match=r"has an alpha channel .* image\.convert\('RGB'\)"):
            size_of(data)
    told = refused(tmp_path, {"prompt": question({"type": "image", "url": url(transparent[0])})})
    assert "line 1, column 'prompt': image 1 has an alpha channel" in told


def test_a_thousand_hostile_images_are_refused_by_name_in_little_memory(request: pytest.FixtureRequest) -> None:
    """Each says which image of which row; none costs more than its own bytes and a mebibyte, nor all together."""
    source, kinds = ImageSource(LIMITS, None), dict[str, set[str]]()
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    for number, (kind, data) in enumerate(hostile(1000)):
        # each kind once: traced, a file of many parts takes a second
        is_traced, where = kind not in kinds, f"rows.jsonl, line {number}: image 1"
        if not is_traced and tracemalloc.is_tracing():
            tracemalloc.stop()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with pytest.raises(ConfigError) as caught:
            source.load(data, where)
        if is_traced:
            assert tracemalloc.get_traced_memory()[1] - start < 1 << 20, kind
        words = str(caught.value)
        assert words.startswith(f"{where} "), kind
        assert len(words) < 400, kind
        kinds.setdefault(kind, set()).add(words.removeprefix(where))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10
    assert len(kinds) >= 16
    assert any("environments[].images.max_pixels is 1000000" in words for words in kinds["huge WebP"])
    assert all("animated" in words for words in kinds["animated"])
    assert all("is turned by its EXIF data" in words for words in kinds["turned"])
    assert all("environments[].images.max_bytes is 1048576" in words for words in kinds["large"])


def test_data_behind_an_image_and_thumbnails_are_no_reason_to_refuse() -> None:
    """Cameras write both; a marker of the end inside of a segment is none."""
    thumbnail = b"\xff\xe1" + (2 + 12).to_bytes(2, "big") + b"Exif\0\0" + b"\xff\xd8\xff\xda\xff\xd9"
    assert size_of(jpeg(30, 20, thumbnail) + b"\xff\xda more") == (20, 30)
    assert size_of(picture(file_format="WEBP") + b"more") == (20, 30)
    with pytest.raises(ValueError, match="cut off"):
        size_of(jpeg(30, 20, thumbnail)[:-2])
    with pytest.raises(ValueError, match="no start code"):
        size_of(webp(b"VP8 ", bytes(10)))
