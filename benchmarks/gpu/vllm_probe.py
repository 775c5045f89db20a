"""Phase `vllm_probe`: whether the compiled libraries of an installed vLLM load into this torch.

vLLM itself is not imported: it wants its own version of torch, and dozens of other packages.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import package_version


def measure(setting: Setting, report: Report) -> None:
    """Load each library."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NotHereError("vllm is not installed")
    report.put("vllm", package_version("vllm"))
    folder = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(folder.glob("*.so")):
        with report.case("libraries", {"library": path.name}) as found:
            torch.ops.load_library(str(path))
            found["loaded"] = True
