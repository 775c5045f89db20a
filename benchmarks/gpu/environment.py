"""Phase `env`: versions, compilers, and the functions of torch on which the choice of kernels rests."""

import inspect
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch

from actors.models.attention import implementation
from actors.models.attention.varlen import has_varlen
from actors.process.devices import has_gpu
from actors.process.packages import c_compiler, is_installed
from benchmarks.gpu.phases import Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import package_version
from schemas.config.model import ModelConfig

PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "flash-attn",
    "flash-attn-4",
    "liger-kernel",
    "safetensors",
    "tokenizers",
    "torchao",
    "triton",
    "vllm",
)


def measure(setting: Setting, report: Report) -> None:
    """Write versions and the answers of this machine."""
    report.put("packages", {name: package_version(name) for name in PACKAGES})
    report.put("compilers", {"CC": c_compiler(), "g++": shutil.which("g++"), "nvcc": shutil.which("nvcc")})
    report.put("has_gpu", has_gpu())
    report.put("nvidia_smi", asked(_nvidia_smi))
    spec = find_spec("flash_attn")
    report.put("flash_attn", {"found": spec is not None, "has_code": is_installed("flash_attn")})
    report.put("varlen", {"used": has_varlen(), "signature": asked(_varlen_signature)})
    names = {}
    for dtype in ("bfloat16", "float32"):
        config = ModelConfig.model_validate({"path": "none", "dtype": dtype})
        names[dtype] = asked(lambda config=config: implementation(config, setting.device))
    report.put("attention_auto", names)
    report.put("sdpa_order", asked(_sdpa_order))
    report.put("product_with_float32_result", asked(lambda: str(_product(setting).dtype)))
    report.put("fa3_fa4", hasattr(torch.nn.attention, "activate_flash_attention_impl"))
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        report.put("gpu", {"name": properties.name, "capability": list(torch.cuda.get_device_capability())})
        report.put("processors", properties.multi_processor_count)
        report.put("l2_bytes", asked(lambda: properties.L2_cache_size))
        report.put("memory_bytes", {"free": free, "total": total})
        report.put("bfloat16", torch.cuda.is_bf16_supported())


def asked(question: Callable[[], Any]) -> Any:
    """Return an answer, or the error as words: what a machine lacks is an answer too."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - see above
        return {"no": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def _nvidia_smi() -> list[str]:
    fields = "name,driver_version,memory.total,memory.used,mig.mode.current,compute_mode,clocks.sm,clocks.mem"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.splitlines()


def _varlen_signature() -> str:
    from torch.nn.attention.varlen import varlen_attn

    return str(inspect.signature(varlen_attn))


def _sdpa_order() -> list[str]:
    from torch.nn.attention import SDPBackend

    names = {int(cast("int", value)): name for name, value in SDPBackend.__members__.items()}
    return [names.get(number, str(number)) for number in torch._C._get_sdp_priority_order()]


def _product(setting: Setting) -> torch.Tensor:
    return torch.mm(setting.randn(16, 16), setting.randn(16, 16), out_dtype=torch.float32)
