"""Size of an image from the first bytes of its file, without decoding it.

Read here instead of by an imaging library: the data is not trusted, and a library's `open` may allocate the whole
canvas of a WebP, step through megabytes of junk byte by byte, or unpack compressed texts of a PNG. These readers hold a
few numbers, and take time in proportion to the number of parts of the file.
"""

import re
import struct
import zlib
from collections.abc import Callable

from schemas.limits import IMAGE_ASPECT_RATIO

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_ALPHA = (4, 6)
"""Types of color of a PNG with an alpha channel, gray and RGB."""
NO_FILLER = re.compile(rb"[^\xff]")
"""Byte behind the filling bytes in front of a JPEG's marker."""
EXIF_ORIENTATION = 0x0112
"""Tag of EXIF data that says how an image is to be turned."""
UPRIGHT = 1
FORMATS = "JPEG, PNG or WebP"
MOST_PARTS = 1 << 16
"""Parts of a file that are looked at; no encoder writes as many."""
TOO_MANY_PARTS = f"is damaged: its file has more than {MOST_PARTS} parts"
CUT_OFF = "is cut off: its file ends before the image does"
ANIMATED = "is animated; a model sees still images"
ALPHA = (
    "has an alpha channel or a transparent color, which engines and trainers blend with different backgrounds; save it "
    "without, e.g. by Pillow's image.convert('RGB')"
)


def size_of(data: bytes) -> tuple[int, int]:
    """Return height and width of an image in pixels.

    Raises:
        ValueError: the file is no JPEG, PNG or WebP, is cut off or damaged, is animated, has an alpha channel, or is
            to be turned by its EXIF data. The text goes on after the name of the image.
    """
    readers: dict[str, Callable[[bytes], tuple[int, int]]] = {"PNG": _png, "JPEG": _jpeg, "WebP": _webp}
    kind = format_of(data)
    if not kind:
        raise ValueError(f"is no {FORMATS} image")
    try:
        height, width = readers[kind](data)
    except (struct.error, IndexError):
        # a read behind the last byte
        raise ValueError(CUT_OFF) from None
    if not height or not width:
        raise ValueError(f"is damaged: it has {width} × {height} pixels")
    return height, width


def check_sides(height: int, width: int) -> None:
    """Check the ratio of an image's sides, in pixels.

    Raises:
        ValueError: the ratio is beyond IMAGE_ASPECT_RATIO. The text goes on after the name of the image.
    """
    if max(height, width) > IMAGE_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"has {width} × {height} pixels: a side is more than {IMAGE_ASPECT_RATIO} times the other, which vision "
            "models refuse"
        )


