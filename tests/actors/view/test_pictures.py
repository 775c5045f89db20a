"""Pictures of prompts' images over real HTTP: only pixels that are encoded here, of files that may hold anything."""

import io
from pathlib import Path
from typing import Any

import pytest

from actors.datasets.prepared import digest_of
from actors.ops import images
from actors.packer.sample_images import FOLDER
from actors.view.access import HEADERS
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeGroup, MadeRun
from tests.actors.view.test_server import TOKEN, Client, served, viewed
from tests.images import png

SCRIPT = b"<html><script>alert(1)</script></html>"
HOSTILE = {
    "html": SCRIPT,
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>',
    "start of a PNG": b"\x89PNG\r\n\x1a\n" + SCRIPT,
    "cut off": png(8, 8)[:-8],
    "nothing": b"",
}


def shown(*files: bytes) -> MadeGroup:
    """A group whose prompt shows these images between two texts."""
    parts: list[dict[str, Any]] = [{"type": "image", "digest": digest_of(data)} for data in files]
    texts = [{"type": "text", "text": text} for text in ("How wide is", "this square, and how high?")]
    prompt = [{"role": "user", "content": [texts[0], *parts, texts[1]]}]
    return MadeGroup(prompt, ["16", "24"], [1.0, 0.0], images=list(files))


async def fetched(client: Client, group: int, digest: str, **options: Any) -> tuple[int, str, bytes]:
    """Status, content type and bytes of a picture; every answer has all headers of security."""
    address = f"{client.base}/api/runs/0/groups/{group}/images/{digest}"
    async with client.session.get(address, **options) as response:
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
        return response.status, response.content_type, await response.read()


def compacted(make: Make, *files: bytes) -> MadeRun:
    """A run whose first step shows these images, and is no longer in the ledger."""
    run = make()
    run.add_step(groups=[shown(*files)])
    run.add_step()
    run.compact(1)
    return run


async def test_an_image_is_shown_from_the_ledger_and_from_the_samples(make: Make, tmp_path: Path) -> None:
    """Of a group that is in samples.jsonl, of one that is in the ledger alone, and of one whose step is compacted."""
    from PIL import Image

    run = make()
    first, second, third = png(8, 12), png(20, 10, seed=1), png(3000, 40, seed=2)
    run.add_step(groups=[shown(first)])
    run.add_step(groups=[shown(second), shown(third)])
    run.compact(1)
    sizes = {0: (first, [8, 12]), 3: (second, [20, 10]), 4: (third, [3000, 40])}
    assert {path.name for path in (run.config.output / FOLDER).iterdir()} == {digest_of(first), digest_of(second)}
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            for ordinal, (data, size) in sizes.items():
                digest = digest_of(data)
                for page in (f"runs/0/groups/{ordinal}", f"runs/0/groups/{ordinal}/trajectories/1"):
                    assert (await client.get(page))[1]["images"] == {digest: size}
                status, kind, body = await fetched(client, ordinal, digest)
                assert (status, kind) == (200, "image/png")
                with Image.open(io.BytesIO(body)) as made, Image.open(io.BytesIO(data)) as file:
                    assert made.height == min(1024, file.height)
                    assert made.tobytes() == file.tobytes() or file.height > 1024


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_file_that_is_no_image_is_never_sent(make: Make, tmp_path: Path, name: str) -> None:
    """Neither from the ledger nor out of the folder, under its own digest or that of an image."""
    data, good = HOSTILE[name], png(8, 8, seed=3)
    run = make()
    run.add_step(groups=[shown(data)], sampled=0)
    run.add_step(groups=[shown(good)])
    folder = run.config.output / FOLDER
    (folder / digest_of(data)).write_bytes(data)
    (folder / digest_of(good)).write_bytes(data)
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            status, kind, body = await fetched(client, 0, digest_of(data))
            assert (status, kind) == (404, "application/json")
            assert b"script" not in body
            assert (await client.get("runs/0/groups/0"))[1]["images"] == {}
            # the ledger still has the image whose file was replaced
            assert (await fetched(client, 3, digest_of(good)))[:2] == (200, "image/png")


async def test_the_rest_of_a_file_stays_behind(make: Make, tmp_path: Path) -> None:
    """Texts of a PNG, and bytes behind its end."""
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", SCRIPT.decode())
    out = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(out, "PNG", pnginfo=info)
    data = out.getvalue() + SCRIPT
    run = compacted(make, data)
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            status, _, body = await fetched(client, 0, digest_of(data))
            assert status == 200
            assert b"script" not in body


async def test_no_digest_leads_to_another_file(make: Make, tmp_path: Path) -> None:
    """Paths, encoded or not, other letters, digests of no image, and links to files elsewhere."""
    data = png(8, 8)
    run = compacted(make, data)
    (run.config.output / FOLDER / "secret").write_bytes(data)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(png(4, 4))
    (run.config.output / FOLDER / ("a" * 32)).symlink_to(elsewhere)
    digest = digest_of(data)
    names = ["../config.resolved.yaml", "..%2Fconfig.resolved.yaml", "%2e%2e%2fledger.sqlite", "secret", "0" * 32]
    names += [digest.upper(), digest[:-1], f"{digest}%00", f"{digest}%0a", "a" * 32]
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            for name in names:
                status, kind, _ = await fetched(client, 0, name)
                assert (status, kind) == (404, "application/json"), name
            assert (await fetched(client, 0, digest))[0] == 200


async def test_an_image_without_a_picture_is_said_in_words(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone, Pillow is not installed, or it is too large to be decoded for a page."""
    data = png(8, 8)
    digest = digest_of(data)
    run = compacted(make, data)
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            with monkeypatch.context() as small:
                small.setattr(images, "MAX_PIXELS", 63)
                status, _, body = await fetched(client, 0, digest)
                assert (status, b"up to 63 pixels" in body) == (404, True)
            with monkeypatch.context() as bare:
                bare.setattr(images, "is_installed", lambda name: False)
                assert (await client.get("runs/0/groups/0"))[1]["images"] == {}
                status, _, body = await fetched(client, 0, digest)
                assert (status, b"Pillow" in body) == (404, True)
            assert (await client.get("runs/0/groups/0"))[1]["images"] == {digest: [8, 8]}
            (run.config.output / FOLDER / digest).unlink()
            assert (await client.get("runs/0/groups/0"))[1]["images"] == {}
            assert (await fetched(client, 0, digest))[0] == 404


async def test_pictures_need_the_token_too(make: Make, tmp_path: Path) -> None:
    """As every other address."""
    data = png(8, 8)
    run = compacted(make, data)
    with viewed(tmp_path, run) as runs:
        async with served(runs, TOKEN) as client:
            assert (await fetched(client, 0, digest_of(data)))[0] == 401
            allowed = {"Authorization": f"Bearer {TOKEN}"}
            assert (await fetched(client, 0, digest_of(data), headers=allowed))[0] == 200
