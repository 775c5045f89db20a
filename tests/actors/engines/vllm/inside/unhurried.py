"""An extension of vLLM's worker for tests: each step takes some milliseconds more, as one of a larger model does.

With a tiny model the core is a thousand tokens ahead of the HTTP server, which then hears of nothing until the end.
"""

import time
from typing import Any

from grpo_actors_worker import Extension
from vllm.v1.worker.gpu_worker import Worker

STEP_SECONDS = 0.005

_at_full_speed = Worker.execute_model


def _unhurried(self: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(STEP_SECONDS)
    return _at_full_speed(self, *args, **kwargs)


Worker.execute_model = _unhurried


class Unhurried(Extension):
    """Becomes a base class of the worker; the module has done the rest."""
