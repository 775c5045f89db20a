"""Copies of a learner's state, from which checkpoints are written while training continues."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.algorithms.entropy import EntropyControl
from actors.process.tasks import task

if TYPE_CHECKING:
    from torch import Tensor

    from actors.learner.optimizer import PolicyOptimizer
    from actors.learner.optimizer_states import State

ENTROPY_CONTROL = "trainer/entropy_control.json"
OPTIMIZER, OPTIMIZER_NUMBERS = "trainer/optimizer.safetensors", "trainer/optimizer.json"
"""Files below a checkpoint's folder."""


@dataclass(frozen=True)
class Snapshot:
    """Tensors on the CPU, and texts, by file name below the checkpoint's folder. Never changed after creation."""

    tensors: "dict[str, dict[str, Tensor]]" = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    write_model: Callable[[Path], None] = lambda folder: None
    """Function that writes the files for which transformers has code: shards, configuration, the model's own code."""
    model_bytes: int = 0
    """Bytes of the tensors that `write_model` writes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without their headers."""
        tensors = sum(tensor.nbytes for file in self.tensors.values() for tensor in file.values())
        return self.model_bytes + tensors + sum(map(len, self.texts.values()))

    def write(self, folder: Path) -> None:
        """Write all files into an empty folder."""
        from safetensors.torch import save_file

        self.write_model(folder)
        for name, tensors in self.tensors.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / name)
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)

    def with_text(self, name: str, text: str) -> "Snapshot":
        """Return a copy with one more text file."""
        return replace(self, texts=self.texts | {name: text.encode()})

    def with_files(self, other: "Snapshot") -> "Snapshot":
        """Return a copy with the tensors and texts of another snapshot added."""
        return replace(self, tensors=self.tensors | other.tensors, texts=self.texts | other.texts)


def copied(tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
    """Return copies on the CPU, made one by one, which later steps do not change."""
    # copy=True: on a CPU `to` would return the tensor itself, which the next step changes. safetensors wants contiguous
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def optimizer_snapshot(optimizer: "PolicyOptimizer", keep: bool = True) -> Snapshot:
    """Return the optimizer's state as files under `trainer/`: safetensors and JSON, no pickle.

    Keys are `PARAMETER/STATE`.

    There is no random state in it, as a step seeds its generators from the run's seed, the step's number and the rank.

    Args:
        optimizer: optimizer of this rank.
        keep: True on the saving rank. Each rank must call, to lend parts of states spread over ranks.
    """
    from actors.learner.shards import gathered

    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for parameter, name, value in optimizer.states():
        key = f"{parameter}/{name}"
        if isinstance(value, int):
            numbers[key] = value
        else:
            tensors |= copied(gathered([(key, value)], keep))
    return Snapshot({OPTIMIZER: tensors}, {OPTIMIZER_NUMBERS: json.dumps(numbers).encode()})


def restore_optimizer(folder: Path, optimizer: "PolicyOptimizer") -> None:
    """Restore an optimizer over the same parameters from the files of `optimizer_snapshot` in a folder."""
    optimizer.restore(_saved_states(folder))


def _saved_states(folder: Path) -> "Iterator[tuple[str, State]]":
    """Yield (parameter, state) one after the other, so that only one parameter's state is in memory twice."""
    from safetensors import safe_open

    numbers = json.loads((folder / OPTIMIZER_NUMBERS).read_text(encoding="utf-8"))
    with safe_open(folder / OPTIMIZER, "pt") as file:
        keys: dict[str, list[str]] = {}
        for key in (*file.keys(), *numbers):
            keys.setdefault(key.partition("/")[0], []).append(key)  # names have no slash
        with task("restore optimizer", len(keys), "weights") as restoring:
            for parameter, its in keys.items():
                found = {key: numbers[key] if key in numbers else file.get_tensor(key) for key in its}
                yield parameter, {key.partition("/")[2]: value for key, value in found.items()}
                restoring.advance()


def control_snapshot(control: EntropyControl) -> Snapshot:
    """Return the state of adaptive entropy; empty before the first entropy was seen."""
    # before the first entropy the state is the initial one, and JSON has no NaN
    if not math.isfinite(control.entropy):
        return Snapshot()
    return Snapshot(texts={ENTROPY_CONTROL: json.dumps(asdict(control)).encode()})


def restored_control(folder: Path, begin: EntropyControl) -> EntropyControl:
    """Return the state saved by `control_snapshot` below a folder; `begin` if none was saved."""
    path = folder / ENTROPY_CONTROL
    return EntropyControl(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else begin
