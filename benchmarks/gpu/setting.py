"""Setting of all phases: device, sizes, models; and the clocks with which phases measure."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.learner.devices import Stopwatch
from benchmarks.trainer_cases import QWEN3, Shape, config_of, status_bytes, write_model
from schemas.config import RunConfig

Size = TypeVar("Size")
TOY = Shape(320, 64, 128, 2, 4, 2, 16)
"""Model of the rehearsal. Widths are multiples of 64, as NF4 on a CPU wants."""


@dataclass(frozen=True)
class Setting:
    """Place and size of the measurements.

    Args:
        device: `cuda` or `cpu`.
        tiny: toy sizes, to rehearse every line of a phase in seconds.
        folder: folder for models, kept between calls.
    """

    device: torch.device
    tiny: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    def size(self, real: Size, toy: Size) -> Size:
        """Return the real size, or the toy size of a rehearsal."""
        return toy if self.tiny else real

    @property
    def shape(self) -> Shape:
        """Shape of Qwen3-0.6B, or the toy's."""
        return self.size(QWEN3, TOY)

    def model(self, shape: Shape | None = None, logit_std: float = 3.0) -> Path:
        """Return the directory of a model with random weights in bfloat16, made on the device once.

        Args:
            shape: shape of the model; None: of Qwen3-0.6B, or the toy's.
            logit_std: standard deviation of the logits.
        """
        shape = shape or self.shape
        numbers = "-".join(map(str, vars(shape).values()))
        folder = self.folder / f"{self.device.type}-{numbers}-{logit_std:g}"
        if not (folder / "done").exists():
            write_model(folder, shape, dtype="bfloat16", device=str(self.device), logit_std=logit_std)
            (folder / "done").touch()
        return folder

    def config(self, folder: Path, sequence_len: int, model: dict[str, Any], **trainer: Any) -> RunConfig:
        """Return the configuration of a run on the device, which neither stops nor warns for a mismatch.

        Args:
            folder: directory of the model.
            sequence_len: tokens of a row.
            model: further keys of `model`; `device` may be another one.
            trainer: keys of `trainer`.
        """
        keys = {"device": self.device.type} | model
        return config_of(folder, sequence_len, keys, mismatch={"warn": 1e9, "stop": None}, **trainer)

    def with_device(self, device: str) -> "Setting":
        """Return the setting on another device."""
        return replace(self, device=torch.device(device))

    # --- measuring -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def fresh(self) -> None:
        """Return freed memory to the device, and count the peak from here."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most memory allocated since `fresh`; on a CPU the most that the process ever had."""
        return int(torch.cuda.max_memory_allocated()) if self.on_gpu else status_bytes("VmHWM")

    def timed(self, work: Callable[[], object], calls: int = 5, warmup: int = 2) -> dict[str, float]:
        """Return the median milliseconds of a call: of the device, and of the program that gives the device its work.

        Where both are equal, the program is the slower one, or the call waits for the device itself.
        """
        for _ in range(warmup):
            work()
        self.synchronize()
        watch, host = Stopwatch(self.device), []
        watch.mark()
        for _ in range(calls):
            started = time.perf_counter()
            work()
            host.append(time.perf_counter() - started)
            watch.mark()
        return {"ms": 1e3 * statistics.median(watch.laps()), "host_ms": 1e3 * statistics.median(host)}

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return random values on the device: products of zeros take less power, and so less time, than real ones."""
        return torch.randn(*shape, device=self.device, dtype=dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖ in float64; NaN if a value is NaN.

    Where all expected values are 0, the result is the root mean square of the found ones.
    """
    exact = expected.detach().double().cpu()
    scale = exact.norm() if exact.any() else exact.numel() ** 0.5
    return float((found.detach().double().cpu() - exact).norm() / scale)


def worst(errors: Sequence[float]) -> float:
    """Return the largest error; NaN if any is NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
