"""Images that are kept with samples: each once, up to a limit, and what `actors samples` says of them."""

from pathlib import Path

import pytest

from actors.datasets.prepared import digest_of
from actors.packer.sample_images import FOLDER, SampleImages, images_of, sizes_of
from actors.telemetry import writer
from actors.telemetry.reporter import Reporter
from actors.telemetry.samples import show_samples
from actors.telemetry.writer import WriteError, Writer
from schemas.messages import ImagePlace
from tests.actors.packer.test_record import scored
from tests.images import png


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what is written."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 60.0)


def by_digest(*files: bytes) -> dict[str, bytes]:
    """Images by their digests."""
    return {digest_of(data): data for data in files}


@pytest.mark.parametrize("number", [1, 3, 20])
def test_images_are_kept_up_to_the_limit_and_the_others_counted(tmp_path: Path, number: int) -> None:
    """The limit is of all bytes, also after the packer has started again; smaller ones still find room."""
    files = [png(16, 16, seed) for seed in range(number)]
    limit = sum(map(len, files)) + 100
    images = SampleImages(tmp_path, Writer(), limit)
    assert images.keep(by_digest(*files)) == 0
    assert images.keep(by_digest(*files, b"x" * 101)) == 1
    again = SampleImages(tmp_path, Writer(), limit)
    assert again.keep(by_digest(*files, b"y" * 101, b"z" * 100, b"0")) == 2
    kept = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    assert kept == by_digest(*files, b"z" * 100)


def test_nothing_is_kept_with_a_limit_of_zero(tmp_path: Path) -> None:
    """And no folder is made."""
    assert SampleImages(tmp_path, Writer(), 0).keep(by_digest(png(8, 8))) == 1
    assert not (tmp_path / FOLDER).exists()


def test_a_write_that_fails_is_told_and_may_be_repeated(tmp_path: Path) -> None:
    """A file in the place of the folder, as a disk that refuses; nothing is counted twice."""
    data = png(8, 8)
    images = SampleImages(tmp_path, Writer(), len(data))
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(WriteError, match=FOLDER):
        images.keep(by_digest(data))
    (tmp_path / FOLDER).unlink()
    assert images.keep(by_digest(data)) == 0
    assert (tmp_path / FOLDER / digest_of(data)).read_bytes() == data


def test_only_sizes_of_still_images_are_recorded() -> None:
    """Bytes of another kind have no picture."""
    data = png(8, 12)
    assert sizes_of(by_digest(data, b"<svg/>", b"")) == {digest_of(data): (8, 12)}


def test_samples_name_an_image_by_its_size_and_its_digest(tmp_path: Path) -> None:
    """Width before height, as people say them; without a size the digest alone."""
    data, other = png(48, 64), png(8, 8)
    parts = [{"type": "image", "digest": digest_of(one)} for one in (data, other)]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    group = scored([1.0, 0.0], [0.5, -0.5]).model_copy(
        update={"prompt": prompt, "images": [data], "image_places": [ImagePlace(image=0, start=0, length=1)]}
    )
    assert images_of(group) == by_digest(data)
    Reporter(tmp_path).report_samples(1, group, sizes_of(images_of(group)))
    text = show_samples(tmp_path / "samples.jsonl", None, 2)
    assert f"[image 64x48 {digest_of(data)[:6]}]" in text
    assert f"[image {digest_of(other)[:6]}]" in text
