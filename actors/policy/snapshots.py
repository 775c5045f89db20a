"""A learner's state as data, apart from the live model: what a checkpoint is written from while training goes on."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.algorithms.entropy import EntropyControl

if TYPE_CHECKING:
    from torch import Tensor, optim

ENTROPY_CONTROL = "trainer/entropy_control.json"


@dataclass(frozen=True)
class Snapshot:
    """Tensors on the CPU and texts, by file below the checkpoint's folder. Nothing here changes any more."""

    tensors: "dict[str, dict[str, Tensor]]" = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    write_model: Callable[[Path], None] = lambda folder: None
    """Writes what transformers itself knows best how to write: shards, configuration, code that came with the model."""

    def write(self, folder: Path) -> None:
        """All files, into an empty folder."""
        from safetensors.torch import save_file

        self.write_model(folder)
        for name, tensors in self.tensors.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / name)
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)

    def with_text(self, name: str, text: str) -> "Snapshot":
        """With one more file."""
        return replace(self, texts=self.texts | {name: text.encode()})

    def with_files(self, other: "Snapshot") -> "Snapshot":
        """With the tensors and texts of another one."""
        return replace(self, tensors=self.tensors | other.tensors, texts=self.texts | other.texts)


def copied(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Copies on the CPU, which the next step does not touch."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def optimizer_snapshot(optimizer: "optim.Optimizer") -> Snapshot:
    """Optimizer state under `trainer/`, as safetensors and JSON: data only, no pickle.

    There is no random state in it: a step seeds its generators from the run's seed, its number and its rank.
    """
    state = optimizer.state_dict()
    tensors = {f"{index}.{name}": value for index, values in state["state"].items() for name, value in values.items()}
    groups = json.dumps(state["param_groups"]).encode()
    return Snapshot({"trainer/optimizer.safetensors": copied(tensors)}, {"trainer/optimizer.json": groups})


def restore_optimizer(folder: Path, optimizer: "optim.Optimizer") -> None:
    """What `optimizer_snapshot` wrote below this folder, into an optimizer over the same parameters."""
    from safetensors.torch import load_file

    state: dict[int, dict[str, Any]] = {}
    for key, value in load_file(folder / "trainer" / "optimizer.safetensors").items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = json.loads((folder / "trainer" / "optimizer.json").read_text(encoding="utf-8"))
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def control_snapshot(control: EntropyControl) -> Snapshot:
    """What adaptive entropy goes on from; nothing before it has seen an entropy, which is how it begins."""
    if not math.isfinite(control.entropy):
        return Snapshot()
    return Snapshot(texts={ENTROPY_CONTROL: json.dumps(asdict(control)).encode()})


def restored_control(folder: Path, begin: EntropyControl) -> EntropyControl:
    """What `control_snapshot` wrote below this folder; `begin` where it wrote nothing."""
    path = folder / ENTROPY_CONTROL
    return EntropyControl(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else begin
