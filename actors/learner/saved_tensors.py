"""Tensors of a checkpoint's folder, read one at a time."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor


class SavedTensors(Mapping[str, Tensor]):
    """Tensors of all safetensors files in a folder, by name. A tensor is read from disk when it is asked for.

    Args:
        opened: closes the files.
        folder: the folder.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is no safetensors file.
    """

    def __init__(self, opened: ExitStack, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = opened.enter_context(safe_open(path, "pt"))
            except SafetensorError as error:
                raise ValueError(f"{path}: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, from the files' headers alone."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
