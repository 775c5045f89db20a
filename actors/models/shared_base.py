"""One copy of the frozen base on a device: the trainer's, which engines on the same device map (`up.share_base`).

The trainer copies the base into one block of memory, as channel `device` does with published weights, and writes a
manifest into the run's folder: the block's handle, and the place of each tensor in it. An engine on the same device
maps the block in place of loading the model's files. Tensors of one axis (norms, biases) are small, and an engine
copies them, since noise is put on norms in place.

Weights that servers join (q, k and v; gate and up) are neighbours in the block without a gap, so a joined matrix is one
stretch of it. The block lives as long as the trainer. When the trainer ends, the engine starts again, and maps the next
trainer's block.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from actors.process.devices import visible_gpus
from bus.weights.device_memory import Block
from bus.weights.inside.grpo_actors_handles import Handle, TensorPlace, opened, tensors_in
from schemas.errors import ConfigError

log = structlog.get_logger("models")

MANIFEST = "shared_base.json"
"""Name of the manifest in the run's folder."""
ALIGNMENT = 16
"""Bytes at whose multiples tensors begin: other addresses may round sums otherwise."""
ROWS = 64
"""Servers round the vocabulary up to a multiple of this number, with rows of zeros."""
PATIENCE_SECONDS = 600.0
"""Seconds in which a trainer loads its model."""
POLL_SECONDS = 0.2
"""Seconds between two looks for a manifest."""


@dataclass(frozen=True)
class Manifest:
    """Description of a base in memory, for other processes of the machine."""

    path: Path
    """File with this description."""
    owner: str
    """Process that owns the block, as `process_of` names it."""
    handle: Handle
    tensors: list[TensorPlace]
    """Place of each tensor, by its name in the model."""
    rooms: dict[str, int]
    """Bytes of zeros behind a tensor that has room for more rows."""

    @property
    def is_living(self) -> bool:
        """True while the owner lives. Its memory on a GPU is gone with it."""
        number, _, _ = self.owner.partition(":")
        return process_of(int(number)) == self.owner

    def ended(self) -> str:
        """Return the reason why the weights may be gone; empty while the owner lives."""
        if self.is_living:
            return ""
        return "the trainer with the shared base has ended (up.share_base); this engine starts again with the next one"

    def is_here(self) -> bool:
        """Return whether this process can map the block: it is in host memory, or on a GPU that this process sees."""
        # torch leaves out the driver's GPU- in front
        seen = {gpu.uuid.removeprefix("GPU-") for gpu in visible_gpus() or ()}
        return "file" in self.handle or self.handle["gpu"].removeprefix("GPU-") in seen


def process_of(number: int) -> str:
    """Return the name of a process that no other process of any machine has, NUMBER:START:BOOT; empty if it is gone."""
    try:
        # the name of the program may contain spaces and brackets; the start is the 20th word behind it
        words = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # without memory of its own (the 21st word) a process is about to end
    is_dead = words[0] in ("Z", "X") or words[20] == "0"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "" if is_dead else f"{number}:{words[19]}:{boot}"


def share(model: Any, device: torch.device, folder: Path) -> Block:
    """Move all weights of a model into one block on a device, and write the manifest; return the block.

    The parameters stay the same objects. Other tensors of the model are moved to the device too.

    Args:
        model: model without an adapter, in host memory.
        device: device of computation.
        folder: folder of the run.
    """
    joined = list(_neighbours(model).values())
    starts: list[dict[str, int]] = []
    rooms: dict[str, int] = {}
    padded = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    sizes = []
    for group in joined:
        end, start_of = 0, dict[str, int]()
        for name, parameter in group.items():
            end = -(-end // ALIGNMENT) * ALIGNMENT
            start_of[name] = end
            end += parameter.nbytes
            if id(parameter) in padded:
                rooms[name] = (-parameter.shape[0] % ROWS) * parameter[0].nbytes
                end += rooms[name]
        starts.append(start_of)
        sizes.append(end)
    block = Block(sizes, device)
    places: list[TensorPlace] = []
    for flat, begin, group, start_of in zip(block, block.starts, joined, starts, strict=True):
        flat.zero_()
        for name, parameter in group.items():
            part = flat[start_of[name] : start_of[name] + parameter.nbytes].view(parameter.dtype)
            parameter.data = part.view(parameter.shape).copy_(parameter.data)
            places.append(
                (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape), begin + start_of[name])
            )
    model.to(device)
    record = {"owner": process_of(os.getpid()), "handle": block.handle(), "tensors": places, "rooms": rooms}
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".{MANIFEST}.{os.getpid()}"
    staging.write_text(json.dumps(record), encoding="utf-8")
    staging.replace(folder / MANIFEST)
    log.info("base shared with engines", bytes=sum(sizes), device=str(device))
    return block


def find(folder: Path, timeout: float) -> Manifest | None:
    """Return the manifest of a living trainer, waiting for it; None if its block is on another GPU than ours.

    Args:
        folder: folder of the run.
        timeout: seconds to wait.

    Raises:
        TimeoutError: there was none in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = read(folder)
        if found is not None and found.is_living:
            if found.is_here():
                return found
            log.info("this engine has another GPU than the trainer, so it loads the base itself (up.share_base)")
            return None
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"up.share_base: no living trainer of this machine has written {folder / MANIFEST} within "
                f"{timeout:g} s; start trainer-0 on this machine, or set up.share_base: false"
            )
        time.sleep(POLL_SECONDS)


def read(folder: Path) -> Manifest | None:
    """Return the manifest in a run's folder; None if there is none."""
    try:
        return Manifest(path=folder / MANIFEST, **json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def use(model: nn.Module, manifest: Manifest) -> None:
    """Replace a model's weights of two axes and more by the shared ones, in place.

    Args:
        model: the same model, with its own weights, without an adapter.
        manifest: description of the shared weights.

    Raises:
        OSError, ValueError: the block can't be mapped.
        ConfigError: it holds another model.
    """
    shared: Mapping[str, Tensor] = tensors_in(opened(manifest.handle), manifest.tensors)
    own = dict(model.named_parameters())
    if {name: (p.shape, p.dtype) for name, p in own.items()} != {n: (t.shape, t.dtype) for n, t in shared.items()}:
        raise ConfigError("up.share_base: the trainer has another model; are model.path and model.dtype the same here?")
    for name, parameter in own.items():
        if parameter.ndim > 1:
            parameter.data = shared[name]


def _neighbours(model: nn.Module) -> dict[Any, dict[str, nn.Parameter]]:
    """Return the parameters in groups of neighbours: those of sibling modules with one name and number of axes."""
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        groups.setdefault((module.rpartition(".")[0], leaf, parameter.ndim), {})[name] = parameter
    return groups
