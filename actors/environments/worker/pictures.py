"""Files of images in an environment's messages: read here, since a rollout actor may be on another machine."""

import stat
from pathlib import Path

from .tools import Json
from .wire import MESSAGE_BYTES


def with_files(messages: list[Json]) -> list[Json]:
    """Return messages with bytes in the place of each `path` of an image. Relative paths are of the working directory.

    Raises:
        ValueError: the file is no regular one, or has more bytes than a message holds.
        OSError: the file can't be read.
    """
    return [
        message | {"content": [_with_file(part) for part in content]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _with_file(part: object) -> object:
    if not (isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("path"), str)):
        return part
    file = Path(part["path"])
    found = file.stat()
    # a pipe would be waited for
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"the image {file} is no regular file")
    if found.st_size > MESSAGE_BYTES:
        raise ValueError(f"the image {file} has {found.st_size} bytes, and a message holds {MESSAGE_BYTES}")
    return {"type": "image", "bytes": file.read_bytes()}
