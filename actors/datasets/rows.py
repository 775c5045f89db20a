"""Rows of data files as examples: the prompt of a row, with checks that name the row and the column."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from actors.datasets.base import Example, is_message
from actors.datasets.image_parts import urls_of, with_images
from actors.datasets.images import ImageSource, values_of
from schemas.errors import ConfigError


class PromptKeys(NamedTuple):
    """Keys that make the prompt of a row."""

    column: str
    """Column of the prompt."""
    named_by: str
    """Configuration key that names the column, for errors."""
    system: str | None
    """System message in front of each prompt; None or empty: none."""
    chat: bool
    """Conversion of text prompts to a user message."""
    may_be_empty: bool = False
    """True for rows of an environment, which may make prompts of its own."""
    cut_answer: bool = False
    """Removal of the assistant's messages at the end."""
    images: ImageSource | None = None
    """Origin of images; None: prompts have none."""


def to_example(row: Any, keys: PromptKeys, where: str) -> Example:
    """Return the example of a row.

    Args:
        row: value of the row; its prompt is taken out.
        keys: keys of the prompt.
        where: key, file and row, for errors.

    Raises:
        ConfigError: the row is no object, has no prompt, or its prompt can't be used.
    """
    column = keys.column
    if keys.may_be_empty and isinstance(row, dict):
        row.setdefault(column, "")
    if not isinstance(row, dict) or column not in row:
        found = f"its columns are {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
        raise ConfigError(f"{where}: no column {column!r} ({keys.named_by}); {found}")
    value: Any = row.pop(column)
    system = [{"role": "system", "content": keys.system}] if keys.system else []
    if value == "" and keys.may_be_empty:
        return Example(system or "", row, is_known_by_columns=True)
    in_column = _take_images(row, keys, where)
    if isinstance(value, str) and (in_column or system or keys.chat):
        # plain text stays text for models without a chat template; a system prompt, `chat` or an image makes it a
        # message
        value = [{"role": "user", "content": value}]
    if isinstance(value, str):
        return Example(prompt=value, columns=row)
    if not (isinstance(value, list) and value and all(map(is_message, value))):
        raise ConfigError(
            f"{where}: the prompt must be text, or a list of messages with `role` and `content` (text or a list)"
        )
    messages = _without_answer(value, where) if keys.cut_answer else value
    messages, images = with_images(messages, in_column, keys.images, f"{where}, column {column!r}")
    return Example(prompt=[*system, *messages], columns=row, images=images)


def image_urls(row: Any, keys: PromptKeys) -> Iterator[str]:
    """Yield the URLs of the images of a row's prompt; none of a faulty row."""
    if isinstance(row, dict) and keys.images is not None:
        column = keys.images.keys.column
        yield from urls_of(row.get(keys.column), values_of(row.get(column)) if column else [])


def without_nulls(value: Any) -> Any:
    """Return a value without fields that are null, at any depth: a table has every field in every row."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _without_answer(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return messages without the assistant's at the end."""
    num_kept = len(messages)
    while num_kept and messages[num_kept - 1]["role"] == "assistant":
        num_kept -= 1
    if not num_kept:
        raise ConfigError(f"{where}: all messages are of the assistant, so cut_answer leaves no prompt")
    return messages[:num_kept]


def _take_images(row: dict[str, Any], keys: PromptKeys, where: str) -> list[Any]:
    """Take the images out of a row's column, if a column is configured."""
    if keys.images is None or not (column := keys.images.keys.column):
        return []
    if column not in row:
        raise ConfigError(f"{where}: no column {column!r} (images.column); its columns are {', '.join(row)}")
    return values_of(row.pop(column))
