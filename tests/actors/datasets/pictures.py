"""Files of images, good ones by Pillow and hostile ones by hand."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")


def picture(width: int = 30, height: int = 20, file_format: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """The file of an image with a pattern."""
    image = Image.linear_gradient("L").resize((width, height)).convert(mode)
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def part(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG, with its checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *parts: bytes) -> bytes:
    """A PNG that says to have this size, whatever follows."""
    size = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + b"".join(parts) + part(b"IEND", b"")


def jpeg(width: int, height: int, before: bytes = b"", number: int = 1) -> bytes:
    """A JPEG that says to have this size, with segments in front."""
    size = struct.pack(">BBHBHHB", 0xFF, 0xC0, 11, 8, height, width, 1) + b"\x01\x11\x00"
    return (
        b"\xff\xd8" + before + size * number + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x00" * 9 + b"\xff\xd9"
    )


def webp(kind: bytes, content: bytes) -> bytes:
    """A WebP of one part."""
    return webp_parts((kind, content))


def webp_parts(*parts: tuple[bytes, bytes]) -> bytes:
    """A WebP of parts, each of a kind and its content."""
    padded = (kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2) for kind, content in parts)
    body = b"WEBP" + b"".join(padded)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def turned(file_format: str, orientation: int = 6) -> bytes:
    """An image that its EXIF data turns."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(file_format=file_format, exif=exif)


def animated(file_format: str) -> bytes:
    """An image of two frames."""
    return picture(file_format=file_format, save_all=True, append_images=[Image.new("RGB", (30, 20), "red")])


def hostile(number: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Kinds and files of images that must be refused; limits are 1 MiB and a million pixels."""
    rng = random.Random(seed)
    whole = [picture(rng.randint(1, 90), rng.randint(1, 90), kind) for kind in FORMATS for _ in range(8)]
    pngs = [one for one in whole if one.startswith(b"\x89PNG")]
    others = [b"GIF89a", b"BM", b"%PDF-1.7", b"<svg>", b"PK\3\4", b"\x7fELF"]
    moving = [animated(kind) for kind in ("PNG", "WEBP")]
    rotated = [turned(kind, orientation) for kind in FORMATS for orientation in range(2, 9)]
    endless = [
        jpeg(3, 3, b"\xff\xe0\0\2" * 250_000),
        jpeg(3, 3, b"\xff\xd0" * 500_000),
        png(3, 3, part(b"tEXt", b"") * 80_000),
    ]
    filling = [b"\xff\xd8" + one * (1 << 19) for one in (b"\xff", b"a", b"\xff\x00")]

    def side() -> int:
        return rng.randint(1100, 65_500)

    def cut() -> bytes:
        good = rng.choice(whole)
        return good[: rng.randrange(len(good))]

    cases: dict[str, Callable[[], bytes]] = {
        "cut off": cut,
        "noise": lambda: rng.randbytes(rng.randint(0, 5000)),
        "another type": lambda: rng.choice(others) + rng.randbytes(50),
        "huge PNG": lambda: png(side(), side()),
        "huge JPEG": lambda: jpeg(side(), side()),
        "huge WebP": lambda: webp(b"VP8X", b"\0" * 4 + b"\xff" * 6),
        "animated": lambda: rng.choice(moving),
        "turned": lambda: rng.choice(rotated),
        "damaged PNG": lambda: flipped(rng.choice(pngs), rng),
        "large": lambda: rng.choice(whole) + bytes((1 << 20) + 1),
        "long side": lambda: png(1, rng.randint(201, 9999)),
        "no pixels": lambda: rng.choice([png(0, 7), jpeg(7, 0), jpeg(0, 0)]),
        "many parts": lambda: rng.choice(endless),
        "filling bytes": lambda: rng.choice(filling),
        "two sizes": lambda: jpeg(3, 3, number=2),
        "no part of an image": lambda: webp(rng.choice([b"VP8 ", b"VP8L", b"JUNK", b""]), rng.randbytes(9)),
    }
    for index in range(number):
        kind = [*cases][index % len(cases)]
        yield kind, cases[kind]()


def flipped(good: bytes, rng: random.Random) -> bytes:
    """A file with a wrong bit, which checksums tell."""
    place = rng.randrange(len(good))
    return good[:place] + bytes([good[place] ^ 1 << rng.randrange(8)]) + good[place + 1 :]
