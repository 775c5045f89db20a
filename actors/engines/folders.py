"""A version of the weights as a folder that a server of others reads: where the channel has laid it, else written here.

A server with two safetensors files in a folder takes the tensors of both. So what a version lacks can lie beside it.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from actors.environments.prompts import model_file
from bus.weights import Weights
from bus.weights.filesystem import FILE_NAMES
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
COMPUTED = "rotary_emb.inv_freq"
"""In some old files, though it is no weight."""


class Folders:
    """Makes the folders of versions below `scratch`; those of the channel are used as they are.

    Args:
        scratch: a folder.
        reader: who reads them, for errors.

    Raises, wherever it writes:
        ValueError: there is no room; names the key that says where.
    """

    def __init__(self, scratch: Path, reader: str) -> None:
        self._scratch, self._reader = scratch, reader
        self.close()  # of a life before

    def adapter(self, name: str, weights: Weights) -> Path:
        """A PEFT adapter."""
        return Path(weights.directory) if weights.directory else self._write(name, weights)

    def full(self, name: str, weights: Weights, with_head: bool) -> Path:
        """All weights.

        Args:
            name: of the version.
            weights: of the channel.
            with_head: write out an output head that is tied to the embedding. A server on CPUs packs the head into
                another layout, and packs it anew only when a tensor of its name is loaded; without one it would go on
                with the old head.

        Raises:
            ValueError: the head is tied to an embedding of unknown name.
        """
        folder = Path(weights.directory) if weights.directory else self._write(name, weights)
        shapes = shapes_of(folder / FILE_NAMES["full"])
        if not with_head or HEAD in shapes:
            return folder
        embeddings = [tensor for tensor in shapes if tensor.endswith(EMBEDDING)]
        if len(embeddings) != 1:
            raise ValueError(
                f"tied embeddings can't be loaded into {self._reader} on a CPU: found {embeddings} as {EMBEDDING}"
            )
        return self._beside(name, folder / FILE_NAMES["full"], embeddings[0])

    def norms(self, name: str, norms: "dict[str, torch.Tensor]") -> Path:
        """A file with the norms of a version alone."""
        path = self._scratch / name / "norms.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._save(norms, path)
        return path

    def forget(self, name: str) -> None:
        """Remove what was written for a version."""
        shutil.rmtree(self._scratch / name, ignore_errors=True)

    def close(self) -> None:
        """Remove all that was written."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _write(self, name: str, weights: Weights) -> Path:
        folder = self._scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, text in weights.files.items():
            (folder / file_name).write_text(text, encoding="utf-8")
        self._save(weights.tensors, folder / FILE_NAMES[weights.content])
        return folder

    def _beside(self, name: str, weights: Path, embedding: str) -> Path:
        """A folder with the weights and, in a file of its own, the head that they lack."""
        from safetensors import safe_open

        folder = self._scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        if weights.parent != folder:
            (folder / weights.name).symlink_to(weights)
        with safe_open(weights, "pt") as file:
            self._save({HEAD: file.get_tensor(embedding)}, folder / "head.safetensors")
        return folder

    def _save(self, tensors: "dict[str, torch.Tensor]", path: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # here: torch is slow to import

        try:
            save_file(tensors, path)
        except (SafetensorError, OSError) as error:
            shutil.rmtree(path.parent, ignore_errors=True)
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            raise ValueError(
                f"{num_bytes / 1e9:.2f} GB of weights can't be written for {self._reader} to {self._scratch}: {error}; "
                "set weights.directory to a folder with room, on this machine"
            ) from error


def shapes_of(path: Path) -> Shapes:
    """Names and shapes of the tensors in a safetensors file, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


def model_files(model: ModelConfig) -> list[Path]:
    """The model's own weights.

    Raises:
        ConfigError: it has no safetensors.
    """
    try:
        index = model_file(model, INDEX)
    except ConfigError:
        return [model_file(model, FILE_NAMES["full"])]
    parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [model_file(model, part) for part in parts]


def model_shapes(model: ModelConfig) -> Shapes:
    """Of the model's own files.

    Raises:
        ConfigError: it has no safetensors.
    """
    return {name: shape for path in model_files(model) for name, shape in shapes_of(path).items()}


def vocab_size(model: ModelConfig) -> int:
    """Tokens that the model knows, as its config.json says."""
    settings = json.loads(model_file(model, "config.json").read_text(encoding="utf-8"))
    return int(settings.get("text_config", {}).get("vocab_size") or settings["vocab_size"])


def check_fit(model: Shapes, version: Shapes) -> None:
    """Refuse a version that is not all of this model: what it lacks would silently stay as it is.

    Raises:
        ValueError: names what differs.
    """
    optional = {name for name in model if name.endswith(COMPUTED) or name == HEAD}
    missing = sorted(model.keys() - version.keys() - optional)
    unknown = sorted(version.keys() - model.keys() - {HEAD})
    if missing or unknown:
        raise ValueError(f"the tensors differ from the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in version.items():
        if shape != model.get(name, shape):
            raise ValueError(f"{name} has shape {shape}, the model's has {model[name]}")
