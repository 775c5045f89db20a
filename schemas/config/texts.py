"""Texts of the configuration that may stand in files of their own, and the place of a file that the run reads."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

FOLDER = "folder"
"""Name of the folder of the configuration file in the context of a validation."""


def locate(path: str, folder: Path) -> Path:
    """Return the path of a file or folder that the run reads: next to the configuration, else in the current directory.

    A path that exists in neither is returned as next to the configuration, for the error text.
    """
    given = Path(path).expanduser() if path.startswith("~/") else Path(path)
    places = (folder / given, Path.cwd() / given)
    return next((place for place in places if place.exists()), places[0])


def _read(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() != {"file"} or not isinstance(value["file"], str):
        raise ValueError("must be a text, or {file: PATH}")
    path = locate(value["file"], (info.context or {}).get(FOLDER, Path.cwd()))
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as text: {getattr(error, 'strerror', None) or error}") from None


Text = Annotated[
    str,
    BeforeValidator(_read),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"file": {"type": "string", "description": "File with the text."}},
                    "required": ["file"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""Text, or `{file: PATH}` for the text of a file without line ends at its end. The loaded configuration has the text.

A relative path is looked up next to the configuration file first, then in the current directory.
"""
