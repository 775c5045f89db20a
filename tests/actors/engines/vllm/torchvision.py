"""torchvision without its compiled operators, which vLLM imports for models that see images.

PyPI's builds are for CUDA, and can't be loaded beside a torch for CPUs. The operators are not needed for images, but
their names must be known when the package is imported.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch

OPERATORS = """import torch
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def install(folder: Path) -> str:
    """Put the package that fits to torch into a folder for PYTHONPATH; why it can't be had, or nothing."""
    minor = int(torch.__version__.split(".")[1]) + 15
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"torchvision==0.{minor}.*",
        "--no-deps",
        "-q",
        "-d",
        str(folder),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    wheels = [*folder.glob("torchvision-*.whl")]
    if found.returncode or not wheels:
        return found.stderr.strip()[-300:] or "pip has no torchvision"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if not name.endswith(".so")])
    extension = folder / "torchvision" / "extension.py"
    extension.write_text(OPERATORS + extension.read_text(encoding="utf-8"), encoding="utf-8")
    return ""
