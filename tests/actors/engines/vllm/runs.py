"""What whole runs with a real vLLM have in common."""

from collections.abc import Callable
from typing import Any

VLLM: dict[str, Any] = {
    "type": "vllm",
    "max_model_len": 64,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "startup_timeout": 300.0,
}

Say = Callable[[str], None]
