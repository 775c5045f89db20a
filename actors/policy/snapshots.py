"""A learner's state as data, apart from the live model: what a checkpoint is written from while training goes on."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.algorithms.entropy import EntropyControl

if TYPE_CHECKING:
    from torch import Tensor

    from actors.policy.optimizer import PolicyOptimizer

ENTROPY_CONTROL = "trainer/entropy_control.json"
OPTIMIZER, OPTIMIZER_NUMBERS = "trainer/optimizer.safetensors", "trainer/optimizer.json"


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


def copied(tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
    """Copies on the CPU, which the next step does not touch; made one by one."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def optimizer_snapshot(optimizer: "PolicyOptimizer", keep: bool = True) -> Snapshot:
    """Optimizer state under `trainer/`, as safetensors and JSON: data only, no pickle. Keys are `PARAMETER/STATE`.

    There is no random state in it: a step seeds its generators from the run's seed, its number and its rank.

    Args:
        optimizer: of this rank.
        keep: whether this rank is the one that saves; of states that are spread over ranks each rank tells its part.
    """
    from actors.policy.shards import gathered

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
    """What `optimizer_snapshot` wrote below this folder, into an optimizer over the same parameters."""
    optimizer.restore(_saved_states(folder))


def _saved_states(folder: Path) -> "Iterator[tuple[str, str, Tensor | int]]":
    """One after the other, so that no more than one is in memory twice."""
    from safetensors import safe_open

    with safe_open(folder / OPTIMIZER, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            parameter, _, name = key.partition("/")
            yield parameter, name, file.get_tensor(key)
    for key, number in json.loads((folder / OPTIMIZER_NUMBERS).read_text(encoding="utf-8")).items():
        parameter, _, name = key.partition("/")
        yield parameter, name, number


def control_snapshot(control: EntropyControl) -> Snapshot:
    """What adaptive entropy goes on from; nothing before it has seen an entropy, which is how it begins."""
    if not math.isfinite(control.entropy):
        return Snapshot()
    return Snapshot(texts={ENTROPY_CONTROL: json.dumps(asdict(control)).encode()})


def restored_control(folder: Path, begin: EntropyControl) -> EntropyControl:
    """What `control_snapshot` wrote below this folder; `begin` where it wrote nothing."""
    path = folder / ENTROPY_CONTROL
    return EntropyControl(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else begin
