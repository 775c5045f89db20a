"""Folders with a version of the weights for an external server: laid out by the channel, or written here.

A server that finds two safetensors files in a folder loads the tensors of both. So tensors that a version lacks can be
added as a second file.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.models.tokenizer import model_file
from bus.run_folder import Scratch, remove_folder
from bus.weights import Weights, check_files
from bus.weights.filesystem import FILE_NAMES, no_room
from bus.weights.inside.grpo_actors_handles import TensorPlace
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

INDEX = "model.safetensors.index.json"
"""Index of a model in several safetensors files."""
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
COMPUTED = "rotary_emb.inv_freq"
"""Name ending of computed values, present as tensors in some old files."""


class Staging:
    """Folders of versions below `scratch`. Folders laid out by the channel are used as they are.

    Args:
        scratch: scratch folder of the engine's actor.
        reader: name of the reading software, for errors.

    Raises, in every method that writes:
        ValueError: the disk is full (names the key for another place), or a file of the version has an unexpected name.
    """

    def __init__(self, scratch: Scratch, reader: str) -> None:
        self._scratch, self._reader = scratch, reader

    def adapter(self, name: str, weights: Weights) -> Path:
        """Return the folder of a PEFT adapter."""
        return Path(weights.directory) if weights.directory else self._write(name, weights)

    def full(self, name: str, weights: Weights, with_head: bool) -> Path:
        """Return the folder of all weights.

        Args:
            name: name of the version.
            weights: weights from the channel.
            with_head: write out an output head tied to the embedding. A server on CPUs packs the head into another
                layout, and repacks the head only when a tensor of this name is loaded; otherwise the old head stays.

        Raises:
            ValueError: the head is tied to an embedding of unknown name.
        """
        folder = Path(weights.directory) if weights.directory else self._write(name, weights)
        shapes = shapes_of(folder / FILE_NAMES["full"])
        if not with_head or HEAD in shapes:
            return folder
        embedding = tied_to(shapes, self._reader)
        from safetensors import safe_open  # imported here: torch is slow to import

        weights_file, beside = folder / FILE_NAMES["full"], self._scratch.make() / name
        beside.mkdir(parents=True, exist_ok=True)
        # the channel's file is linked, not copied: a server reads both files of a folder
        if folder != beside:
            (beside / weights_file.name).symlink_to(weights_file)
        with safe_open(weights_file, "pt") as file:
            self._save({HEAD: file.get_tensor(embedding)}, beside / "head.safetensors")
        return beside

    def norms(self, name: str, norms: "dict[str, torch.Tensor]") -> Path:
        """Write a file with only the norms of a version; return the path."""
        path = self._scratch.make() / name / "norms.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._save(norms, path)
        return path

    def forget(self, name: str) -> None:
        """Remove everything written for a version."""
        remove_folder(self._scratch.path / name)

    def close(self) -> None:
        """Remove everything written."""
        self._scratch.close()

    def _write(self, name: str, weights: Weights) -> Path:
        # names from the channel become names of files
        check_files(weights.content, weights.files)
        folder = self._scratch.make() / name
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, text in weights.files.items():
            (folder / file_name).write_text(text, encoding="utf-8")
        self._save(weights.tensors, folder / FILE_NAMES[weights.content])
        return folder

    def _save(self, tensors: "dict[str, torch.Tensor]", path: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # imported here: torch is slow to import

        try:
            save_file(tensors, path)
        except (SafetensorError, OSError) as error:
            remove_folder(path.parent)
            raise ValueError(str(no_room(tensors, self._scratch.path, error, self._reader))) from error


def tied_to(names: Iterable[str], reader: str) -> str:
    """Return the name of the embedding to which the output head is tied.

    Raises:
        ValueError: none, or more than one, has the usual name.
    """
    found = [name for name in names if name.endswith(EMBEDDING)]
    if len(found) != 1:
        raise ValueError(f"tied embeddings can't be loaded into {reader} on a CPU: found {found} as {EMBEDDING}")
    return found[0]


def with_head(places: Sequence[TensorPlace], reader: str) -> list[TensorPlace]:
    """Return the places of tensors in a block with the output head: tied, it lies where the embedding does.

    Raises:
        ValueError: as `tied_to`.
    """
    by_name = {place[0]: place for place in places}
    if HEAD in by_name:
        return list(places)
    _, dtype, shape, start = by_name[tied_to(by_name, reader)]
    return [*places, (HEAD, dtype, shape, start)]


def shapes_of(path: Path) -> Shapes:
    """Return names and shapes of the tensors in a safetensors file, from the header."""
    # the first 8 bytes are the header's size
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


def model_files(model: ModelConfig) -> list[Path]:
    """Return the files of the model's own weights.

    Raises:
        ConfigError: the model has no safetensors files.
    """
    try:
        index = model_file(model, INDEX)
    except ConfigError:
        # a model in a single file has no index
        return [model_file(model, FILE_NAMES["full"])]
    parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [model_file(model, part) for part in parts]


def model_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the model's own tensors.

    Raises:
        ConfigError: the model has no safetensors files.
    """
    return {name: shape for path in model_files(model) for name, shape in shapes_of(path).items()}


def vocab_size(model: ModelConfig) -> int:
    """Return the number of tokens in the model's vocabulary, from config.json."""
    settings = json.loads(model_file(model, "config.json").read_text(encoding="utf-8"))
    # multimodal models have it one level down
    return int(settings.get("text_config", {}).get("vocab_size") or settings["vocab_size"])


def check_fit(model: Shapes, version: Shapes) -> None:
    """Compare a version's tensors with the model's: a missing tensor would silently keep the old values.

    Raises:
        ValueError: tensors differ; with names and shapes.
    """
    optional = {name for name in model if name.endswith(COMPUTED) or name == HEAD}
    missing = sorted(model.keys() - version.keys() - optional)
    unknown = sorted(version.keys() - model.keys() - {HEAD})
    if missing or unknown:
        raise ValueError(f"the tensors differ from the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in version.items():
        if shape != model.get(name, shape):
            raise ValueError(f"{name} has shape {shape}, the model's has {model[name]}")