def format_of(data: bytes) -> str:
    """Return the format that the first bytes of a file name: JPEG, PNG or WebP; empty for another one."""
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "WebP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def _png(data: bytes) -> tuple[int, int]:
    view, place, size = memoryview(data), len(PNG_SIGNATURE), None
    for _ in range(MOST_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 8 + length
        (checksum,) = struct.unpack_from(">I", data, end)
        if zlib.crc32(view[place + 4 : end]) != checksum:
            raise ValueError(f"is damaged: the checksum of its part {kind.decode('latin-1')!r} is wrong")
        if size is None:
            if kind != b"IHDR" or length != 13:
                raise ValueError("is damaged: a PNG starts with the part IHDR")
            width, height, _, color = struct.unpack_from(">IIBB", data, place + 8)
            if color in PNG_ALPHA:
                raise ValueError(ALPHA)
            size = height, width
        elif kind == b"tRNS":
            raise ValueError(ALPHA)
        elif kind == b"acTL":
            raise ValueError(ANIMATED)
        elif kind == b"eXIf":
            _check_upright(data[place + 8 : end])
        elif kind == b"IEND":
            return size
        place = end + 4
    raise ValueError(TOO_MANY_PARTS)


def _jpeg(data: bytes) -> tuple[int, int]:
    place, size = 2, None
    for _ in range(MOST_PARTS):
        # libraries step over other bytes between two segments too
        place = data.find(b"\xff", place)
        if place < 0:
            raise ValueError(CUT_OFF)
        # any number of such bytes may stand in front of a marker
        if (found := NO_FILLER.search(data, place)) is None:
            raise ValueError(CUT_OFF)
        marker, place = data[found.start()], found.end()
        if marker == 0 or marker == 1 or 0xD0 <= marker <= 0xD8:
            continue  # a marker without a segment
        if marker == 0xD9:
            raise ValueError("is damaged: the JPEG ends before its image")
        (length,) = struct.unpack_from(">H", data, place)
        if marker == 0xDA:
            # the scan: a marker of the end follows, and cannot occur inside of it
            if size is None:
                raise ValueError("is damaged: the JPEG has no size")
            if data.find(b"\xff\xd9", place) < 0:
                raise ValueError(CUT_OFF)
            return size
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if size is not None:
                raise ValueError("is damaged: the JPEG has two sizes")
            size = struct.unpack_from(">HH", data, place + 3)
        elif marker == 0xE1 and data[place + 2 : place + 8] == b"Exif\0\0":
            _check_upright(data[place + 8 : place + length])
        place += max(length, 2)
    raise ValueError(TOO_MANY_PARTS)


def _webp(data: bytes) -> tuple[int, int]:
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + riff_bytes:
        raise ValueError(CUT_OFF)
    (kind,) = struct.unpack_from("<4s", data, 12)
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack_from("<3x3sHH", data, 20)
        if start_code != b"\x9d\x01\x2a":
            raise ValueError("is damaged: the WebP has no start code")
        return height & 0x3FFF, width & 0x3FFF
    if kind == b"VP8L":
        bits = _lossless_bits(data, 20)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind != b"VP8X":
        raise ValueError("is damaged: the WebP has no image")
    flags = data[20]
    if flags & 0x02:
        raise ValueError(ANIMATED)
    if flags & 0x10:
        raise ValueError(ALPHA)
    width, height = (int.from_bytes(data[place : place + 3], "little") + 1 for place in (24, 27))
    _check_webp_parts(data, 8 + riff_bytes)
    return height, width


def _check_webp_parts(data: bytes, end: int) -> None:
    """Refuse a WebP whose parts turn it, or have an alpha channel that its flags may hide."""
    place = 12
    for _ in range(MOST_PARTS):
        if place >= end:
            return
        kind, length = struct.unpack_from("<4sI", data, place)
        if kind == b"EXIF":
            _check_upright(data[place + 8 : place + 8 + length].removeprefix(b"Exif\0\0"))
        elif kind == b"ALPH":
            raise ValueError(ALPHA)
        elif kind == b"VP8L":
            _lossless_bits(data, place + 8)
        # parts have an even length
        place += 8 + length + length % 2
    raise ValueError(TOO_MANY_PARTS)


def _lossless_bits(data: bytes, place: int) -> int:
    """Return the bits of a lossless WebP's size."""
    signature, bits = struct.unpack_from("<BI", data, place)
    if signature != 0x2F:
        raise ValueError("is damaged: the WebP has no signature")
    if bits >> 28 & 1:
        raise ValueError(ALPHA)
    return int(bits)


def _check_upright(exif: bytes) -> None:
    """Refuse an image that EXIF data turns: transformers turn it, and vLLM does not.

    Raises:
        ValueError: the orientation is another one than upright.
    """
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (number,) = struct.unpack_from(f"{order}H", exif, start)
        for place in range(start + 2, start + 2 + 12 * number, 12):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, place)
            if tag == EXIF_ORIENTATION and UPRIGHT < value <= 8:
                raise ValueError(
                    f"is turned by its EXIF data (orientation {value}), which engines and trainers read differently; "
                    "save it upright"
                )
    except struct.error:
        return  # damaged EXIF data turns nothing
