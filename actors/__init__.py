"""Five kinds of actors, the packages they are made of, and the commands on a run.

Names for programs and notebooks: `GRPOTrainer`, `GRPOConfig`, `load_run`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.api.grpo_config import GRPOConfig
    from actors.api.grpo_trainer import GRPOTrainer
    from actors.api.run_files import load_run

__all__ = ["GRPOConfig", "GRPOTrainer", "load_run"]

_PLACES = {
    "GRPOConfig": "actors.api.grpo_config",
    "GRPOTrainer": "actors.api.grpo_trainer",
    "load_run": "actors.api.run_files",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used first, so that `import actors` and the command line stay light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
